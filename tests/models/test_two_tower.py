"""TwoTower: what is given to it wrong is named; samples without an item count nothing. Training: behaviour/test_sharing.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe.batch import Batch, Jagged, Streamed
from nestpipe.models import TwoTower

DIM = 4


def make_batch(items: list[list[int]] | None = None, **dense: Any) -> tuple[Batch, dict[str, Any]]:
    draw = torch.Generator().manual_seed(2)
    target = Jagged.from_lists([[5], [6], [5], [7]] if items is None else items)
    history = Jagged.from_lists([[1, 2], [], [3], [4]])
    rows = {name: part.like(torch.randn(len(part.values), DIM, generator=draw))
            for name, part in (("history", history), ("target", target))}  # fmt: skip
    return Batch({"history": history, "target": target}, dense), rows


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"dim": 0}, "dim must be a whole number of at least 1"),
        ({"width": 0}, "width must be a whole number of at least 1"),
        ({"hidden": 8}, "hidden must be a list of hidden widths"),
        ({"hidden": [8, 0]}, r"hidden\[1\] must be a whole number of at least 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"users": "history"}, "users must be a list of one or more features"),
        ({"users": []}, "users must be a list of one or more features"),
        ({"users": ["history", ""]}, r"users\[1\] must be a name"),
        ({"item": ""}, "item must be a name"),
        ({"in_batch": "worker"}, "in_batch must be one of 'global', 'micro-batch', got 'worker'"),
        ({"log_q": True}, "log_q must be one of 'batch', 'data', 'none', got True"),
        ({"normalize": 1}, "normalize must be true or false"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"temperature": float("nan")}, "temperature must be a number above 0"),
    ],
)
def test_wrong_arguments_are_named(argument: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"TwoTower: {problem}"):
        TwoTower(**({"dim": DIM} | argument))


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"item": "bought"}, "item is 'bought', which is no feature; there are history, target"),
        ({"users": ["history", "country"]}, r"users\[1\] is 'country', which is no feature"),
        ({"dim": DIM + 1}, r"has rows of 4 values, the model has dim=5; give its table dim=5"),
        ({"log_q": "data"}, r"log_q='data' needs batch.dense\['log_q'\].*set log_q = true in the data"),
    ],
)
def test_features_and_inputs_that_are_missing_are_named(argument: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TwoTower(**({"dim": DIM} | argument))(*make_batch())


@pytest.mark.parametrize(
    ("user", "got"),
    [
        (torch.zeros(4, 3), r"torch.float32 of shape \(4, 3\)"),
        (torch.zeros(4), r"torch.float32 of shape \(4,\)"),
        (Jagged.from_lists([[1], [2], [3], [4]]), "a Jagged"),
    ],
)
def test_a_user_that_is_no_number_for_each_sample_is_refused(user: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"batch.dense\['user'\] must be whole numbers \[B\].*got {got}"):
        TwoTower(dim=DIM)(*make_batch(user=user))


def test_rows_that_are_streamed_and_several_items_a_sample_are_refused() -> None:
    batch, rows = make_batch()
    streamed = Streamed(batch.keys["history"].offsets, lambda *_: torch.empty(0), lambda *_: None, torch.empty(0))
    with pytest.raises(ValueError, match="feature 'history' must have one row per key"):
        TwoTower(dim=DIM)(batch, {**rows, "history": streamed})
    with pytest.raises(ValueError, match="feature 'target' has 2 keys in sample 1; give each sample one item"):
        TwoTower(dim=DIM)(*make_batch([[5], [6, 8], [5], [7]]))


def test_a_sample_without_an_item_counts_nothing_and_is_nobodys_negative() -> None:
    torch.manual_seed(0)
    model = TwoTower(dim=DIM, hidden=[8], width=3)
    batch, rows = make_batch([[5], [], [6], [7]])
    output = model(batch, rows)
    assert output.weights.tolist() == [1, 0, 1, 1] and output.losses[1] == 0
    kept = torch.tensor([0, 2, 3])
    alone = model(batch.select(kept), {name: part.select(kept) for name, part in rows.items()})
    torch.testing.assert_close(output.losses[kept], alone.losses)
    nothing = model(*make_batch([[], [], [], []]))
    nothing.losses.sum().backward()
    assert nothing.losses.tolist() == [0] * 4 and nothing.weights.sum() == 0


def test_other_items_of_the_same_user_are_no_negatives() -> None:
    torch.manual_seed(0)
    model = TwoTower(dim=DIM, log_q="none", temperature=1.0)
    apart, same = (
        model(*make_batch([[5], [6], [8], [7]], user=torch.tensor(user))) for user in ([1, 2, 3, 4], [1, 1, 3, 4])
    )
    assert (same.losses[:2] < apart.losses[:2]).all() and torch.equal(same.losses[2:], apart.losses[2:])


def test_a_score_is_what_training_compares() -> None:
    torch.manual_seed(0)
    model = TwoTower(dim=DIM, hidden=[8], width=3, log_q="none")
    batch, rows = make_batch([[5], [6], [8], [7]])
    scores = model.score(model.query(batch, rows), rows["target"].values)
    torch.testing.assert_close(model(batch, rows).losses, scores.logsumexp(1) - scores.diagonal())

"""The best of a whole catalogue, exactly, whatever the blocks; what was seen is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Bundle, Feature, Jagged, Normal, Table, Trainer, config, load_bundle, run
from nestpipe.export import export_bundle
from nestpipe.serve import rows

SEQUENCES = """
[data]
kind = "synthetic_sequences"
num_items = 300
mean_length = 6
max_length = 12
num_negatives = 8

[model]
kind = "hstu"
num_layers = 1
max_length = 12

[tables.item]
dim = 8
features = ["history", "negatives"]

[train]
batch_size = 32
steps = 6
eval_split = "none"
"""


@pytest.fixture(scope="module")
def hstu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Trainer]:
    """Of one run, the bundle made from its config."""
    folder = tmp_path_factory.mktemp("hstu")
    (folder / "hstu.toml").write_text(SEQUENCES)
    described = config.read(folder / "hstu.toml")
    run.train(described, folder=folder / "run", json_file=None)
    export_bundle(folder / "run", folder / "bundle")
    trainer, _ = run.make_trainer(described, storage=folder / "storage")
    trainer.load(folder / "run" / "final")
    return load_bundle(folder / "bundle"), trainer


HISTORIES = Batch({"history": Jagged.from_lists([[1, 2, 3, 2], [], [7], [250, 9, 12]])})


def expected(trainer: Trainer, k: int, *, exclude_seen: bool) -> list[list[tuple[float, int]]]:
    """By a sort of everything."""
    keys = np.sort(trainer.stores[0].items()[0])
    history, model = HISTORIES.keys["history"], trainer.model.eval()
    with torch.no_grad():
        rows_of = {"history": Jagged(trainer.rows("item", history.values), history.offsets)}
        scores = model.score(model.query(HISTORIES, rows_of), trainer.rows("item", keys))
    best = []
    for of_sample, seen in zip(scores.tolist(), history.to_lists(), strict=True):
        pairs = [(-score, key) for score, key in zip(of_sample, keys.tolist(), strict=True)]
        best.append(sorted(pair for pair in pairs if not exclude_seen or pair[1] not in seen)[:k])
    return best


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("block", [16, 1 << 16])
def test_the_next_items_are_those_of_a_sort_of_all(
    hstu: tuple[Bundle, Trainer], monkeypatch: pytest.MonkeyPatch, block: int, exclude_seen: bool
) -> None:
    monkeypatch.setattr(rows, "BLOCK", block)
    keys, scores = hstu[0].recommend(HISTORIES, 20, exclude_seen=exclude_seen)
    for mine, of_mine, theirs in zip(
        keys.tolist(), scores, expected(hstu[1], 20, exclude_seen=exclude_seen), strict=True
    ):
        assert torch.allclose(of_mine, -torch.tensor([score for score, _ in theirs]), atol=1e-5)
        if len({round(score, 4) for score, _ in theirs}) == 20:  # blocks of another size may round otherwise
            assert mine == [key for _, key in theirs]


def test_seen_items_that_the_data_tells_are_left_out(hstu: tuple[Bundle, Trainer]) -> None:
    bundle, batch = hstu[0], Batch(HISTORIES.keys)
    first = bundle.recommend(batch, 5)
    batch = Batch(HISTORIES.keys, {"seen": Jagged.from_lists(first.keys[:, :1].tolist())})
    assert bundle.recommend(batch, 4).keys.tolist()[1:3] == first.keys[1:3, 1:].tolist()


class ByFirstValue(nn.Module):
    """Rounded, so that many scores are equal."""

    def query(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return torch.tensor([[1.0], [-1.0]])[: batch.size]

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query * candidates[:, 0].round()

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return rows["history"].values.sum() * torch.ones(batch.size)


@pytest.fixture(scope="module")
def equal_scores(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("equal")
    table = Table("item", 2, init=Normal(1.0))
    trainer = Trainer(
        ByFirstValue(), [table], [Feature("history", "item")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    trainer.step(Batch({"history": Jagged.from_lists([list(range(-30, 30))])}))
    trainer.save(folder / "saved")
    export_bundle(folder / "saved", folder / "bundle")
    return load_bundle(folder / "bundle", model=ByFirstValue())


BATCH = Batch({"history": Jagged.from_lists([[5], [6, 7]])})


@pytest.mark.parametrize("block", [7, 1 << 16])
@pytest.mark.parametrize("k", [1, 10, 60])
def test_of_equal_scores_the_lower_key_comes_first(
    equal_scores: Bundle, monkeypatch: pytest.MonkeyPatch, block: int, k: int
) -> None:
    monkeypatch.setattr(rows, "BLOCK", block)
    values = equal_scores.rows("item", torch.arange(-30, 30))[:, 0].round()
    keys, scores = equal_scores.recommend(BATCH, k)
    for sample, (sign, seen) in enumerate(((1, [5]), (-1, [6, 7]))):
        ranked = sorted((-sign * value, key) for key, value in zip(range(-30, 30), values.tolist(), strict=True))
        wanted = [key for _, key in ranked if key not in seen][:k]
        assert keys[sample].tolist()[: len(wanted)] == wanted
        assert (scores[sample] == -torch.inf).sum() == max(0, k - (60 - len(seen)))


def test_candidates_are_all_there_is_to_choose_from(equal_scores: Bundle) -> None:
    chosen = [3, -4, 1000, 5]  # 1000 has no row: it counts with the values that it would be born with
    keys, scores = equal_scores.recommend(BATCH, 3, candidates=chosen)
    assert set(keys[0].tolist()) == {3, -4, 1000} and scores.isfinite().all()
    with pytest.raises(ValueError, match="more than once"):
        equal_scores.recommend(BATCH, 1, candidates=[1, 1])


def test_mistakes_are_told(equal_scores: Bundle) -> None:
    with pytest.raises(ValueError, match="at most the 60 items there are, got 61"):
        equal_scores.recommend(BATCH, 61)
    with pytest.raises(ValueError, match="got 0"):
        equal_scores.recommend(BATCH, 0)
    with pytest.raises(ValueError, match="history 'histery' of the batch, which is not known; did you mean 'history'"):
        equal_scores.recommend(BATCH, 1, history="histery")
    wrong = Batch(BATCH.keys, {"seen": torch.zeros(2)})
    with pytest.raises(ValueError, match="must be a Jagged of int64 keys"):
        equal_scores.recommend(wrong, 1)

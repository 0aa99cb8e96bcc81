"""DIN: attention of each candidate to each item written out, lists of candidates and single ones, items of several parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged
from nestpipe.models import DIN
from tests.models.clicks import assert_same_gradients, cross_entropy, perceptron

DIM = 5
LENGTHS, COUNTS = [3, 0, 7, 1], [2, 3, 0, 4]


def make_model(**changes: Any) -> DIN:
    torch.manual_seed(1)
    model = DIN(**({"dim": DIM, "attention": (6, 4), "top": (7, 5)} | changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def make_batch(*, parts: int = 1, one_each: bool = False, others: bool = False) -> tuple[Batch, dict[str, Any]]:
    """parts: features that an item is made of. others: a user and dense inputs, too."""
    draw = torch.Generator().manual_seed(2)
    counts = [1] * len(LENGTHS) if one_each else COUNTS

    def rows(number: int) -> Tensor:
        return torch.randn(number, DIM, generator=draw, dtype=torch.float64).requires_grad_()

    named, keys = {}, {}
    for what, sizes in (("history", LENGTHS), ("candidates", counts)):
        for part in range(parts):
            name = f"{what}{part}" if parts > 1 else what
            keys[name] = Jagged.from_lengths(torch.arange(sum(sizes)), torch.tensor(sizes))
            named[name] = keys[name].like(rows(sum(sizes)))
            if one_each and what == "candidates":
                named[name] = named[name].values
    labels: Any = torch.randint(2, (sum(counts),), generator=draw).double()
    dense = {}
    if others:
        named["user"], dense["dense"] = rows(len(LENGTHS)), torch.randn(len(LENGTHS), 2, generator=draw).double()
    if not one_each:
        labels = Jagged.from_lengths(labels, torch.tensor(counts))
    return Batch(keys, dense, labels), named


def leaves(rows: dict[str, Any]) -> list[Tensor]:
    return [part.values if isinstance(part, Jagged) else part for part in rows.values()]


def reference(model: DIN, batch: Batch, rows: dict[str, Any]) -> Tensor:
    """Logits of all candidates, one at a time, item by item."""
    starts = [sum(LENGTHS[:b]) for b in range(len(LENGTHS))]
    counts = COUNTS if isinstance(rows[model.candidates[0]], Jagged) else [1] * len(LENGTHS)
    flat = {name: part.values if isinstance(part, Jagged) else part for name, part in rows.items()}
    logits = []
    for b, count in enumerate(counts):
        for c in range(sum(counts[:b]), sum(counts[:b]) + count):
            asked = torch.cat([flat[name][c] for name in model.candidates])
            interest = torch.zeros_like(asked)
            for j in range(starts[b], starts[b] + LENGTHS[b]):
                item = torch.cat([flat[name][j] for name in model.history])
                weight = perceptron(model.attention, torch.cat([item, asked, asked - item, asked * item]))
                interest = interest + weight * item
            profile = [
                *([batch.dense["dense"][b]] if model.num_dense else []),
                *(flat[name][b] for name in model.features),
            ]
            logits.append(perceptron(model.top, torch.cat([*profile, interest, asked]))[0])
    return torch.stack(logits)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_lists_of_candidates_equal_the_formula_pair_by_pair(parts, others):
    batch, rows = make_batch(parts=parts, others=others)
    names = (
        {what: [f"{what}{part}" for part in range(parts)] for what in ("history", "candidates")} if parts > 1 else {}
    )
    model = make_model(**names, features=list(rows), num_dense=2 if others else 0)
    assert model.features == (["user"] if others else [])
    output, logits = model(batch, rows), reference(model, batch, rows)
    torch.testing.assert_close(output.predictions.values, logits.sigmoid())
    assert output.predictions.lengths.tolist() == output.weights.tolist() == COUNTS
    losses = batch.labels.like(cross_entropy(logits, batch.labels.values)).sum()
    assert_same_gradients(model, leaves(rows), output.losses, losses)
    predicted = model.predict(Batch(batch.keys, batch.dense), rows)
    assert torch.equal(predicted.values, output.predictions.values)


def test_one_candidate_a_sample_equals_the_formula_and_has_plain_tensors():
    batch, rows = make_batch(one_each=True, others=True)
    model = make_model(features=["user"], num_dense=2)
    output, logits = model(batch, rows), reference(model, batch, rows)
    torch.testing.assert_close(output.predictions, logits.sigmoid())
    assert output.weights is None
    assert_same_gradients(model, leaves(rows), output.losses, cross_entropy(logits, batch.labels))
    assert torch.equal(model.predict(Batch(batch.keys, batch.dense), rows), output.predictions)


def test_a_sample_does_not_depend_on_the_others():
    model = make_model().float()
    batch, rows = make_batch()
    rows = {name: part.like(part.values.detach().float()) for name, part in rows.items()}
    some = torch.tensor([3, 0])
    part = model(batch.select(some), {name: jagged.select(some) for name, jagged in rows.items()})
    torch.testing.assert_close(part.losses, model(batch, rows).losses[some], rtol=1e-5, atol=1e-5)


def test_the_order_of_a_history_means_nothing():
    model = make_model()
    batch, rows = make_batch()
    order = torch.tensor([2, 0, 1, *range(9, 2, -1), 10])
    turned = {**rows, "history": rows["history"].like(rows["history"].values[order])}
    torch.testing.assert_close(model(batch, turned).losses, model(batch, rows).losses)


@pytest.mark.parametrize("size", [0, 1])
def test_every_parameter_and_row_has_a_gradient_however_few_samples_there_are(size):
    model = make_model()
    batch, rows = make_batch()
    rows = {name: part.like(part.values.detach()).slice(1, 1 + size) for name, part in rows.items()}
    for part in rows.values():
        part.values.requires_grad_()
    output = model(batch.slice(1, 1 + size), rows)
    output.losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())


def test_no_tensor_is_made_on_another_device_than_the_rows():
    batch, rows = make_batch(one_each=True, others=True)
    model = make_model(features=["user"], num_dense=2)
    with torch.device("meta"):
        model(batch, rows).losses.sum().backward()


def test_wrong_arguments_and_inputs_are_named():
    batch, rows = make_batch()
    with pytest.raises(ValueError, match=r"history is \['items', 'kinds'\], candidates \['candidates'\]; give as many"):
        make_model(history=["items", "kinds"])
    with pytest.raises(ValueError, match="history must be a feature, or a list of different ones"):
        make_model(history=["items", "items"])
    with pytest.raises(ValueError, match="features must be a list of names"):
        make_model(features="user")
    with pytest.raises(
        ValueError, match="DIN: history is 'watched', which is no feature; there are history, candidates"
    ):
        make_model(history="watched")(batch, rows)
    with pytest.raises(ValueError, match="DIN: feature 'history' must have one row per key"):
        make_model()(batch, {**rows, "history": torch.zeros(4, DIM)})
    with pytest.raises(ValueError, match="feature 'candidates' has rows of 3 values"):
        make_model()(batch, {**rows, "candidates": rows["candidates"].like(rows["candidates"].values[:, :3])})
    with pytest.raises(ValueError, match=r"DIN needs labels, a Jagged .* got a Tensor"):
        make_model()(Batch(batch.keys, {}, batch.labels.values), rows)
    with pytest.raises(ValueError, match="labels must be one for each key of 'candidates'"):
        make_model()(Batch(batch.keys, {}, Jagged.from_lengths(batch.labels.values, torch.tensor([3, 3, 0, 3]))), rows)
    with pytest.raises(ValueError, match=r"label 7\.0 of sample 3 is outside"):
        make_model()(Batch(batch.keys, {}, batch.labels.like(torch.tensor([1.0] * 8 + [7]))), rows)
    batch, rows = make_batch(parts=2)
    rows["history1"] = rows["history1"].select(torch.tensor([0, 1, 1, 2]))
    with pytest.raises(ValueError, match="'history0' and 'history1' make up an item together"):
        make_model(history=["history0", "history1"], candidates=["candidates0", "candidates1"])(batch, rows)

"""Every way of giving a model negatives, against the formula written out: losses and all gradients; and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Streamed
from nestpipe.models import HSTU
from nestpipe.ops.halves import rounded
from nestpipe.ops.segmented_softmax import shared_units
from tests.models.histories import CATALOGUE, DIM, LENGTHS, gradients, make_batch, make_model

K = 4


def batch_per_position(lengths: list[int]) -> tuple[Batch, dict[str, Jagged]]:
    batch, rows = make_batch(lengths)
    draw = torch.Generator().manual_seed(7)
    counts = (batch.keys["history"].lengths - 1).clamp(min=0) * K
    many = int(counts.sum())
    batch.keys["negatives"] = Jagged.from_lengths(torch.randint(CATALOGUE, (many,), generator=draw), counts)
    rows["negatives"] = Jagged.from_lengths(torch.randn(many, DIM, generator=draw).requires_grad_(), counts)
    return batch, rows


def formula(
    model: HSTU, batch: Batch, rows: dict[str, Jagged], *, per: str = "sample", share: int = 0, dtype: str = "float32"
) -> Tensor:
    """Losses [B], position by position. Rounding passes gradients on as if it were not there."""
    states = functional.normalize(model.encode(batch, rows), dim=-1, eps=1e-6) / model.temperature
    keys, negative_keys = batch.keys["history"], batch.keys["negatives"].values
    values = rows["negatives"].values
    values = values + (rounded(values.detach().float(), getattr(torch, dtype)) - values).detach()
    negatives = functional.normalize(values, dim=-1, eps=1e-6)
    items = functional.normalize(rows["history"].values, dim=-1, eps=1e-6)
    num_positions = int((keys.lengths - 1).clamp(min=0).sum())
    units = shared_units(len(keys) if per == "sample" else num_positions, share, negative_keys)
    num = len(negative_keys) // len(units)
    losses, position = [], 0
    for b in range(len(keys)):
        total = states.new_zeros(())
        for t in range(int(keys.offsets[b]), int(keys.offsets[b + 1]) - 1):
            of_units = units[b if per == "sample" else position].tolist()
            used = [
                u * num + k for u in of_units for k in range(num) if negative_keys[u * num + k] != keys.values[t + 1]
            ]
            logits = torch.cat([items[t + 1][None], negatives[used]]) @ states[t]
            total = total - logits.log_softmax(0)[0]
            position += 1
        losses.append(total)
    return torch.stack(losses)


def check(model: HSTU, batch: Batch, rows: dict[str, Jagged], expected: Tensor) -> None:
    output = model(batch, rows)
    torch.testing.assert_close(output.losses, expected, rtol=1e-5, atol=1e-5)
    weights = torch.arange(1, len(expected) + 1)
    grads = gradients(model, rows, (output.losses * weights).sum())
    wanted = gradients(model, rows, (expected * weights).sum())
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("share", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("per", ["sample", "position"])
def test_equals_the_formula_forward_and_backward(per: str, dtype: str, share: int) -> None:
    model = make_model(HSTU, negatives_per=per, negatives_dtype=dtype, share_negatives=share)
    batch, rows = make_batch(LENGTHS) if per == "sample" else batch_per_position(LENGTHS)
    check(model, batch, rows, formula(model, batch, rows, per=per, share=share, dtype=dtype))


@pytest.mark.parametrize("log_q", [None, "batch", "data", "none"])
def test_in_batch_negatives_equal_the_formula_forward_and_backward(log_q: str | None) -> None:
    model = make_model(HSTU, negatives="in-batch", log_q=log_q)
    batch, rows = make_batch(LENGTHS)
    del rows["negatives"]
    keys = batch.keys["history"]
    batch.dense["log_q"] = Jagged(torch.randn(len(keys.values)), keys.offsets)
    states = functional.normalize(model.encode(batch, rows), dim=-1, eps=1e-6) / model.temperature
    items = functional.normalize(rows["history"].values, dim=-1, eps=1e-6)
    before = [t for b in range(len(keys)) for t in range(int(keys.offsets[b]), int(keys.offsets[b + 1]) - 1)]
    after = [t + 1 for t in before]
    targets = keys.values[after]
    share = torch.stack([(targets == key).float().mean() for key in targets]).log()
    logits = states[before] @ items[after].T
    if log_q != "none":
        logits = logits - (batch.dense["log_q"].values[after] if log_q == "data" else share)
    own = torch.stack([logits[p][targets == targets[p]].logsumexp(0) for p in range(len(before))])
    users = keys.sample_ids()[before]  # what a user chooses elsewhere is left out
    compared = [(users != users[p]) | (targets == targets[p]) for p in range(len(before))]
    total = torch.stack([logits[p][compared[p]].logsumexp(0) for p in range(len(before))])
    losses = Jagged.from_lengths(total - own, (keys.lengths - 1).clamp(min=0))
    check(model, batch, rows, losses.sum())


@pytest.mark.parametrize("options", [{"negatives_per": "position"}, {"share_negatives": 3}, {"negatives": "in-batch"}])
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 1, 0], [2, 2]])
def test_short_and_empty_histories(options: dict[str, object], lengths: list[int]) -> None:
    model = make_model(HSTU, **options)
    batch, rows = batch_per_position(lengths) if "negatives_per" in options else make_batch(lengths)
    if "negatives" in options:
        del rows["negatives"]
    output = model(batch, rows)
    output.losses.sum().backward()
    assert output.losses.shape == (len(lengths),) and torch.isfinite(output.losses).all()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())


def test_streamed_rows_are_taken_in_place_of_gathered_ones() -> None:
    batch, rows = make_batch(LENGTHS)
    values = rows["negatives"].values.detach()
    stream = Streamed(
        rows["negatives"].offsets,
        lambda places, dtype: rounded(values[places], dtype),
        lambda places, grads: None,
        torch.empty(0, requires_grad=True),
    )
    for options in ({}, {"share_negatives": 1}, {"negatives_dtype": "float16"}):
        model = make_model(HSTU, **options)
        torch.testing.assert_close(model(batch, {**rows, "negatives": stream}).losses, model(batch, rows).losses)
    with pytest.raises(ValueError, match=r"'history' must have one row per key, at once: pooling=None, not streamed"):
        make_model(HSTU)(batch, {**rows, "history": stream})


def test_the_model_says_whether_it_mixes_samples() -> None:
    assert make_model(HSTU).mixes_samples is None  # and is tried
    assert make_model(HSTU, negatives_per="position", negatives_dtype="float16").mixes_samples is None
    assert make_model(HSTU, share_negatives=1).mixes_samples == "micro-batch"
    assert make_model(HSTU, negatives="in-batch").mixes_samples == "micro-batch"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"negatives_per": "batch"}, "negatives_per must be one of 'sample', 'position'"),
        ({"negatives_dtype": "int8"}, "negatives_dtype must be one of"),
        ({"share_negatives": -1}, "share_negatives must be a whole number of at least 0"),
        ({"log_q": "batch"}, "log_q='batch' is for negatives='in-batch'"),
        ({"negatives": "in-batch", "log_q": "model"}, "log_q must be one of"),
        ({"negatives": "in-batch", "share_negatives": 2}, "share_negatives is for negatives of a feature"),
        ({"negatives": "in-batch", "negatives_dtype": "float16"}, "negatives_dtype is for negatives of a feature"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_model(HSTU, **options)


def test_negatives_in_the_wrong_number_are_named() -> None:
    batch, rows = make_batch([3, 4])
    with pytest.raises(ValueError, match=r"'negatives': every position needs the same number.*here 'position'"):
        make_model(HSTU, negatives_per="position")(batch, rows)
    batch, rows = batch_per_position([3, 4])
    with pytest.raises(ValueError, match=r"'negatives': every sample needs the same number.*here 'sample'"):
        make_model(HSTU)(batch, rows)
    with pytest.raises(ValueError, match=r"log_q='data' needs batch.dense\['log_q'\]"):
        make_model(HSTU, negatives="in-batch", log_q="data")(batch, rows)

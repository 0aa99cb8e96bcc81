"""SASRec against a plain padded implementation, forward and backward, with both losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged
from nestpipe.models import SASRec
from tests.models.histories import CATALOGUE, DIM, LENGTHS, distances, gradients, heads, make_batch, make_model


def layer_norm(module: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias


def block(module: torch.nn.Module, x: Tensor, valid: Tensor) -> Tensor:
    q, k, v = (heads(part, module.num_heads) for part in module.qkv(layer_norm(module.attention_norm, x)).chunk(3, -1))
    _, visible = distances(valid)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible[:, None], -1e30).softmax(-1)
    z = x + (weights @ v).transpose(1, 2).flatten(2)
    hidden = module.ffn_in(layer_norm(module.ffn_norm, z)).clamp(min=0)
    return z + module.ffn_out(hidden)


def states(model: SASRec, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
    keys, length = batch.keys["history"], model.max_length
    valid = torch.arange(length) < keys.lengths[:, None]
    x = (rows["history"].to_padded(length) * math.sqrt(model.dim) + model.position_embedding) * valid[..., None]
    for module in model.layers:
        x = block(module, x, valid)
    return layer_norm(model.last_norm, x)


def batch_of(lengths: list[int], *, per: str = "position", each: int = 3) -> tuple[Batch, dict[str, Jagged]]:
    """Negatives for each position, `each` of them; or as tests of other models have them, per sample."""
    batch, rows = make_batch(lengths)
    if per == "position":
        draw = torch.Generator().manual_seed(5)
        counts = torch.tensor([each * max(n - 1, 0) for n in lengths], dtype=torch.int64)
        total = int(counts.sum())
        keys = Jagged.from_lengths(torch.randint(CATALOGUE, (total,), generator=draw), counts)
        batch.keys["negatives"] = keys
        rows["negatives"] = keys.like(torch.randn(total, DIM, generator=draw).mul_(0.3).requires_grad_())
    return batch, rows


def make(**changes: Any) -> SASRec:
    model = make_model(SASRec, **({"temperature": 1.0} | changes))
    with torch.no_grad():  # norms begin as ones and zeros, which a wrong order would pass
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def expected_losses(model: SASRec, batch: Batch, rows: dict[str, Jagged], *, loss: str, each: int) -> Tensor:
    x = states(model, batch, rows)
    keys = batch.keys["history"].to_lists()
    items = rows["history"].values.split([len(sample) for sample in keys])
    negative_keys = batch.keys["negatives"].to_lists()
    negatives = rows["negatives"].values.split([len(sample) for sample in negative_keys])

    def logits(candidates: Tensor, state: Tensor) -> Tensor:
        if model.normalize:
            candidates, state = (functional.normalize(part, dim=-1, eps=1e-6) for part in (candidates, state))
        return candidates @ state / model.temperature

    losses = []
    for b, sample in enumerate(keys):
        total = x.new_zeros(())
        for i in range(len(sample) - 1):
            mine = range(i * each, (i + 1) * each) if loss == "bce" else range(len(negative_keys[b]))
            others = [n for n in mine if negative_keys[b][n] != sample[i + 1]]
            true, false = logits(items[b][i + 1], x[b, i]), logits(negatives[b][others], x[b, i])
            if loss == "bce":
                total = total - true.sigmoid().log()
                if others:
                    total = total - (1 - false.sigmoid()).log().mean()
            else:
                total = total - torch.cat([true[None], false]).log_softmax(0)[0]
        losses.append(total)
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("loss", "each", "more"),
    [
        ("bce", 1, {}),
        ("bce", 3, {}),
        ("bce", 2, {"normalize": True, "temperature": 0.5}),
        ("softmax", 3, {"negatives_per": "sample"}),
        ("softmax", 3, {"negatives_per": "sample", "normalize": True, "temperature": 0.1}),
    ],
)
def test_equals_a_padded_reference_forward_and_backward(loss, each, more):
    model = make(loss=loss, **more).double()
    batch, rows = batch_of(LENGTHS, per=model.negatives.per, each=each)
    rows = {name: part.like(part.values.detach().double().requires_grad_()) for name, part in rows.items()}
    output, expected = model(batch, rows), expected_losses(model, batch, rows, loss=loss, each=each)
    torch.testing.assert_close(output.losses, expected, rtol=1e-9, atol=1e-9)
    assert output.weights.tolist() == [max(n - 1, 0) for n in LENGTHS]
    last = states(model, batch, rows)
    for b, n in enumerate(LENGTHS):
        wanted = last[b, n - 1] if n else torch.zeros(DIM).double()
        torch.testing.assert_close(model.query(batch, rows)[b], wanted, rtol=1e-9, atol=1e-9)
    grads = gradients(model, rows, (output.losses * torch.arange(1, 9)).sum())
    wanted = gradients(model, rows, (expected * torch.arange(1, 9)).sum())
    assert grads.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-7, atol=1e-9, msg=name)


def test_a_negative_that_is_the_target_does_not_count_against_it():
    model = make()
    batch, rows = batch_of([2], each=1)
    batch.keys["negatives"].values[0] = batch.keys["history"].values[1]
    loss = model(batch, rows).losses
    score = model.score(model.encode(batch, rows)[:1], rows["history"].values[1:])
    torch.testing.assert_close(loss, functional.softplus(-score[0]))


def test_a_sample_does_not_depend_on_the_others():
    model = make()
    batch, rows = batch_of(LENGTHS)
    whole, query = model(batch, rows), model.query(batch, rows)
    for samples in (torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([5, 3, 7])):
        part, part_rows = batch.select(samples), {name: jagged.select(samples) for name, jagged in rows.items()}
        torch.testing.assert_close(model(part, part_rows).losses, whole.losses[samples], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.query(part, part_rows), query[samples], rtol=1e-5, atol=1e-5)


def test_a_position_does_not_see_later_items():
    model = make()
    batch, rows = batch_of([6])
    changed = rows["history"].values.detach().clone()
    changed[4:] *= -1
    before, after = (
        model.encode(batch, {"history": rows["history"].like(part)}) for part in (rows["history"].values, changed)
    )
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 1, 0], [2, 2]])
def test_short_and_empty_histories_have_losses_and_every_gradient(lengths):
    model = make()
    batch, rows = batch_of(lengths)
    output = model(batch, rows)
    output.losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())
    assert [loss > 0 for loss in output.losses.tolist()] == [n > 1 for n in lengths]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"loss": "hinge"}, "loss must be one of"),
        ({"negatives_per": "sample"}, "loss='bce': it takes negatives of each position"),
        ({"negatives": "in-batch"}, "loss='bce': negatives='in-batch' compete in a softmax"),
        ({"share_negatives": 2}, "loss='bce': share_negatives and negatives_dtype are"),
        ({"negatives_dtype": "float16"}, "loss='bce': share_negatives and negatives_dtype are"),
    ],
)
def test_wrong_arguments_are_named(argument, problem):
    with pytest.raises(ValueError, match=f"SASRec: {problem}"):
        make(**argument)


def test_negatives_that_do_not_fit_the_positions_are_named():
    batch, rows = batch_of([3, 4], per="sample")
    with pytest.raises(ValueError, match="feature 'negatives': every position needs the same number of negatives"):
        make()(batch, rows)


def test_in_batch_negatives_of_the_softmax_are_declared():
    model = make(loss="softmax", negatives="in-batch")
    assert model.mixes_samples == "micro-batch"
    assert make().mixes_samples is None

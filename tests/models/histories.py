"""Batches of histories, and what models of them compute, padded to max_length with every formula written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged
from nestpipe.models.sequence import SequenceModel

LENGTHS = [7, 0, 2, 20, 1, 5, 3, 9]
DIM, NUM_NEGATIVES, CATALOGUE = 8, 6, 12  # few keys, so that negatives meet targets


def make_batch(lengths: list[int], *, seed: int = 0) -> tuple[Batch, dict[str, Jagged]]:
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    num_tokens = int(lengths_B.sum())
    keys = Jagged.from_lengths(torch.randint(CATALOGUE, (num_tokens,), generator=generator), lengths_B)
    negatives = Jagged.from_lengths(
        torch.randint(CATALOGUE, (len(lengths) * NUM_NEGATIVES,), generator=generator),
        torch.full((len(lengths),), NUM_NEGATIVES),
    )
    times = Jagged(torch.randint(10**7, (num_tokens,), generator=generator).cumsum(0), keys.offsets)
    batch = Batch({"history": keys, "negatives": negatives}, {"timestamps": times})
    rows = {
        name: Jagged(torch.randn(len(part.values), DIM, generator=generator).mul_(0.3).requires_grad_(), part.offsets)
        for name, part in batch.keys.items()
    }
    return batch, rows


def make_model(kind: type[SequenceModel], **changes) -> SequenceModel:
    torch.manual_seed(1)
    settings = {"dim": DIM, "num_heads": 2, "max_length": 20, "dropout": 0.0, "input_dropout": 0.0, "temperature": 0.5}
    return kind(**(settings | changes))


# Of a layer, states [B, L, D], times [B, L] and which tokens are there [B, L]: the states after it.
Layer = Callable[[torch.nn.Module, Tensor, Tensor, Tensor], Tensor]


def reference(layer: Layer, model: SequenceModel, batch: Batch, rows: dict[str, Jagged]) -> tuple[Tensor, Tensor]:
    """Losses [B] and last states [B, D]."""
    history, keys = rows["history"], batch.keys["history"]
    B, L = len(keys), model.max_length
    valid = torch.arange(L) < keys.lengths[:, None]
    x = (history.to_padded(L) * math.sqrt(model.dim) + model.position_embedding) * valid[..., None]
    for module in model.layers:
        x = layer(module, x, batch.dense["timestamps"].to_padded(L), valid)
    last = torch.stack([x[b, n - 1] if n else x.new_zeros(model.dim) for b, n in enumerate(keys.lengths.tolist())])

    def scale(vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=1e-6) if model.normalize else vectors

    losses = []
    key_lists, row_lists = keys.to_lists(), history.values.split(keys.lengths.tolist())
    negative_rows = rows["negatives"].values.view(B, -1, model.dim)
    for b, sample in enumerate(key_lists):
        total = x.new_zeros(())
        for i in range(len(sample) - 1):
            others = [n for n, key in enumerate(batch.keys["negatives"].to_lists()[b]) if key != sample[i + 1]]
            candidates = torch.cat([row_lists[b][i + 1][None], negative_rows[b][others]])
            logits = scale(candidates) @ scale(x[b, i]) / model.temperature
            total = total - logits.log_softmax(0)[0]
        losses.append(total)
    return torch.stack(losses), last


def distances(valid: Tensor) -> tuple[Tensor, Tensor]:
    """How far apart two places are [L, L], and which keys are seen from which [B, L, L]."""
    place = torch.arange(valid.shape[1])
    apart = place[:, None] - place
    return apart.abs(), (apart >= 0) & valid[:, None, :]


def buckets(times: Tensor, num_buckets: int) -> Tensor:
    seconds = (times[:, :, None] - times[:, None, :]).clamp(min=1).float()
    return (seconds.log() / 0.301).long().clamp(max=num_buckets - 1)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, E] -> [B, H, L, D]"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def gradients(model: SequenceModel, rows: dict[str, Jagged], loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    for part in rows.values():
        part.values.grad = None
    loss.backward()
    of_parameters = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return of_parameters | {name: part.values.grad.clone() for name, part in rows.items()}


def check_against(layer: Layer, model: SequenceModel) -> None:
    """Losses, queries and all gradients, in float64."""
    model = model.double()
    batch, rows = make_batch(LENGTHS)
    rows = {name: Jagged(part.values.detach().double().requires_grad_(), part.offsets) for name, part in rows.items()}
    output = model(batch, rows)
    expected, last = reference(layer, model, batch, rows)
    torch.testing.assert_close(output.losses, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.query(batch, rows), last, rtol=1e-9, atol=1e-9)
    assert output.weights.tolist() == [max(n - 1, 0) for n in LENGTHS]
    grads = gradients(model, rows, (output.losses * torch.arange(1, 9)).sum())
    wanted = gradients(model, rows, (expected * torch.arange(1, 9)).sum())
    assert grads.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-7, atol=1e-9, msg=name)

"""What the operations and models are measured against computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.bench.sequences.attention import ragged
from nestpipe.bench.sequences.padded import PaddedHSTU, grouped_attention, padded_attention
from nestpipe.data import KuaiRandLike
from nestpipe.models import HSTU
from nestpipe.ops import jagged_attention


@pytest.mark.parametrize("attention", [padded_attention, grouped_attention])
def test_padded_formulas_give_what_the_operation_gives(attention: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    offsets = ragged(40, 300)
    inputs = [torch.randn(300, 8, requires_grad=True) for _ in range(3)]
    biases = [torch.randn(n, requires_grad=True) for n in (40, 16)]
    times, up = torch.randint(1, 50, (300,)).cumsum(0), torch.randn(300, 8)
    options = {"num_heads": 2, "position_bias": biases[0], "times": times, "time_bias": biases[1]}
    expected, mine = (
        (out, *torch.autograd.grad(out, [*inputs, *biases], up))
        for out in (way(*inputs, offsets, **options) for way in (jagged_attention, attention))
    )
    for a, b in zip(expected, mine, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_ragged_batches_have_the_tokens_and_the_longest_sample_that_are_asked_for() -> None:
    lengths = ragged(64, 1000).diff()
    assert int(lengths.sum()) == 1000 and int(lengths.max()) == 64


def losses_and_gradients(model: HSTU, batch: Batch) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    rows = {
        name: Jagged(torch.randn(len(keys.values), 8, generator=draw).requires_grad_(), keys.offsets)
        for name, keys in batch.keys.items()
    }
    output = model(batch, rows)
    inputs = [*model.parameters(), *(part.values for part in rows.values())]
    assert output.weights is not None
    return [output.losses, output.weights, *torch.autograd.grad(output.losses.sum(), inputs)]


def test_the_padded_model_is_the_same_model() -> None:
    log = KuaiRandLike(num_users=50, num_items=30, mean_length=12, max_length=20, num_negatives=5)
    (batch, *_) = log.batches("train", batch_size=16, rank=0, world=1, seed=0)
    made = []
    for kind in (HSTU, PaddedHSTU):
        torch.manual_seed(3)
        made.append(kind(dim=8, num_heads=2, max_length=20, num_time_buckets=8, dropout=0.0, input_dropout=0.0))
    for a, b in zip(*(losses_and_gradients(model, batch) for model in made), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

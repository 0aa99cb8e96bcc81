from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.ops import sampled_softmax

LENGTHS, NUM_NEGATIVES, DIM = (3, 0, 1, 9, 70), 4, 5


def make(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """States, targets and negatives; keys of targets and negatives, and offsets."""
    generator = torch.Generator().manual_seed(0)
    num = sum(LENGTHS)
    shapes = (num, DIM), (num, DIM), (len(LENGTHS), NUM_NEGATIVES, DIM)
    vectors = [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    keys = [torch.randint(6, shape, generator=generator) for shape in ((num,), (len(LENGTHS), NUM_NEGATIVES))]
    return vectors, [*keys, torch.tensor([0, *LENGTHS]).cumsum(0)]


def plain(states: Tensor, targets: Tensor, negatives: Tensor, keys: Tensor, others: Tensor, offsets: Tensor) -> Tensor:
    losses = []
    for b, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        for i in range(first, last):
            candidates = torch.cat([targets[i, None], negatives[b][others[b] != keys[i]]])
            losses.append(-(candidates @ states[i]).log_softmax(0)[0])
    return torch.stack(losses)


def test_equals_the_plain_formula_forward_and_backward():
    vectors, rest = make(torch.float64)
    direction = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, expected = sampled_softmax(*vectors, *rest), plain(*vectors, *rest)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(*(torch.autograd.grad((x * direction).sum(), vectors) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_sample_is_the_same_to_the_bit_whatever_else_is_in_the_call():
    (states, targets, negatives), (keys, others, offsets) = make(torch.float32)
    whole = sampled_softmax(states, targets, negatives, keys, others, offsets)
    grads = torch.autograd.grad(whole.sum(), (states, targets))
    for b, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        mine = slice(first, last)
        part = sampled_softmax(
            states[mine],
            targets[mine],
            negatives[b : b + 1],
            keys[mine],
            others[b : b + 1],
            torch.tensor([0, last - first]),
        )
        assert torch.equal(part, whole[mine])
        for a, z in zip(torch.autograd.grad(part.sum(), (states, targets)), grads, strict=True):
            assert torch.equal(a[mine], z[mine])


def test_all_negatives_equal_to_the_target_cost_nothing():
    states = torch.randn(1, 4, requires_grad=True)
    keys = torch.tensor([3])
    loss = sampled_softmax(
        states, torch.randn(1, 4), torch.randn(1, 2, 4), keys, keys.expand(1, 2), torch.tensor([0, 1])
    )
    loss.sum().backward()
    assert loss.item() == 0
    assert not states.grad.any()

"""The CPU implementation against the reference, sample by sample to the bit, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe.ops.attention import cpu, jagged_attention
from tests.ops.attention.cases import ALL, TAILS, Case, differences, make, results

LONG = (3, 0, 1, 63, 64, 65, 1000, 128, 129)


@pytest.mark.parametrize("case", [*ALL, *TAILS, *(case._replace(lengths=LONG) for case in ALL)], ids=str)
def test_output_and_all_gradients_equal_the_reference(case):
    found = differences(case, "cpu")
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("kind", ["silu", "softmax", "weights"])
def test_keys_wider_than_a_tile_equal_the_reference(kind, monkeypatch):
    monkeypatch.setattr(cpu, "TILE", cpu.BLOCK * 32)
    found = differences(Case(kind, True, True, (500, 7, 200)), "cpu")
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("kind", ["silu", "softmax", "weights"])
def test_a_sample_is_the_same_to_the_bit_whatever_else_is_in_the_call(kind, width):
    lengths = (7, 50, 300, 1, 49, 64, 129, 50, 13, 128, 300, 3, 65, 51, 52, 52, 100, 100)
    call = make(Case(kind, True, True, lengths, num_heads=2, width=width))
    offsets = call.positional[3]
    direction = torch.sin(torch.arange(1.0 + offsets[-1]))[:-1, None]

    def run(samples: list[int]) -> tuple[Tensor, list[Tensor]]:
        where = torch.cat([torch.arange(int(offsets[s]), int(offsets[s + 1])) for s in samples])
        tensors = [None if x is None else x.detach()[where].requires_grad_() for x in call.positional[:3]]
        cut = torch.tensor([0, *(lengths[s] for s in samples)]).cumsum(0)
        out = jagged_attention(*tensors, cut, **(call.named | {"times": call.named["times"][where]}))
        leaves = [x for x in tensors if x is not None]
        return where, [out.detach(), *torch.autograd.grad((out * direction[where]).sum(), leaves)]

    _, whole = run(list(range(len(lengths))))
    for samples in ([s] for s in range(len(lengths))), ([12, 0, 5], [1, 7], [2, 3, 10]):
        for chosen in samples:
            where, part = run(chosen)
            for got, expected in zip(part, whole, strict=True):
                assert torch.equal(got, expected[where]), chosen


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1,), (0, 1, 0)])
@pytest.mark.parametrize("kind", ["silu", "softmax", "weights"])
def test_empty_batches_and_empty_samples_have_gradients_of_every_input(kind, lengths):
    call = make(Case(kind, True, True, lengths))
    found = results(call, "cpu")
    assert len(found["out"]) == sum(lengths)
    assert all(found[name].shape == leaf.shape for name, leaf in call.leaves().items())


def test_masked_scores_weigh_exactly_nothing():
    score = torch.tensor([cpu.MASKED + 50, cpu.MASKED], requires_grad=True)
    weight = torch.nn.functional.silu(score)
    weight.sum().backward()
    assert not weight.any()
    assert not score.grad.any()


class LargestTensor(TorchDispatchMode):
    """The most values that any one result of an operation has memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("kind", ["silu", "softmax", "weights"])
def test_no_tensor_grows_with_the_square_of_the_length(kind):
    def largest(length: int) -> int:
        call = make(Case(kind, True, True, (length,), num_heads=1, width=4))
        with LargestTensor() as seen:
            results(call, "cpu")
        return seen.values

    short, long = largest(1500), largest(6000)
    assert short < 1500 * 1500 / 4
    assert long < 6000 * 6000 / 25
    assert long <= 4.5 * short


def test_keys_of_samples_without_a_query_have_a_gradient_of_zero() -> None:
    k, v = (torch.randn(3, 4).requires_grad_() for _ in range(2))
    q = torch.randn(0, 4).requires_grad_()
    out = jagged_attention(q, k, v, torch.tensor([0, 0, 0]), key_offsets=torch.tensor([0, 3, 3]), impl="cpu")
    torch.full((4096,), 7.0)  # memory that is given out next is not zero by luck
    out.sum().backward()
    assert k.grad is not None and v.grad is not None and not k.grad.any() and not v.grad.any()


@pytest.mark.parametrize("kind", ["silu", "softmax"])
def test_no_score_is_so_large_that_the_future_is_seen(kind: str) -> None:
    q = k = torch.full((2, 64), 13.0)  # scores of 10,816
    v = torch.tensor([[1.0] * 64, [1000.0] * 64])
    offsets = torch.tensor([0, 2])
    for sign in (1, -1):
        mine, theirs = (
            jagged_attention(sign * q, k, v, offsets, kind=kind, impl=impl) for impl in ("cpu", "reference")
        )
        torch.testing.assert_close(mine, theirs)

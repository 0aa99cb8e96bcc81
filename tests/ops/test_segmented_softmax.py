"""Many negatives, a segment at a time, against the formula written out: losses and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Jagged, Streamed
from nestpipe.ops import sampled_softmax, segmented_softmax
from nestpipe.ops.halves import rounded
from nestpipe.ops.segmented_softmax import shared_units

COUNTS = [6, 0, 1, 19, 2, 8, 8]  # positions of each sample
DIM, NUM, CATALOGUE = 8, 6, 12  # few keys, so that negatives meet targets


def made(counts: list[int], *, per: str, num: int = NUM, dtype: torch.dtype = torch.float64):
    draw = torch.Generator().manual_seed(len(counts))
    offsets = Jagged.from_lengths(torch.empty(0), torch.tensor(counts, dtype=torch.int64)).offsets
    positions = int(offsets[-1])
    lengths = torch.full((len(counts),), num) if per == "sample" else torch.tensor(counts, dtype=torch.int64) * num
    many = int(lengths.sum())
    vectors = [torch.randn(n, DIM, generator=draw, dtype=dtype).requires_grad_() for n in (positions, positions, many)]
    keys = [torch.randint(CATALOGUE, (n,), generator=draw) for n in (positions, many)]
    states, targets, rows = vectors
    return states, targets, Jagged.from_lengths(rows, lengths), *keys, offsets


def formula(states, targets, negatives, target_keys, negative_keys, offsets, *, per, share, normalize) -> Tensor:
    rows = functional.normalize(negatives.values, dim=-1, eps=1e-6) if normalize else negatives.values
    sample_of = Jagged(target_keys, offsets).sample_ids().tolist()
    num_units = len(offsets) - 1 if per == "sample" else len(states)
    units = shared_units(num_units, share, negative_keys)
    num = len(negative_keys) // max(num_units, 1)
    losses = []
    for p in range(len(states)):
        unit = sample_of[p] if per == "sample" else p
        used = [u * num + k for u in units[unit].tolist() for k in range(num)]
        used = [place for place in used if negative_keys[place] != target_keys[p]]
        logits = torch.cat([targets[p][None], rows[used]]) @ states[p]
        losses.append(-logits.log_softmax(0)[0])
    return torch.stack(losses) if losses else states.sum(1)


def gradients(losses: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((losses * torch.arange(1, len(losses) + 1)).sum(), leaves))


@pytest.mark.parametrize("per", ["sample", "position"])
@pytest.mark.parametrize("share", [0, 2, 100])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("segment", [1, 150, 1 << 20])  # a negative, a part of a sample's, all at a time
def test_equals_the_formula_forward_and_backward(per, share, normalize, segment):
    given = made(COUNTS, per=per)
    leaves = [given[0], given[1], given[2].values]
    losses = segmented_softmax(*given, per=per, share=share, normalize=normalize, segment=segment)
    wanted = formula(*given, per=per, share=share, normalize=normalize)
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
    for grad, expected in zip(gradients(losses, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("per", "counts"), list(itertools.product(["sample", "position"], [[], [0], [0, 0], [1], [0, 3]]))
)
def test_empty_and_short_histories(per, counts):
    states, targets, negatives, *rest = made(counts, per=per)
    losses = segmented_softmax(states, targets, negatives, *rest, per=per, share=2)
    assert losses.shape == (sum(counts),)
    losses.sum().backward()
    assert all(leaf.grad is not None for leaf in (states, targets, negatives.values))


def test_equals_the_loss_that_keeps_all_logits():
    states, targets, negatives, target_keys, negative_keys, offsets = given = made(COUNTS, per="sample")
    B = len(COUNTS)
    plain = sampled_softmax(
        states, targets, negatives.values.view(B, NUM, DIM), target_keys, negative_keys.view(B, NUM), offsets
    )
    torch.testing.assert_close(segmented_softmax(*given), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("per", ["sample", "position"])
def test_the_bits_of_a_sample_do_not_depend_on_the_others(per):
    given = made(COUNTS, per=per, dtype=torch.float32)
    states, targets, negatives, target_keys, negative_keys, offsets = given
    whole = segmented_softmax(*given, per=per, normalize=True)
    for b in range(len(COUNTS)):
        a, z, n, m = *offsets[b : b + 2].tolist(), *negatives.offsets[b : b + 2].tolist()
        alone = segmented_softmax(
            states[a:z].clone(), targets[a:z].clone(), negatives.slice(b, b + 1), target_keys[a:z], negative_keys[n:m],
            torch.tensor([0, z - a]), per=per, normalize=True,
        )  # fmt: skip
        assert torch.equal(alone, whole[a:z])


def streamed(negatives: Jagged, sizes: list[int]) -> tuple[Streamed, Tensor]:
    """Rows that count how many are read at a time, and their gradients."""
    rows, grads = negatives.values.detach(), torch.zeros_like(negatives.values)

    def gather(places: Tensor, dtype: torch.dtype) -> Tensor:
        sizes.append(len(places))
        return rounded(rows[places], dtype)

    def add_grad(places: Tensor, given: Tensor) -> None:
        grads.index_add_(0, places, given)

    return Streamed(negatives.offsets, gather, add_grad, torch.empty(0, requires_grad=True)), grads


@pytest.mark.parametrize("per", ["sample", "position"])
@pytest.mark.parametrize("share", [0, 3])
def test_streamed_rows_give_the_same_and_are_never_read_all_at_once(per, share):
    segment = 40 * (DIM + 24)  # 24: the longest of the rounded lengths
    for num in (10, 200):
        states, targets, negatives, *rest = made(COUNTS, per=per, num=num)
        sizes: list[int] = []
        source, grads = streamed(negatives, sizes)
        losses = segmented_softmax(states, targets, source, *rest, per=per, share=share, segment=segment)
        got = gradients(losses, [states, targets])
        plain = segmented_softmax(states, targets, negatives, *rest, per=per, share=share, segment=1 << 30)
        *wanted, of_rows = gradients(plain, [states, targets, negatives.values])
        torch.testing.assert_close(losses, plain, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close([*got, grads], [*wanted, of_rows], rtol=1e-7, atol=1e-9)
        assert max(sizes) <= segment // (DIM + 1) and len(sizes) > 2


def test_streamed_rows_get_gradients_though_nothing_else_does_and_none_without_a_backward():
    states, targets, negatives, *rest = made(COUNTS, per="sample")
    source, grads = streamed(negatives, [])
    losses = segmented_softmax(states.detach(), targets.detach(), source, *rest)
    assert not grads.any()
    losses.sum().backward()
    assert grads.any()
    with torch.no_grad():
        assert not segmented_softmax(states, targets, source, *rest).requires_grad


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_rounds_rows_and_passes_gradients_on(dtype, worst):
    given = made(COUNTS, per="position", dtype=torch.float32)
    states, targets, negatives, *rest = given
    half = segmented_softmax(*given, per="position", normalize=True, dtype=dtype)
    as_rounded = Jagged(rounded(negatives.values.detach(), dtype).requires_grad_(), negatives.offsets)
    same = segmented_softmax(states, targets, as_rounded, *rest, per="position", normalize=True)
    assert torch.equal(half, same)
    for grad, wanted in zip(
        gradients(half, [states, negatives.values]), gradients(same, [states, as_rounded.values]), strict=True
    ):
        assert torch.equal(grad, wanted) and grad.dtype == torch.float32
    full = segmented_softmax(*given, per="position", normalize=True)
    assert 0 < float(((half - full) / full).detach().abs().max()) < worst


def test_a_shuffle_gives_everyone_as_many_others_and_is_made_of_the_keys():
    keys = torch.arange(60)
    units = shared_units(10, 3, keys)
    assert units.shape == (10, 4) and torch.equal(units[:, 0], torch.arange(10))
    assert all(len(set(row)) == 4 for row in units.tolist())
    assert units.flatten().bincount().tolist() == [4] * 10  # no negatives count more than others
    assert torch.equal(units, shared_units(10, 3, keys)) and not torch.equal(units, shared_units(10, 3, keys + 1))
    assert shared_units(3, 5, keys).shape == (3, 3) and shared_units(1, 5, keys).tolist() == [[0]]

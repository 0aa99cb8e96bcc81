from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import reference
from nestpipe.kernels.jit import kernel
from nestpipe.kernels.rows import (
    NONE,
    ONES,
    birth,
    first_rows,
    gather,
    narrow,
    pool,
    pool_add,
    pool_put,
    rows_of,
    scatter_add,
    widen,
)  # fmt: skip
from tests.kernels.cases import EXTREMES, Records, few, floats, int64, same_bits, seeds, signed

dims = st.integers(1, 11)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def table(rng: np.random.Generator, n: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, Records]:
    values = torch.from_numpy(floats(rng, n, dim)).to(dtype)
    return values, Records(values, shift=int(rng.integers(0, 4)), spare=int(rng.integers(0, 3)))


def bags(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions below n, and offsets of bags of them, some empty."""
    lengths = rng.integers(0, 6, rng.integers(0, 12))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return rng.integers(0, n, offsets[-1]).astype(rng.choice([np.int32, np.int64])), offsets


# -- bfloat16 --------------------------------------------------------------------------------------------------------


@kernel
def narrow_all(values, out):
    for i in range(len(values)):
        out[i] = narrow(values[i])


@kernel
def widen_all(bits, out):
    for i in range(len(bits)):
        out[i] = widen(bits[i])


def test_bfloat16_rounding_is_torchs_bit_for_bit() -> None:
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    near_ties = high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    anything = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    values = np.concatenate([near_ties.ravel(), anything]).view(np.float32)
    bits = np.empty(len(values), np.uint16)
    narrow_all(values, bits)
    nan = np.isnan(values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bits[~nan], expected[~nan])
    assert torch.from_numpy(bits[nan].view(np.int16)).view(torch.bfloat16).isnan().all()


def test_every_bfloat16_widens_to_the_float_of_the_same_value() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(len(bits), np.float32)
    widen_all(bits, out)
    assert same_bits(out, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float())


# -- gather, scatter_add, pool, pool_add -------------------------------------------------------------------------------


@given(seeds, dims, dtypes, st.integers(0, 40), st.booleans())
@few
def test_gather_equals_the_reference(seed: int, dim: int, dtype: torch.dtype, n: int, mapped: bool) -> None:
    rng = np.random.default_rng(seed)
    values, records = table(rng, 13, dim, dtype)
    positions = rng.integers(-3, 13, n)
    targets = rng.permutation(n + 2)[:n].astype(np.int64) if mapped else NONE
    out = floats(rng, n + 2, dim)
    expected = reference.gather(
        values, torch.from_numpy(positions), torch.from_numpy(targets) if mapped else None, torch.from_numpy(out)
    )
    gather(records.rows, positions, targets, out)
    assert same_bits(out, expected)


def test_gather_leaves_the_target_of_a_negative_position_alone() -> None:
    values = torch.arange(6.0).view(3, 2)
    out = np.full((3, 2), 7, np.float32)
    gather(rows_of(values.numpy()), int64([2, -1, 0]), NONE, out)
    assert out.tolist() == [[4, 5], [7, 7], [0, 1]]


@given(seeds, dims, st.integers(0, 40), st.booleans())
@few
def test_scatter_add_equals_the_reference_bit_for_bit(seed: int, dim: int, n: int, mapped: bool) -> None:
    rng = np.random.default_rng(seed)
    grads, out = floats(rng, n + 2, dim), floats(rng, 4, dim)
    positions = rng.integers(0, 4, n).astype(rng.choice([np.int32, np.int64]))
    origins = rng.integers(0, n + 2, n) if mapped else NONE
    expected = reference.scatter_add(
        torch.from_numpy(grads), torch.from_numpy(origins) if mapped else None, torch.from_numpy(positions).long(),
        torch.from_numpy(out),
    )  # fmt: skip
    scatter_add(grads, origins, positions, out)
    assert same_bits(out, expected)


@given(seeds, dims, dtypes, st.booleans(), st.booleans())
@few
def test_pool_equals_the_reference_bit_for_bit(
    seed: int, dim: int, dtype: torch.dtype, weighted: bool, mapped: bool
) -> None:
    rng = np.random.default_rng(seed)
    values, records = table(rng, 13, dim, dtype)
    positions, offsets = bags(rng, 13)
    n = len(offsets) - 1
    weights = floats(rng, len(positions)) if weighted else ONES
    targets = rng.permutation(n + 2)[:n].astype(np.int64) if mapped else NONE
    out = floats(rng, n + 2, dim)
    expected = reference.pool(
        values, torch.from_numpy(positions), torch.from_numpy(offsets), torch.from_numpy(weights) if weighted else None,
        torch.from_numpy(targets) if mapped else None, torch.from_numpy(out),
    )  # fmt: skip
    pool(records.rows, positions, offsets, weights, targets, out)
    assert same_bits(out, expected)


@given(seeds, dims, st.booleans(), st.booleans())
@few
def test_pool_add_equals_the_reference_bit_for_bit(seed: int, dim: int, weighted: bool, mapped: bool) -> None:
    rng = np.random.default_rng(seed)
    positions, offsets = bags(rng, 4)
    n = len(offsets) - 1
    grads, out = floats(rng, n + 2, dim), floats(rng, 4, dim)
    weights = floats(rng, len(positions)) if weighted else ONES
    origins = rng.integers(0, n + 2, n) if mapped else NONE
    expected = reference.pool_add(
        torch.from_numpy(grads), torch.from_numpy(origins) if mapped else None, torch.from_numpy(positions),
        torch.from_numpy(offsets), torch.from_numpy(weights) if weighted else None, torch.from_numpy(out),
    )  # fmt: skip
    pool_add(grads, origins, positions, offsets, weights, out)
    assert same_bits(out, expected)


def test_bags_may_be_a_part_of_a_longer_list_of_positions() -> None:
    values = torch.tensor([[1.0], [10.0], [100.0]])
    positions, offsets = int64([0, 0, 1, 2, 2, 0]), int64([2, 4, 5])
    out = np.empty((2, 1), np.float32)
    pool(rows_of(values.numpy()), positions, offsets, ONES, NONE, out)
    assert out.tolist() == [[110], [100]]
    back = np.zeros((3, 1), np.float32)
    pool_add(np.array([[1], [5]], np.float32), NONE, positions, offsets, ONES, back)
    assert back.tolist() == [[0], [1], [6]]


@pytest.mark.parametrize(("order", "total"), [([0, 1, 2], 0.0), ([0, 2, 1], 1.0)])
def test_sums_run_in_the_order_given(order: list[int], total: float) -> None:
    # In float32, 1e8 + 1 is 1e8: the 1 survives only if it comes last.
    values = torch.tensor([[1e8], [1.0], [-1e8]])
    pooled, added = np.empty((1, 1), np.float32), np.zeros((1, 1), np.float32)
    pool(rows_of(values.numpy()), int64(order), int64([0, 3]), ONES, NONE, pooled)
    scatter_add(values.numpy(), int64(order), int64([0, 0, 0]), added)
    assert pooled.item() == added.item() == total


def test_an_empty_bag_is_zero_whatever_was_there_before() -> None:
    values, out = np.ones((1, 2), np.float32), np.full((3, 2), 5, np.float32)
    pool(rows_of(values), int64([0]), int64([0, 0, 1, 1]), ONES, NONE, out)
    assert out.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_empty_inputs_change_nothing() -> None:
    values, out = np.ones((1, 3), np.float32), np.full((2, 3), 5, np.float32)
    rows = rows_of(values)
    nothing = np.empty((0, 3), np.float32)
    gather(rows, NONE, NONE, out)
    scatter_add(nothing, NONE, NONE, out)
    pool(rows, NONE, int64([0]), ONES, NONE, out)
    pool_add(nothing, NONE, NONE, int64([0]), ONES, out)
    assert (out == 5).all()


# Small whole numbers: sums are exact in any order, so autograd's own order does not matter.


@given(seeds, dims, st.integers(0, 20))
@few
def test_scatter_add_is_the_gradient_of_gather(seed: int, dim: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    values = torch.zeros(5, dim, requires_grad=True)
    positions, targets = torch.from_numpy(rng.integers(0, 5, n)), torch.from_numpy(rng.permutation(n))
    grad = torch.from_numpy(rng.integers(-8, 8, (n, dim)).astype(np.float32))
    gathered = reference.gather(values, positions, targets, torch.zeros(n, dim))
    (expected,) = torch.autograd.grad(gathered, values, grad)
    assert torch.equal(reference.scatter_add(grad, targets, positions, torch.zeros(5, dim)), expected)
    out = np.zeros((5, dim), np.float32)
    scatter_add(grad.numpy(), targets.numpy(), positions.numpy(), out)
    assert torch.equal(torch.from_numpy(out), expected)


@given(seeds, dims, st.booleans())
@few
def test_pool_add_is_the_gradient_of_pool(seed: int, dim: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    positions, offsets = (torch.from_numpy(part) for part in bags(rng, 5))
    n = len(offsets) - 1
    values = torch.zeros(5, dim, requires_grad=True)
    weights = torch.from_numpy(rng.integers(-4, 5, len(positions)).astype(np.float32)) if weighted else None
    targets = torch.from_numpy(rng.permutation(n))
    grad = torch.from_numpy(rng.integers(-8, 8, (n, dim)).astype(np.float32))
    pooled = reference.pool(values, positions, offsets, weights, targets, torch.zeros(n, dim))
    expected = torch.zeros(5, dim)
    if pooled.requires_grad:  # not if there is nothing in any bag
        (expected,) = torch.autograd.grad(pooled, values, grad)
    # Equal but for the sign of a zero: autograd starts from the first product, not from zero.
    assert torch.equal(reference.pool_add(grad, targets, positions, offsets, weights, torch.zeros(5, dim)), expected)
    out = np.zeros((5, dim), np.float32)
    given_weights = ONES if weights is None else weights.numpy()
    pool_add(grad.numpy(), targets.numpy(), positions.numpy(), offsets.numpy(), given_weights, out)
    assert torch.equal(torch.from_numpy(out), expected)


# -- first values ----------------------------------------------------------------------------------------------------


def first(seed: int, keys: list[int], dim: int, *, normal: bool, a: float, b: float, half: bool = False) -> np.ndarray:
    out = np.full((len(keys), dim), np.nan, np.float32)
    first_rows(np.uint64(seed), int64(keys), np.full(len(keys), -1), normal, a, b, half, out)
    return out


@given(st.integers(0, 2**64 - 1), st.lists(st.sampled_from([*EXTREMES, 7, 123456789]), max_size=5), dims)
@few
def test_uniform_first_values_equal_the_reference_bit_for_bit(seed: int, keys: list[int], dim: int) -> None:
    expected = reference.first_values(
        signed(seed), torch.tensor(keys, dtype=torch.int64), dim, normal=False, a=-0.3, b=0.7
    )
    assert same_bits(first(seed, keys, dim, normal=False, a=-0.3, b=0.7), expected)


@given(st.integers(0, 2**64 - 1), st.lists(st.sampled_from([*EXTREMES, 7, 123456789]), max_size=5), dims)
@few
def test_normal_first_values_equal_the_reference(seed: int, keys: list[int], dim: int) -> None:
    # Up to the last bit: sine and logarithm are not the same code in torch and in the kernel.
    expected = reference.first_values(
        signed(seed), torch.tensor(keys, dtype=torch.int64), dim, normal=True, a=0.5, b=2.0
    )
    np.testing.assert_allclose(
        first(seed, keys, dim, normal=True, a=0.5, b=2.0), expected.numpy(), rtol=3e-7, atol=1e-7
    )


@pytest.mark.parametrize("normal", [False, True])
def test_first_values_do_not_depend_on_the_other_keys_or_their_order(normal: bool) -> None:
    keys = [*EXTREMES, *range(50, 90)]
    together = first(3, keys, 9, normal=normal, a=0.0, b=1.0)
    assert same_bits(first(3, keys[::-1], 9, normal=normal, a=0.0, b=1.0)[::-1].copy(), together)
    for i, key in enumerate(keys):
        assert same_bits(first(3, [key], 9, normal=normal, a=0.0, b=1.0)[0], together[i])


def test_first_values_are_written_only_where_there_is_no_position() -> None:
    out = np.full((3, 4), 9, np.float32)
    first_rows(np.uint64(1), int64([5, 6, 7]), int64([0, -1, 3]), False, -1.0, 1.0, False, out)
    assert (out[[0, 2]] == 9).all()
    assert same_bits(out[1], first(1, [6], 4, normal=False, a=-1.0, b=1.0)[0])


def test_first_values_of_a_half_table_are_those_of_a_float_table_rounded() -> None:
    whole = first(1, list(range(99)), 5, normal=True, a=0.0, b=0.02)
    half = first(1, list(range(99)), 5, normal=True, a=0.0, b=0.02, half=True)
    assert same_bits(half, torch.from_numpy(whole).bfloat16())


def test_uniform_first_values_fill_their_range_evenly() -> None:
    values = first(11, list(range(-2000, 2000)), 16, normal=False, a=-0.5, b=1.5)
    assert values.min() >= -0.5
    assert values.max() < 1.5
    shares = np.histogram(values, bins=20, range=(-0.5, 1.5))[0] / values.size
    assert np.abs(shares - 0.05).max() < 0.005


def test_normal_first_values_have_their_mean_and_deviation_and_are_independent() -> None:
    values = first(11, list(range(-2000, 2000)), 16, normal=True, a=0.0, b=3.0) / 3.0
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert abs((values**4).mean() - 3) < 0.15
    assert np.abs(np.corrcoef(values.T) - np.eye(16)).max() < 0.08  # between columns
    assert np.abs(np.corrcoef(values[:200]) - np.eye(200)).max() < 0.97  # no two rows alike


@pytest.mark.parametrize("normal", [False, True])
def test_first_values_differ_by_key_and_by_seed(normal: bool) -> None:
    rows = np.concatenate([first(seed, list(range(500)), 2, normal=normal, a=0.0, b=1.0) for seed in range(4)])
    assert len(np.unique(rows, axis=0)) == 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normal", [False, True])
def test_birth_writes_first_values_and_state_of_the_born_and_touches_no_other(dtype: torch.dtype, normal: bool) -> None:
    records = Records(torch.full((9, 5), 8.0, dtype=dtype), torch.full((9, 3), 4.0), shift=1, spare=1)
    keys, positions = int64([10, 12]), int64([8, 3])
    birth(
        records.rows,
        np.uint64(2),
        keys,
        positions,
        normal,
        -1.0,
        1.0,
        np.float32(0.25),
        3,
        np.empty(5, np.float32),
    )
    values, state = torch.full((9, 5), 8.0), torch.full((9, 3), 4.0)
    values[[8, 3]] = torch.from_numpy(first(2, [10, 12], 5, normal=normal, a=-1.0, b=1.0)).to(dtype).float()
    state[[8, 3]] = 0.25
    assert same_bits(records.values, values)
    assert same_bits(records.state, state)
    assert not records.words[:, -1].any()


@given(seeds, dims)
@few
def test_pool_put_is_pool_add_where_no_position_occurs_twice(seed: int, dim: int) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, 5))]).astype(np.int64)
    positions = rng.permutation(int(offsets[-1])).astype(np.int32)
    grads = rng.standard_normal((5, dim)).astype(np.float32)
    added, put = np.zeros((len(positions), dim), np.float32), np.full((len(positions), dim), np.nan, np.float32)
    pool_add(grads, NONE, positions, offsets, ONES, added)
    pool_put(grads, positions, offsets, put)
    np.testing.assert_array_equal(put, added)

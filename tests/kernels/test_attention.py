from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import attention as kernels
from nestpipe.kernels import reference
from nestpipe.ops.attention.buckets import bucket_cells
from tests.kernels.cases import few, seeds

shapes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 20))


@given(seed=seeds, shape=shapes, num_buckets=st.sampled_from([1, 5, 64]))
@few
def test_time_bias_equals_the_reference_bit_for_bit(seed, shape, num_buckets) -> None:
    n, q, k = shape
    rng = np.random.default_rng(seed)
    bias, time_bias = (torch.from_numpy(rng.standard_normal(size, np.float32)) for size in ((q, k), num_buckets))
    times_q, times_k = (torch.from_numpy(rng.integers(0, 10 ** rng.integers(1, 10), (n, size))) for size in (q, k))
    out, found = np.zeros(shape, np.float32), np.zeros(shape, np.int16)
    given_ = (x.numpy() for x in (bias, times_q, times_k, time_bias))
    kernels.add_time_bias(*given_, *bucket_cells(num_buckets), out, found)
    expected, buckets = reference.add_time_bias(bias, times_q, times_k, time_bias)
    assert found.tolist() == buckets.tolist()
    assert torch.equal(torch.from_numpy(out), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(seed=seeds, shape=shapes, first=st.integers(0, 30))
@few
def test_sums_of_diagonals_equal_the_reference_bit_for_bit(dtype, seed, shape, first) -> None:
    grad = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    out = np.zeros(first + shape[1] + 2)
    kernels.sum_diagonals(grad, first, out)
    assert out.tolist() == reference.sum_diagonals(torch.from_numpy(grad), first, len(out)).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(seed=seeds, shape=shapes)
@few
def test_sums_of_buckets_equal_the_reference_bit_for_bit(dtype, seed, shape) -> None:
    rng = np.random.default_rng(seed)
    grad, found = rng.standard_normal(shape).astype(dtype), rng.integers(0, 4, shape).astype(np.int16)
    out = np.zeros(5)
    kernels.sum_buckets(grad, found, out)
    assert out.tolist() == reference.sum_buckets(torch.from_numpy(grad), torch.from_numpy(found), 5).tolist()

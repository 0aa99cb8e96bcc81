"""Buckets of time: the formula, and the table that takes its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.kernels.attention import add_time_bias
from nestpipe.ops.attention.buckets import bucket_cells, time_buckets


def test_a_bucket_is_a_factor_of_time_and_the_past_is_the_first():
    assert time_buckets(torch.tensor([-5, 0, 1, 2, 60, 3600, 86400, 10**12]), 64).tolist() == [
        0,
        0,
        0,
        2,
        13,
        27,
        37,
        63,
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("num_buckets", [1, 7, 64])
def test_the_table_finds_the_bucket_of_the_formula_on_both_sides_of_every_bound(num_buckets, dtype):
    cells, bounds = bucket_cells(num_buckets)
    edges = torch.from_numpy(bounds[np.isfinite(bounds) & (bounds < 2**40)])
    around = torch.cat([torch.nextafter(edges, torch.zeros(())), edges, torch.nextafter(edges, torch.full((), 1e30))])
    seconds = torch.cat([around, torch.arange(-3.0, 3000.0), torch.logspace(3, 12, 2000)]).to(dtype)[None]
    times = torch.zeros(1, 1, dtype=dtype)
    found = np.zeros((1, seconds.shape[1], 1), np.int16)
    out = np.zeros(found.shape, np.float32)
    bias = np.ones((seconds.shape[1], 1), np.float32)
    add_time_bias(
        bias, seconds.numpy(), times.numpy(), np.arange(num_buckets, dtype=np.float32), cells, bounds, out, found
    )
    assert found[0, :, 0].tolist() == time_buckets(seconds[0], num_buckets).tolist()
    assert (out == found + 1).all()

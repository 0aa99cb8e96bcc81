"""Logarithmic buckets of the time between two items.

0.301 = log10(2): as the authors of HSTU have it, about 2.3 buckets per doubling; 64 buckets reach past seven years.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from nestpipe.kernels.attention import CELL_SHIFT


def time_buckets(seconds: Tensor, num_buckets: int) -> Tensor:
    """int64 in [0, num_buckets): log(seconds) / 0.301 rounded down; below a second, and backwards in time, 0."""
    logs = seconds.to(torch.float32).clamp(min=1).log_().div_(0.301)
    return logs.to(torch.int64).clamp_(max=num_buckets - 1)


@functools.lru_cache(maxsize=16)
def bucket_cells(num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """The same as a table, without a logarithm per pair: of every cell of float32 its first bucket, and the number where the
    next one begins (infinity if it does not in this cell). A cell is narrower than a bucket, so there is at most one."""
    starts = torch.arange(2**31 >> CELL_SHIFT, dtype=torch.int64) << CELL_SHIFT
    infinity = 255 << 23
    low, high = starts, (starts + (1 << CELL_SHIFT) - 1).clamp(max=infinity - 1)
    first, last = _of_bits(low, num_buckets), _of_bits(high, num_buckets)
    for _ in range(CELL_SHIFT + 1):  # bisection: `low` is always in the first bucket, `high` always in the last
        middle = (low + high) // 2
        in_first = _of_bits(middle, num_buckets) == first
        low, high = torch.where(in_first, middle, low), torch.where(in_first, high, middle)
    bounds = torch.where(first == last, torch.inf, high.to(torch.int32).view(torch.float32))
    return first.to(torch.int16).numpy(), bounds.numpy()


def _of_bits(bits: Tensor, num_buckets: int) -> Tensor:
    return time_buckets(bits.clamp(max=(255 << 23) - 1).to(torch.int32).view(torch.float32), num_buckets)

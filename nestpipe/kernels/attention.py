"""Passes over a tile of attention scores that torch has no fast way for: biases by distance and by time, and their gradients.

Shape legend: N tiles, Q queries, K keys of a tile, M distances, C cells of float32 (see `ops/attention/buckets.py`).
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import float_bits, inlined, kernel

CELL_SHIFT = 21  # a cell: all float32 that share sign, exponent and the first two bits of the mantissa


@inlined
def _bucket(seconds, buckets_C, bounds_C):
    """A cell lies in one bucket, or in two with a bound between them."""
    seconds = np.float32(seconds)
    if not seconds > np.float32(1.0):
        return np.int64(buckets_C[0])
    cell = np.int64(float_bits(seconds) >> np.uint32(CELL_SHIFT))
    return np.int64(buckets_C[cell]) + (1 if seconds >= bounds_C[cell] else 0)


@kernel
def add_time_bias(bias_QK, times_NQ, times_NK, time_bias, buckets_C, bounds_C, out_NQK, found_NQK):
    """out = bias by distance + bias by time; `found` keeps the buckets for the gradient."""
    for n in range(out_NQK.shape[0]):
        for i in range(out_NQK.shape[1]):
            now = times_NQ[n, i]
            for j in range(out_NQK.shape[2]):
                bucket = _bucket(now - times_NK[n, j], buckets_C, bounds_C)
                found_NQK[n, i, j] = bucket
                out_NQK[n, i, j] = bias_QK[i, j] + time_bias[bucket]


@kernel
def sum_diagonals(grad_NQK, first, out_M):
    """out[M - 1 - distance] += grad[n, i, j], distance = first + i - j, tile by tile and row by row. Negative ones are left out.

    From far to near, so that a row of the tile and its part of `out` run the same way.
    """
    num_keys = grad_NQK.shape[2]
    for n in range(grad_NQK.shape[0]):
        for i in range(grad_NQK.shape[1]):
            distance = first + i
            begin = len(out_M) - 1 - distance
            row = grad_NQK[n, i]
            for j in range(min(num_keys, distance + 1)):
                out_M[begin + j] += row[j]


@kernel
def sum_buckets(grad_NQK, found_NQK, out):
    """out[bucket] += grad, in the order of the tile. Neighbours are often of one bucket: they are added up beforehand."""
    for n in range(grad_NQK.shape[0]):
        for i in range(grad_NQK.shape[1]):
            last, total = np.int64(found_NQK[n, i, 0]), 0.0
            for j in range(grad_NQK.shape[2]):
                bucket = np.int64(found_NQK[n, i, j])
                if bucket != last:
                    out[last] += total
                    last, total = bucket, 0.0
                total += grad_NQK[n, i, j]
            out[last] += total

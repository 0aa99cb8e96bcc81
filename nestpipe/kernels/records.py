"""Kernels on whole records, and on the counters that eviction reads.

A record is float32 words: values (two bfloat16 to a word if half), then state. The counters of a row are two int32, the step
of its last use and the number of steps that used it; they lie in memory of their own.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nestpipe.kernels.jit import float_bits, float_pointer, int_pointer, kernel
from nestpipe.kernels.keys import mix
from nestpipe.kernels.rows import address


@kernel
def put(records, positions, rows):
    """The opposite of gather: record positions[i] = records[i], word for word."""
    n, width = records.shape
    for i in range(n):
        target = carray(float_pointer(address(rows, positions[i])), width)
        for d in range(width):
            target[d] = records[i, d]


@kernel
def count_use(counters_of, positions, step, first):
    """Notes a use in `step` at the counters of these positions; the first of a row forgets what was counted there before."""
    for i in range(len(positions)):
        counters = carray(int_pointer(address(counters_of, positions[i])), 2)
        counters[0] = step
        counters[1] = 1 if first else counters[1] + 1


@kernel
def read_counters(counters_of, positions, last_used, uses):
    for i in range(len(positions)):
        counters = carray(int_pointer(address(counters_of, positions[i])), 2)
        last_used[i] = counters[0]
        uses[i] = counters[1]


@kernel
def digest(keys, records, tag, out):
    """Adds to out[0:2] two independent 64-bit hashes of every (tag, key, record): a sum, so order does not matter."""
    n, width = records.shape
    for i in range(n):
        a = mix(np.uint64(keys[i]) ^ tag)
        b = mix(a + np.uint64(0x9E3779B97F4A7C15))
        for d in range(width):
            word = np.uint64(float_bits(records[i, d]))
            a = mix(a ^ word)
            b = mix(b + word)
        out[0] += a
        out[1] += b

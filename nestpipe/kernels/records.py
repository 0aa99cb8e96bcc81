"""Kernels on whole records: values, optimizer state, and the two counters that eviction reads.

A record is float32 words: values (two bfloat16 to a word if half), state, then, if the table evicts, two int32: the step
of the last use and the number of steps that used it.
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
def touch(rows, positions, word, step):
    """Notes a use in `step` at the counters, which start `word` words into the record."""
    for i in range(len(positions)):
        counters = carray(int_pointer(address(rows, positions[i]) + word * 4), 2)
        counters[0] = step
        counters[1] += 1


@kernel
def set_counters(rows, positions, chosen, word, last_used, uses):
    for i in chosen:
        counters = carray(int_pointer(address(rows, positions[i]) + word * 4), 2)
        counters[0] = last_used
        counters[1] = uses


@kernel
def read_counters(rows, positions, word, last_used, uses):
    for i in range(len(positions)):
        counters = carray(int_pointer(address(rows, positions[i]) + word * 4), 2)
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

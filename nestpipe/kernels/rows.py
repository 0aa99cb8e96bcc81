"""Kernels on rows: gather, pool, and their transposes; plus the first values of a row.

`Rows` says where rows lie: record p starts at bases[p >> shift] + (p & low bits) * stride bytes, its values first
(float32, or bfloat16 if half), then whatever the owner keeps beside them. A plain tensor is one chunk of records.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray

from nestpipe.kernels.jit import bits_float, float_bits, float_pointer, half_pointer, inlined, kernel, prefetch
from nestpipe.kernels.keys import AHEAD, mix

NONE = np.empty(0, np.int64)  # for index arrays that are left out
ONES = np.empty(0, np.float32)  # for weights that are left out


class Rows(NamedTuple):
    bases: np.ndarray  # int64 addresses of chunks
    shift: int  # log2 of records per chunk
    stride: int  # bytes from one record to the next
    half: bool  # values are bfloat16


def rows_of(array: np.ndarray) -> Rows:
    """A contiguous float32 [N, D] array as Rows. The caller keeps the array alive."""
    assert array.dtype == np.float32 and array.ndim == 2 and array.flags.c_contiguous
    return one_chunk(array.ctypes.data, array.shape[1] * 4)


def one_chunk(start: int, stride: int, *, half: bool = False) -> Rows:
    """Records that lie side by side from the address `start` on, however many. The caller keeps their memory alive."""
    return Rows(np.array([start], np.int64), 62, stride, half)  # 2^62 bytes is more than there are addresses


@inlined
def address(rows, position):
    return rows.bases[position >> rows.shift] + (position & ((1 << rows.shift) - 1)) * rows.stride


@inlined
def ask_for(start, num_bytes):
    """Prefetches every cache line of [start, start + num_bytes), the last one too where rows do not start at a line."""
    for line in range(start & -64, start + num_bytes, 64):
        prefetch(line)


@kernel
def widen(bits):
    """bfloat16 bits to float32."""
    return bits_float(np.uint32(bits) << np.uint32(16))


@kernel
def narrow(value):
    """float32 to bfloat16 bits, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = float_bits(value)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel
def gather(rows, positions, targets, out):
    """out[targets[i]] = values of record positions[i]; a negative position leaves it alone. Empty targets: out[i]."""
    n, dim = len(positions), out.shape[1]
    num_bytes = dim * (2 if rows.half else 4)
    mapped = len(targets) > 0
    for i in range(n):
        if i + AHEAD < n and positions[i + AHEAD] >= 0:
            ask_for(address(rows, positions[i + AHEAD]), num_bytes)
        if positions[i] < 0:
            continue
        here = address(rows, positions[i])
        target = out[targets[i] if mapped else i]
        if rows.half:
            bits = carray(half_pointer(here), dim)
            for d in range(dim):
                target[d] = widen(bits[d])
        else:
            values = carray(float_pointer(here), dim)
            for d in range(dim):
                target[d] = values[d]


@kernel
def scatter_add(grads, origins, positions, out):
    """out[positions[i]] += grads[origins[i]], for i in order: the transpose of gather. Empty origins: grads[i]."""
    n, dim = len(positions), grads.shape[1]
    base = out.ctypes.data
    mapped = len(origins) > 0
    for i in range(n):
        if i + AHEAD < n:
            ask_for(base + np.int64(positions[i + AHEAD]) * dim * 4, dim * 4)
        target = out[positions[i]]
        grad = grads[origins[i] if mapped else i]
        for d in range(dim):
            target[d] += grad[d]


@kernel
def pool(rows, positions, offsets, weights, targets, out):
    """out[targets[b]] = sum over i in offsets[b]..offsets[b + 1] of weights[i] * record positions[i], in that order.

    weights may be empty: then each is 1. targets may be empty: then out[b].
    """
    num_bags, dim = len(offsets) - 1, out.shape[1]
    num_bytes = dim * (2 if rows.half else 4)
    last = offsets[num_bags]
    weighted = len(weights) > 0
    mapped = len(targets) > 0
    for b in range(num_bags):
        total = out[targets[b] if mapped else b]
        total[:] = 0
        for i in range(offsets[b], offsets[b + 1]):
            if i + AHEAD < last:
                ask_for(address(rows, positions[i + AHEAD]), num_bytes)
            here = address(rows, positions[i])
            weight = weights[i] if weighted else np.float32(1)
            if rows.half:
                bits = carray(half_pointer(here), dim)
                for d in range(dim):
                    total[d] += weight * widen(bits[d])
            else:
                values = carray(float_pointer(here), dim)
                for d in range(dim):
                    total[d] += weight * values[d]


@kernel
def pool_add(grads, origins, positions, offsets, weights, out):
    """out[positions[i]] += weights[i] * grads[origins[b]] for each i of bag b, in order: the transpose of pool."""
    num_bags, dim = len(offsets) - 1, grads.shape[1]
    base = out.ctypes.data
    last = offsets[num_bags]
    weighted = len(weights) > 0
    mapped = len(origins) > 0
    for b in range(num_bags):
        grad = grads[origins[b] if mapped else b]
        for i in range(offsets[b], offsets[b + 1]):
            if i + AHEAD < last:
                ask_for(base + np.int64(positions[i + AHEAD]) * dim * 4, dim * 4)
            target = out[positions[i]]
            weight = weights[i] if weighted else np.float32(1)
            for d in range(dim):
                target[d] += weight * grad[d]


@kernel
def pool_put(grads, positions, offsets, out):
    """out[positions[i]] = grads[b] for each i of bag b: `pool_add` where no position occurs twice and weights are 1."""
    num_bags, dim = len(offsets) - 1, grads.shape[1]
    for b in range(num_bags):
        grad = grads[b]
        for i in range(offsets[b], offsets[b + 1]):
            target = out[positions[i]]
            for d in range(dim):
                target[d] = grad[d]


@kernel
def _uniform(bits):
    """The top 24 bits as a float in [0, 1)."""
    return np.float32(bits >> np.uint64(40)) * np.float32(1.0 / (1 << 24))


@kernel
def first_values(seed, key, normal, a, b, out):
    """The values a row is born with: a function of (seed, key) alone.

    normal: a + b * z with z standard normal (Box-Muller); else uniform in [a, b).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = mix(np.uint64(key) ^ mix(seed))
    dim = len(out)
    for d in range(dim):
        if normal:
            pair = np.uint64(d >> 1)
            u = np.float64(_uniform(mix(state + golden * (pair * np.uint64(2) + np.uint64(1)))))
            v = np.float64(_uniform(mix(state + golden * (pair * np.uint64(2) + np.uint64(2)))))
            radius = math.sqrt(-2.0 * math.log(1.0 - u))
            angle = 2.0 * math.pi * v
            z = radius * (math.sin(angle) if d & 1 else math.cos(angle))
            out[d] = np.float32(a + b * z)
        else:
            u32 = _uniform(mix(state + golden * np.uint64(d + 1)))
            out[d] = np.float32(a) + np.float32(b - a) * u32


@kernel
def first_rows(seed, keys, positions, normal, a, b, half, out):
    """out[i] = the first values of keys[i], for every i whose position is negative (as a table in half would hold them)."""
    for i in range(len(keys)):
        if positions[i] < 0:
            first_values(seed, keys[i], normal, a, b, out[i])
            if half:
                for d in range(out.shape[1]):
                    out[i, d] = widen(narrow(out[i, d]))


@kernel
def birth(rows, seed, keys, positions, normal, a, b, initial, state_floats, scratch):
    """Writes first values and first optimizer state of keys[i] at positions[i].

    scratch: dim floats. initial: what every float of state starts with.
    """
    dim = len(scratch)
    for i in range(len(keys)):
        here = address(rows, positions[i])
        first_values(seed, keys[i], normal, a, b, scratch)
        if rows.half:
            bits = carray(half_pointer(here), dim)
            for d in range(dim):
                bits[d] = narrow(scratch[d])
            if dim & 1:  # the other half of the last word: what was in memory would be part of digest and checkpoint
                carray(half_pointer(here + dim * 2), 1)[0] = 0
        else:
            values = carray(float_pointer(here), dim)
            for d in range(dim):
                values[d] = scratch[d]
        value_floats = (dim + 1) // 2 if rows.half else dim
        state = carray(float_pointer(here + value_floats * 4), state_floats)
        for d in range(state_floats):
            state[d] = initial

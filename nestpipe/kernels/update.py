"""Row optimizers as kernels: one pass over the touched rows, each with its state beside it.

For every i: grad = the sum of row i's gradients, in order, times scale, clipped to norm `clip` (0: not), plus
weight_decay * row; then the optimizer's rule. Arithmetic is float32 in a fixed order. Summing here, and not into a buffer
first, saves three trips through memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray

from nestpipe.kernels.jit import float_pointer, half_pointer, inlined, kernel
from nestpipe.kernels.keys import mix
from nestpipe.kernels.rows import address, ask_for, narrow, widen

_1, _2, _3, _4, _5, _6, _7 = (np.uint64(i) for i in range(1, 8))
NEAR = 8  # records between asking for a record and updating it


class Gradients(NamedTuple):
    """Gradients by row: row i's are weights[e] * values[origins[e]] for e from start[i] to start[i + 1].

    weights may be empty: then each is 1.
    """

    values: np.ndarray  # [N, dim] float32
    start: np.ndarray  # [rows + 1]
    origins: np.ndarray
    weights: np.ndarray


@kernel
def group_by_row(row_of, num_rows, origins, weights, start, cursor, sorted_origins, sorted_weights):
    """Stable counting sort of entries by row: fills start [num_rows + 1] and the sorted arrays. cursor: scratch."""
    start[:] = 0
    for e in range(len(row_of)):
        start[row_of[e] + 1] += 1
    for i in range(num_rows):
        start[i + 1] += start[i]
        cursor[i] = start[i]
    for e in range(len(row_of)):
        place = cursor[row_of[e]]
        cursor[row_of[e]] = place + 1
        sorted_origins[place] = origins[e]
        if len(weights):
            sorted_weights[place] = weights[e]


@inlined
def _sum_of_squares(values):
    """In eight running sums: as fast as a vector unit allows, and the same order on every machine."""
    n = len(values)
    full = n - n % 8
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    # Unsigned, because Numba tests a signed sum for a negative index, and the test keeps the loop from vector code.
    for d in range(np.uint64(0), np.uint64(full), np.uint64(8)):
        s0 += values[d] * values[d]
        s1 += values[d + _1] * values[d + _1]
        s2 += values[d + _2] * values[d + _2]
        s3 += values[d + _3] * values[d + _3]
        s4 += values[d + _4] * values[d + _4]
        s5 += values[d + _5] * values[d + _5]
        s6 += values[d + _6] * values[d + _6]
        s7 += values[d + _7] * values[d + _7]
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    for d in range(full, n):
        total += values[d] * values[d]
    return total


# No function here returns an array: Numba counts references to arrays that it passes out, and those atomic operations
# cost more than the arithmetic of a row.


@inlined
def ask_ahead(rows, positions, i, num_bytes):
    if i + NEAR < len(positions):
        ask_for(address(rows, positions[i + NEAR]), num_bytes)


@inlined
def sum_gradient(grads, i, scale, grad):
    """grad = the sum of row i's gradients, times scale."""
    first, last = grads.start[i], grads.start[i + 1]
    if first == last:
        grad[:] = 0
    for e in range(first, last):
        part = grads.values[grads.origins[e]]
        weight = grads.weights[e] if len(grads.weights) else np.float32(1)
        if e == first:
            for d in range(len(grad)):
                grad[d] = weight * part[d]
        else:
            for d in range(len(grad)):
                grad[d] += weight * part[d]
    for d in range(len(grad)):
        grad[d] *= scale


@inlined
def clip_and_decay(row, weight_decay, clip, grad):
    if clip > 0:
        norm = math.sqrt(_sum_of_squares(grad))
        if norm > clip:
            shrink = np.float32(clip / norm)
            for d in range(len(grad)):
                grad[d] *= shrink
    if weight_decay > 0:
        for d in range(len(grad)):
            grad[d] += weight_decay * row[d]


@inlined
def load_half(here, row):
    bits = carray(half_pointer(here), len(row))
    for d in range(len(row)):
        row[d] = widen(bits[d])


@inlined
def save_half(here, row):
    bits = carray(half_pointer(here), len(row))
    for d in range(len(row)):
        bits[d] = narrow(row[d])


@inlined
def state_address(rows, here, dim):
    return here + ((dim + 1) // 2 if rows.half else dim) * 4


@inlined
def _sgd(row, grad, lr):
    for d in range(len(row)):
        row[d] -= lr * grad[d]


@kernel
def sgd(rows, positions, grads, scratch, scale, lr, weight_decay, clip):
    grad, row = scratch
    dim = len(row)
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, dim * 4)
        here = address(rows, positions[i])
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            clip_and_decay(row, weight_decay, clip, grad)
            _sgd(row, grad, lr)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            clip_and_decay(values, weight_decay, clip, grad)
            _sgd(values, grad, lr)


@inlined
def _adagrad(row, grad, total, lr, eps):
    for d in range(len(row)):
        total[d] += grad[d] * grad[d]
        row[d] -= lr * grad[d] / (np.float32(math.sqrt(total[d])) + eps)


@kernel
def adagrad(rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps):
    grad, row = scratch
    dim = len(row)
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, dim * 8)
        here = address(rows, positions[i])
        total = carray(float_pointer(state_address(rows, here, dim)), dim)
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            clip_and_decay(row, weight_decay, clip, grad)
            _adagrad(row, grad, total, lr, eps)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            clip_and_decay(values, weight_decay, clip, grad)
            _adagrad(values, grad, total, lr, eps)


@inlined
def _rowwise_adagrad(row, grad, total, lr, eps):
    total[0] += _sum_of_squares(grad) / np.float32(len(row))
    step = lr / (np.float32(math.sqrt(total[0])) + eps)
    for d in range(len(row)):
        row[d] -= step * grad[d]


@kernel
def rowwise_adagrad(rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps):
    grad, row = scratch
    dim = len(row)
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, dim * 4 + 4)
        here = address(rows, positions[i])
        total = carray(float_pointer(state_address(rows, here, dim)), 1)
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            clip_and_decay(row, weight_decay, clip, grad)
            _rowwise_adagrad(row, grad, total, lr, eps)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            clip_and_decay(values, weight_decay, clip, grad)
            _rowwise_adagrad(values, grad, total, lr, eps)


@inlined
def _scaled_rowwise_adagrad(row, grad, total, lr, eps, c):
    total[0] += _sum_of_squares(grad) / np.float32(len(row))
    step = lr / np.float32(math.sqrt(total[0] / c + eps))
    for d in range(len(row)):
        row[d] -= step * grad[d]


@kernel
def scaled_rowwise_adagrad(rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps, c):
    grad, row = scratch
    dim = len(row)
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, dim * 4 + 4)
        here = address(rows, positions[i])
        total = carray(float_pointer(state_address(rows, here, dim)), 1)
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            clip_and_decay(row, weight_decay, clip, grad)
            _scaled_rowwise_adagrad(row, grad, total, lr, eps, c)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            clip_and_decay(values, weight_decay, clip, grad)
            _scaled_rowwise_adagrad(values, grad, total, lr, eps, c)


# State of row_scaled_adagrad; docs/two_d.md says what it is for. Here g is the gradient of one replica, gbar the mean over all M
# (0 from those that do not touch the row), |.|^2 and products are means over the values of the row, and n is how many replicas
# touch the row in a step. The first three are the same in all replicas; they are sums over the steps up to the last averaging:
SQUARES = 0  # of |g|^2 / M^2, over replicas: what |gbar|^2 would be if no two replicas agreed
CROSS = 1  # of g * g' / M^2, over pairs of replicas, as estimated: the rest of |gbar|^2
AGREED = 2  # what CROSS would be if all replicas agreed
# The others are this replica's sums since then; averaging uses them and starts them again from zero:
OWN = 3  # of |g|^2
SHARED = 4  # of (n - 1) * |g|^2
SKETCH = 5  # four sums, of every fourth value of g, with random signs that are the same in all replicas
SKETCHES = 4
ROW_SCALED_FLOATS = SKETCH + SKETCHES


@inlined
def agreement(state):
    """How much gradients of two replicas agree: 0 not at all, 1 they are the same; 1 while nothing is known, which is safe."""
    known = state[AGREED] > 0
    return min(max(state[CROSS] / state[AGREED], np.float32(0)), np.float32(1)) if known else np.float32(1)


@inlined
def _add_to_sketch(grad, signs, state):
    n = len(grad)
    full = n - n % 4
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(np.uint64(0), np.uint64(full), np.uint64(4)):  # unsigned: see _sum_of_squares
        s0 += signs[d] * grad[d]
        s1 += signs[d + _1] * grad[d + _1]
        s2 += signs[d + _2] * grad[d + _2]
        s3 += signs[d + _3] * grad[d + _3]
    state[SKETCH] += s0
    state[SKETCH + 1] += s1
    state[SKETCH + 2] += s2
    state[SKETCH + 3] += s3
    for d in range(full, n):
        state[SKETCH + d - full] += signs[d] * grad[d]


@inlined
def _row_scaled_adagrad(row, grad, signs, state, lr, weight_decay, clip, eps, replicas, n):
    """|gbar|^2 of a step is estimated by n * (1 + (n - 1) * agreement) / M^2 * |g|^2."""
    agree, one = agreement(state), np.float32(1)
    share = n * (one + (n - one) * agree) / (replicas * replicas)
    # Of n replicas' decay only n / M is left after averaging, and the limit is one of gbar.
    clip_and_decay(row, weight_decay * (replicas / n), clip / np.float32(math.sqrt(share)), grad)
    square = _sum_of_squares(grad) / np.float32(len(row))
    if replicas > one:
        state[OWN] += square
        state[SHARED] += (n - one) * square
        _add_to_sketch(grad, signs, state)
    else:  # nobody will average: it is known at once, also to whoever loads it with replicas
        state[SQUARES] += square
    own, shared = state[OWN], state[SHARED]
    total = state[SQUARES] + agree * state[AGREED]
    if own > 0:
        total += (one + shared / own) * (own + agree * shared) / (replicas * replicas)
    step = lr / np.float32(math.sqrt(total + eps))
    for d in range(len(row)):
        row[d] -= step * grad[d]


@kernel
def row_scaled_adagrad(
    rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps, num_replicas, sharers, updates
):  # fmt: skip
    """sharers[i]: how many of the replicas touch row i in this batch, this one included; empty: all, the shortest step.

    updates: a number of this batch, the same in all replicas; the signs of the sketch are drawn from it.
    """
    grad, row = scratch
    dim = len(row)
    replicas, signs = np.float32(num_replicas), np.empty(dim, np.float32)
    seed, golden = mix(np.uint64(updates)), np.uint64(0x9E3779B97F4A7C15)
    for d in range(dim):
        signs[d] = 1 if mix(seed + golden * np.uint64(d + 1)) >> np.uint64(63) else -1
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, (dim + ROW_SCALED_FLOATS) * 4)
        here = address(rows, positions[i])
        state = carray(float_pointer(state_address(rows, here, dim)), ROW_SCALED_FLOATS)
        n = np.float32(sharers[i]) if len(sharers) else replicas
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            _row_scaled_adagrad(row, grad, signs, state, lr, weight_decay, clip, eps, replicas, n)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            _row_scaled_adagrad(values, grad, signs, state, lr, weight_decay, clip, eps, replicas, n)


@inlined
def _adam(row, grad, moments, step, beta1, beta2, eps):
    keep1, keep2 = np.float32(beta1), np.float32(beta2)
    take1, take2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    dim = len(row)
    for d in range(dim):
        first = keep1 * moments[0, d] + take1 * grad[d]
        second = keep2 * moments[1, d] + take2 * grad[d] * grad[d]
        moments[0, d] = first
        moments[1, d] = second
        row[d] -= step * first / (np.float32(math.sqrt(second)) + eps)


@kernel
def adam(rows, positions, grads, scratch, scale, lr, weight_decay, clip, beta1, beta2, eps, updates):
    """`updates` counts the table's updates, this one included. beta1 and beta2 are float64: 1 - beta must not be rounded
    before it is taken."""
    grad, row = scratch
    dim = len(row)
    step = np.float32(lr * math.sqrt(1.0 - beta2**updates) / (1.0 - beta1**updates))
    for i in range(len(positions)):
        ask_ahead(rows, positions, i, dim * 12)
        here = address(rows, positions[i])
        moments = carray(float_pointer(state_address(rows, here, dim)), (2, dim))
        sum_gradient(grads, i, scale, grad)
        if rows.half:
            load_half(here, row)
            clip_and_decay(row, weight_decay, clip, grad)
            _adam(row, grad, moments, step, beta1, beta2, eps)
            save_half(here, row)
        else:
            values = carray(float_pointer(here), dim)
            clip_and_decay(values, weight_decay, clip, grad)
            _adam(values, grad, moments, step, beta1, beta2, eps)


def scratch_for(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The scratch that the kernels above use: a gradient and a row."""
    return np.empty(dim, np.float32), np.empty(dim, np.float32)

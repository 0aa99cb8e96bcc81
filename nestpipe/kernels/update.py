"""Row optimizers as kernels: one pass over the touched rows, each with its state beside it.

For every i: grad = the sum of row i's gradients, in order, times scale, clipped to norm `clip` (0: not), plus
weight_decay * row; then the optimizer's rule. Arithmetic is float32 in a fixed order. Summing here, and not into a buffer
first, saves three trips through memory. `grad` and `row` are scratch of dim floats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray

from nestpipe.kernels.jit import float_pointer, half_pointer, kernel
from nestpipe.kernels.rows import address, ask_for, narrow, widen

NEAR = 4  # records between asking for a record and updating it


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


@kernel
def _sum_of_squares(values):
    """In eight running sums: as fast as a vector unit allows, and the same order on every machine."""
    n = len(values)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    full = n - n % 8
    for d in range(0, full, 8):
        s0 += values[d] * values[d]
        s1 += values[d + 1] * values[d + 1]
        s2 += values[d + 2] * values[d + 2]
        s3 += values[d + 3] * values[d + 3]
        s4 += values[d + 4] * values[d + 4]
        s5 += values[d + 5] * values[d + 5]
        s6 += values[d + 6] * values[d + 6]
        s7 += values[d + 7] * values[d + 7]
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    for d in range(full, n):
        total += values[d] * values[d]
    return total


@kernel
def _prepare(rows, positions, i, grads, grad, row, stride_used, scale, weight_decay, clip):
    """Loads row i (into `row` if it is bfloat16), makes its gradient ready in `grad`; returns the row's values."""
    dim = len(grad)
    if i + NEAR < len(positions):
        ask_for(address(rows, positions[i + NEAR]), stride_used)
    here = address(rows, positions[i])
    values = row
    if rows.half:
        bits = carray(half_pointer(here), dim)
        for d in range(dim):
            values[d] = widen(bits[d])
    else:
        values = carray(float_pointer(here), dim)
    grad[:] = 0
    for e in range(grads.start[i], grads.start[i + 1]):
        part = grads.values[grads.origins[e]]
        weight = grads.weights[e] if len(grads.weights) else np.float32(1)
        for d in range(dim):
            grad[d] += weight * part[d]
    for d in range(dim):
        grad[d] *= scale
    if clip > 0:
        norm = math.sqrt(_sum_of_squares(grad))
        if norm > clip:
            shrink = np.float32(clip / norm)
            for d in range(dim):
                grad[d] *= shrink
    if weight_decay > 0:
        for d in range(dim):
            grad[d] += weight_decay * values[d]
    return values


@kernel
def _store(rows, position, values):
    if rows.half:
        bits = carray(half_pointer(address(rows, position)), len(values))
        for d in range(len(values)):
            bits[d] = narrow(values[d])


@kernel
def _state(rows, position, dim, state_floats):
    value_floats = (dim + 1) // 2 if rows.half else dim
    return carray(float_pointer(address(rows, position) + value_floats * 4), state_floats)


@kernel
def sgd(rows, positions, grads, grad, row, scale, lr, weight_decay, clip):
    dim = len(grad)
    for i in range(len(positions)):
        values = _prepare(rows, positions, i, grads, grad, row, dim * 4, scale, weight_decay, clip)
        for d in range(dim):
            values[d] -= lr * grad[d]
        _store(rows, positions[i], values)


@kernel
def adagrad(rows, positions, grads, grad, row, scale, lr, weight_decay, clip, eps):
    dim = len(grad)
    for i in range(len(positions)):
        values = _prepare(rows, positions, i, grads, grad, row, dim * 8, scale, weight_decay, clip)
        total = _state(rows, positions[i], dim, dim)
        for d in range(dim):
            total[d] += grad[d] * grad[d]
            values[d] -= lr * grad[d] / (np.float32(math.sqrt(total[d])) + eps)
        _store(rows, positions[i], values)


@kernel
def rowwise_adagrad(rows, positions, grads, grad, row, scale, lr, weight_decay, clip, eps):
    dim = len(grad)
    for i in range(len(positions)):
        values = _prepare(rows, positions, i, grads, grad, row, dim * 4 + 4, scale, weight_decay, clip)
        total = _state(rows, positions[i], dim, 1)
        total[0] += _sum_of_squares(grad) / np.float32(dim)
        step = lr / (np.float32(math.sqrt(total[0])) + eps)
        for d in range(dim):
            values[d] -= step * grad[d]
        _store(rows, positions[i], values)


@kernel
def adam(rows, positions, grads, grad, row, scale, lr, weight_decay, clip, beta1, beta2, eps, updates):
    """`updates` counts the table's updates, this one included. beta1 and beta2 are float64: 1 - beta must not be rounded
    before it is taken."""
    dim = len(grad)
    step = np.float32(lr * math.sqrt(1.0 - beta2**updates) / (1.0 - beta1**updates))
    keep1, keep2 = np.float32(beta1), np.float32(beta2)
    take1, take2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    for i in range(len(positions)):
        values = _prepare(rows, positions, i, grads, grad, row, dim * 12, scale, weight_decay, clip)
        moments = _state(rows, positions[i], dim, 2 * dim)
        for d in range(dim):
            first = keep1 * moments[d] + take1 * grad[d]
            second = keep2 * moments[dim + d] + take2 * grad[d] * grad[d]
            moments[d] = first
            moments[dim + d] = second
            values[d] -= step * first / (np.float32(math.sqrt(second)) + eps)
        _store(rows, positions[i], values)

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
from nestpipe.kernels.rows import address, ask_for, narrow, widen

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
def _sum_of_squares(values, lanes):
    """In eight running sums: as fast as a vector unit allows, and the same order on every machine. lanes: scratch of 8."""
    n = len(values)
    full = n - n % 8
    lanes[:] = 0
    for d in range(0, full, 8):
        for j in range(8):
            lanes[j] += values[d + j] * values[d + j]
    total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
    for d in range(full, n):
        total += values[d] * values[d]
    return total


# Rows are copied into scratch and back, and no function returns an array: Numba counts references to arrays that it
# passes out, and those atomic operations cost more than the arithmetic of a row.


@inlined
def _load(rows, positions, i, num_bytes, row):
    """row = values of record positions[i]; asks for a later record on the way."""
    if i + NEAR < len(positions):
        ask_for(address(rows, positions[i + NEAR]), num_bytes)
    here = address(rows, positions[i])
    if rows.half:
        bits = carray(half_pointer(here), len(row))
        for d in range(len(row)):
            row[d] = widen(bits[d])
    else:
        values = carray(float_pointer(here), len(row))
        for d in range(len(row)):
            row[d] = values[d]


@inlined
def _save(rows, position, row):
    here = address(rows, position)
    if rows.half:
        bits = carray(half_pointer(here), len(row))
        for d in range(len(row)):
            bits[d] = narrow(row[d])
    else:
        values = carray(float_pointer(here), len(row))
        for d in range(len(row)):
            values[d] = row[d]


@kernel
def _state_address(rows, position, dim):
    return address(rows, position) + ((dim + 1) // 2 if rows.half else dim) * 4


@inlined
def _gradient(grads, i, row, lanes, scale, weight_decay, clip, grad):
    """grad = the gradient of row i, ready for the optimizer's rule."""
    dim = len(grad)
    grad[:] = 0
    for e in range(grads.start[i], grads.start[i + 1]):
        part = grads.values[grads.origins[e]]
        weight = grads.weights[e] if len(grads.weights) else np.float32(1)
        for d in range(dim):
            grad[d] += weight * part[d]
    for d in range(dim):
        grad[d] *= scale
    if clip > 0:
        norm = math.sqrt(_sum_of_squares(grad, lanes))
        if norm > clip:
            shrink = np.float32(clip / norm)
            for d in range(dim):
                grad[d] *= shrink
    if weight_decay > 0:
        for d in range(dim):
            grad[d] += weight_decay * row[d]


@kernel
def sgd(rows, positions, grads, scratch, scale, lr, weight_decay, clip):
    grad, row, lanes = scratch
    for i in range(len(positions)):
        _load(rows, positions, i, len(row) * 4, row)
        _gradient(grads, i, row, lanes, scale, weight_decay, clip, grad)
        for d in range(len(row)):
            row[d] -= lr * grad[d]
        _save(rows, positions[i], row)


@kernel
def adagrad(rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps):
    grad, row, lanes = scratch
    dim = len(row)
    for i in range(len(positions)):
        _load(rows, positions, i, dim * 8, row)
        _gradient(grads, i, row, lanes, scale, weight_decay, clip, grad)
        total = carray(float_pointer(_state_address(rows, positions[i], dim)), dim)
        for d in range(dim):
            total[d] += grad[d] * grad[d]
            row[d] -= lr * grad[d] / (np.float32(math.sqrt(total[d])) + eps)
        _save(rows, positions[i], row)


@kernel
def rowwise_adagrad(rows, positions, grads, scratch, scale, lr, weight_decay, clip, eps):
    grad, row, lanes = scratch
    dim = len(row)
    for i in range(len(positions)):
        _load(rows, positions, i, dim * 4 + 4, row)
        _gradient(grads, i, row, lanes, scale, weight_decay, clip, grad)
        total = carray(float_pointer(_state_address(rows, positions[i], dim)), 1)
        total[0] += _sum_of_squares(grad, lanes) / np.float32(dim)
        step = lr / (np.float32(math.sqrt(total[0])) + eps)
        for d in range(dim):
            row[d] -= step * grad[d]
        _save(rows, positions[i], row)


@kernel
def adam(rows, positions, grads, scratch, scale, lr, weight_decay, clip, beta1, beta2, eps, updates):
    """`updates` counts the table's updates, this one included. beta1 and beta2 are float64: 1 - beta must not be rounded
    before it is taken."""
    grad, row, lanes = scratch
    dim = len(row)
    step = np.float32(lr * math.sqrt(1.0 - beta2**updates) / (1.0 - beta1**updates))
    keep1, keep2 = np.float32(beta1), np.float32(beta2)
    take1, take2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    for i in range(len(positions)):
        _load(rows, positions, i, dim * 12, row)
        _gradient(grads, i, row, lanes, scale, weight_decay, clip, grad)
        moments = carray(float_pointer(_state_address(rows, positions[i], dim)), 2 * dim)
        for d in range(dim):
            first = keep1 * moments[d] + take1 * grad[d]
            second = keep2 * moments[dim + d] + take2 * grad[d] * grad[d]
            moments[d] = first
            moments[dim + d] = second
            row[d] -= step * first / (np.float32(math.sqrt(second)) + eps)
        _save(rows, positions[i], row)


def scratch_for(dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scratch that the kernels above use."""
    return np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(8, np.float32)

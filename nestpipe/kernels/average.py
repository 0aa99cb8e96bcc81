"""Averaging the replicas of rows: M records of each become one.

records_MNW are words as `TableStore.words` gives them, by replica and row: values (two bfloat16 to a word if half), then
state. Sums are float64 in the order of the replicas and rounded once, so that M equal records come out as they were.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import inlined, kernel
from nestpipe.kernels.rows import narrow, widen
from nestpipe.kernels.update import AGREED, CROSS, OWN, ROW_SCALED_FLOATS, SHARED, SKETCH, SQUARES


@inlined
def _mean_values(records, halves, i, half, mean, out, out_halves):
    """mean [dim] and, rounded, the values of out[i]."""
    num_replicas, dim = len(records), len(mean)
    mean[:] = 0
    for m in range(num_replicas):
        for d in range(dim):
            mean[d] += widen(halves[m, i, d]) if half else records[m, i, d]
    for d in range(dim):
        mean[d] /= num_replicas
        if half:
            out_halves[i, d] = narrow(np.float32(mean[d]))
        else:
            out[i, d] = mean[d]
    if half and dim & 1:
        out_halves[i, dim] = 0


@kernel
def average(records, dim, half, out):
    """out [N, W] = the mean over replicas of values and of state."""
    num_replicas, num_rows, num_words = records.shape
    halves, out_halves, mean = records.view(np.uint16), out.view(np.uint16), np.empty(dim)
    for i in range(num_rows):
        _mean_values(records, halves, i, half, mean, out, out_halves)
        for w in range((dim + 1) // 2 if half else dim, num_words):
            total = 0.0
            for m in range(num_replicas):
                total += records[m, i, w]
            out[i, w] = total / num_replicas


@kernel
def average_row_scaled(records, dim, half, out):
    """The same of values that `row_scaled_adagrad` has updated; out's state says what the replicas have learnt together.

    The product of two replicas' sketches estimates the sum over steps of their g * g': signs of different steps, and of
    different values, are independent, so that what they are multiplied with has the mean 0.
    """
    num_replicas, num_rows, num_words = records.shape
    first, scale = num_words - ROW_SCALED_FLOATS, 1 / (num_replicas * num_replicas)
    halves, out_halves, mean = records.view(np.uint16), out.view(np.uint16), np.empty(dim)
    for i in range(num_rows):
        _mean_values(records, halves, i, half, mean, out, out_halves)
        squares = agreed = cross = 0.0
        for m in range(num_replicas):
            squares += records[m, i, first + OWN]
            agreed += records[m, i, first + SHARED]
        for w in range(first + SKETCH, num_words):
            total = 0.0
            for m in range(num_replicas):
                value = np.float64(records[m, i, w])
                cross += 2 * total * value  # with those before it
                total += value
            out[i, w] = 0
        out[i, first + SQUARES] = records[0, i, first + SQUARES] + squares * scale
        out[i, first + CROSS] = records[0, i, first + CROSS] + cross / dim * scale
        out[i, first + AGREED] = records[0, i, first + AGREED] + agreed * scale
        out[i, first + OWN] = 0
        out[i, first + SHARED] = 0

"""Averaging the replicas of rows: M records of each become one.

records_MNW are words as `TableStore.words` gives them, by replica and row: values (two bfloat16 to a word if half), then
state. Sums are float64 in the order of the replicas and rounded once, so that M equal records come out as they were.
"""

from __future__ import annotations

import math

import numpy as np

from nestpipe.kernels.jit import inlined, kernel
from nestpipe.kernels.rows import narrow, widen
from nestpipe.kernels.update import AGREED, CROSS, MOVED, OWN, PATH, ROW_SCALED_FLOATS, SHARED, SQUARES, agreement

TOO_LITTLE = 1e-6  # of what the replicas moved in all: from less than that nothing is concluded
LARGEST = 2.0  # what one window may say of the agreement, which is between 0 and 1


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


@inlined
def _variance(records, halves, i, half, mean, squares):
    """Sum over replicas of the squared distance from the mean, per value. squares: dim floats of scratch."""
    squares[:] = 0
    for m in range(len(records)):
        for d in range(len(mean)):
            difference = (widen(halves[m, i, d]) if half else records[m, i, d]) - mean[d]
            squares[d] += difference * difference
    total = 0.0
    for d in range(len(mean)):
        total += squares[d]
    return total / len(mean)


@inlined
def _pairs(total, squares, count):
    """Sum of x[m] * x[m'] over ordered pairs, from the sum of x and of x^2, where `count` x are not 0. Not below 0."""
    return max(total * total - squares, 0.0) if count > 1 else 0.0


@kernel
def average_row_scaled(records, dim, half, out):
    """The same of values that `row_scaled_adagrad` has updated; out's state says what the replicas have learnt together.

    Between two averagings replica m has moved by a[m], which nobody has kept. But the variance of rows over replicas is that
    of a, and the state has the sum of the squares of each replica's movements. If all movements were independent noise, the
    variance would be (1 - 1/M) times the sum of these; what it falls short of that, the replicas have moved together. PATH
    says what it would fall short by if all movements had one direction, also where some replicas have made more than others.
    The ratio of both is the agreement.
    """
    num_replicas, num_rows, num_words = records.shape
    first = num_words - ROW_SCALED_FLOATS
    halves, out_halves, mean, squares = records.view(np.uint16), out.view(np.uint16), np.empty(dim), np.empty(dim)
    for i in range(num_rows):
        _mean_values(records, halves, i, half, mean, out, out_halves)
        own = shared = shared_roots = moved = moved_roots = path = path_squares = 0.0
        num_sharing = num_moving = 0
        for m in range(num_replicas):
            state = records[m, i, first:]
            own += state[OWN]
            shared += state[SHARED]
            shared_roots += math.sqrt(np.float64(state[SHARED]))
            num_sharing += state[SHARED] > 0
            moved += state[MOVED]
            moved_roots += math.sqrt(np.float64(state[MOVED]))
            num_moving += state[MOVED] > 0
            path += state[PATH]
            path_squares += np.float64(state[PATH]) * np.float64(state[PATH])

        if_noise = (1 - 1 / num_replicas) * moved
        short = if_noise - _variance(records, halves, i, half, mean, squares)
        short_if_agreed = if_noise - (path_squares - path * path / num_replicas)
        if_one_step = _pairs(moved_roots, moved, num_moving) / num_replicas  # short_if_agreed, had all moved once

        before = records[0, i, first:]
        agree = np.float64(agreement(before))
        if if_one_step > TOO_LITTLE * moved:
            # In full where each replica moved once; to the extent that the movements tell, where some moved more than others.
            agree += (short - short_if_agreed * agree) / if_one_step
            agree = min(max(agree, -LARGEST), LARGEST)
        agreed = _pairs(shared_roots, shared, num_sharing) / max(num_sharing - 1, 1)

        after, scale = out[i, first:], 1 / (num_replicas * num_replicas)
        after[:] = 0
        after[SQUARES] = before[SQUARES] + own * scale
        after[CROSS] = before[CROSS] + agree * agreed * scale
        after[AGREED] = before[AGREED] + agreed * scale

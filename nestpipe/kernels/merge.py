"""Kernels of replicas: when the gradients of a row are complete, and their sum."""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel
from nestpipe.kernels.update import sum_gradient


@kernel
def last_part(row_of, parts, out):
    """out[v] = the last part that brings a gradient of row v; entry e brings one of row_of[e] with parts[e]."""
    out[:] = 0
    for e in range(len(row_of)):
        if parts[e] > out[row_of[e]]:
            out[row_of[e]] = parts[e]


@kernel
def sum_rows(grads, which, targets, out):
    """out[targets[v]] = the sum of row v's gradients, in their order, for every v in which."""
    one = np.float32(1)
    for i in range(len(which)):
        sum_gradient(grads, which[i], one, out[targets[which[i]]])

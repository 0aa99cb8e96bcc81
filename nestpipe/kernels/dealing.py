"""Kernels of dealing: which worker computes which sample, so that all have as much to do.

Shape legend: S samples of a global batch, by worker that has read them and then as it has them; W workers.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel


def costs_of(tokens_S: np.ndarray, squares: float) -> np.ndarray:
    """What each sample costs to compute, in tokens: itself, and `squares` for each pair of tokens that meet in attention."""
    tokens_S = tokens_S.astype(np.float64)
    return tokens_S + squares * tokens_S * tokens_S


def deal(cost_S: np.ndarray, home_S: np.ndarray, world: int) -> np.ndarray:
    """The worker of each sample: its home, unless that would have more than an even part with it and all dearer samples.

    Dearest first, so that what is left to even out the ends are the cheapest. A pure function of its arguments: every worker
    comes to the same.
    """
    worker_S = np.empty(len(cost_S), np.int64)
    _deal(cost_S, np.argsort(-cost_S, kind="stable"), home_S, cost_S.sum() / world, np.zeros(world), worker_S)
    return worker_S


@kernel
def _deal(cost_S, order_S, home_S, even, load_W, worker_S):
    for i in order_S:
        worker = home_S[i]
        if load_W[worker] + cost_S[i] > even:
            least = np.argmin(load_W)
            if load_W[least] < load_W[worker]:
                worker = least
        load_W[worker] += cost_S[i]
        worker_S[i] = worker

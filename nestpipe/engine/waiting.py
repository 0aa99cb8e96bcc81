"""Waiting: how much of a step workers wait for the one with most to compute; and, from the same figures, what samples cost."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from nestpipe.exchange.transport import Transport
from nestpipe.schedule.setting import MOST_SQUARES

KEPT = 10_000  # steps, the newest ones
WARM_UP, MEASURED = 3, 24  # steps whose times do not count yet, and after which what samples cost is fixed


class Load(NamedTuple):
    """What one worker had to do in one step.

    seconds: of the model, forward and backward. tokens, squares: of its samples, and of each sample's tokens.
    undealt, dealt: what its samples would have cost as they were read, and what they cost; 0 where they stay.
    """

    seconds: float
    tokens: float
    squares: float
    undealt: float
    dealt: float


Loads = collections.deque[Load]


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Of the steps of a call of `fit` (the newest 10,000), over all workers.

    measured: share of the model's time, forward and backward, that a worker waits for the slowest, were nothing else to do.
    undealt, dealt: the same as predicted from what samples cost: as they were read, and as they were dealt; None if they stay
        where they are read.
    tokens: those of the worker that has most over the mean; 1 is even, None if no feature is a sequence.
    """

    measured: float
    undealt: float | None = None
    dealt: float | None = None
    tokens: float | None = None

    def __str__(self) -> str:
        predicted = (
            ""
            if self.undealt is None or self.dealt is None
            else f"; predicted {self.undealt:.1%} before samples are dealt -> {self.dealt:.1%} after"
        )
        tokens = "" if self.tokens is None else f"; tokens, the most over the mean: {self.tokens:.2f}"
        return f"{self.measured:.1%} of the model's time{predicted}{tokens}"


def gather(loads: Loads, rows: Transport) -> Waiting | None:
    """All workers call it, with as many steps each; None if there are none."""
    mine = np.array(loads, np.float64).reshape(-1, len(Load._fields))
    if not len(mine):
        return None
    most = Load(*rows.largest(mine.copy()).sum(axis=0).tolist())
    mean = Load(*(rows.sum(mine).sum(axis=0) / rows.world).tolist())

    def share(name: str) -> float | None:
        high, even = getattr(most, name), getattr(mean, name)
        return 1 - even / high if high else None

    return Waiting(
        share("seconds") or 0.0,
        share("undealt"),
        share("dealt"),
        most.tokens / mean.tokens if mean.tokens else None,
    )


def fit_squares(loads: Loads, rows: Transport) -> float:
    """What the square of a token costs, in tokens: seconds ~ a + b tokens + c tokens^2, none of them negative, over the steps of
    all workers. The same on every worker, to three digits, so that it can be printed and given to another run."""
    mine = np.array(loads, np.float64)[WARM_UP:]
    scale = np.array([1.0, 1e-3, 1e-6, 1.0])
    columns = np.stack([np.ones(len(mine)), mine[:, 1], mine[:, 2], mine[:, 0]], 1) * scale
    products = rows.sum(columns.T @ columns)
    normal, target = products[:3, :3], products[:3, 3]
    best, least = np.zeros(3), np.inf
    for used in (list(c) for size in (1, 2, 3) for c in itertools.combinations(range(3), size)):
        weights = np.zeros(3)
        weights[used] = np.linalg.lstsq(normal[np.ix_(used, used)], target[used], rcond=None)[0]
        error = products[3, 3] - 2 * weights @ target + weights @ normal @ weights
        if weights.min() >= 0 and error < least:
            best, least = weights, error
    _, token, square = best * scale[:3]
    squares = MOST_SQUARES if square and not token else square / token if token else 0.0
    return float(f"{min(MOST_SQUARES, squares):.3g}")

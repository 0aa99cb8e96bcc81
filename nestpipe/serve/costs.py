"""What an instance's work takes, learned from its own measurements.

Seconds = a + b tokens + c tokens² + d candidates x tokens, each coefficient zero or more: a for the call, b for what is done
token by token, c for attention within the history, d for candidates that look at it. A batch of several is the sum of its
parts, with one a. Full passes and rankings behind a prefix are calls of the same function and share a law; prefixes have
their own, and so do copies (a + b bytes).

The fit is least squares of relative errors over recent calls (older ones fade). The law it began with counts as one call, as
much faster or slower as the measured ones are: so there is an answer before the first measurement, and one for lengths that
have not been measured. A call that is far off what others were like counts less. `high` adds what most calls stay under.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MEMORY = 0.99  # weight of the calls before, at each call
REFIT = 8  # calls between fits, once there are enough of them
FAR = 3.0  # times the usual error: beyond it a call counts less
ALERT = 0.05  # pace at which the usual error follows: if all calls are far off, it is the law that is wrong


class Work(NamedTuple):
    """How much there is to do: what coefficients are multiplied with.

    calls: 1, or 0 for a part of a call. tokens: that go through the layers. square: pairs of items in the history.
    cross: pairs of a candidate and what it looks at.
    """

    calls: float
    tokens: float
    square: float
    cross: float


def prefix_work(tokens: int, behind: int = 0) -> Work:
    """So many items, behind others whose keys are there. But for the calls, pieces add up to the whole."""
    return Work(1.0, tokens, tokens * (behind + 0.5 * tokens), 0.0)


def ranking_work(prefix: int, tail: int, candidates: int) -> Work:
    """Candidates behind a history of which `prefix` items are computed already. prefix = 0: a full pass."""
    return Work(1.0, tail + candidates, tail * (prefix + 0.5 * tail), float(candidates) * (prefix + tail))


def copy_work(num_bytes: int) -> Work:
    return Work(1.0, num_bytes, 0.0, 0.0)


def together(parts: Iterable[Work]) -> Work:
    """One call that does all parts."""
    tokens = square = cross = 0.0
    for part in parts:
        tokens += part.tokens
        square += part.square
        cross += part.cross
    return Work(1.0, tokens, square, cross)


class Law:
    """Seconds of a kind of call.

    first: coefficients to begin with, those of `Work` in order. A rough guess does: it counts as one measurement.
    quantile: share of calls that take no longer than `high` says.
    """

    def __init__(self, first: Sequence[float], *, quantile: float = 0.95, learns: bool = True) -> None:
        if len(first) != len(Work._fields) or not all(0 <= value < math.inf for value in first) or not any(first):
            raise ValueError(
                f"a law needs {len(Work._fields)} coefficients, zero or more and not all zero, not {list(first)}"
            )
        if not 0.5 <= quantile < 1:
            raise ValueError(f"quantile={quantile}: give a share of calls from 0.5 to 1")
        self.coefficients = tuple(map(float, first))
        self.quantile, self.learns = quantile, learns
        self.measured = 0
        self.margin = 1.25  # of `high`; moves towards the quantile of measured / expected
        self._spread = 0.0  # usual relative error
        self._first, self._scale = self.coefficients, 0.0  # log of measured / first
        self._gram, self._moment = _prior(self.coefficients)
        self._squares = np.zeros_like(self._gram)
        self._products = np.zeros_like(self._moment)

    def seconds(self, work: Work) -> float:
        """Expected."""
        a, b, c, d = self.coefficients
        return a * work[0] + b * work[1] + c * work[2] + d * work[3]

    def high(self, work: Work) -> float:
        """What `quantile` of such calls stay under."""
        return self.margin * self.seconds(work)

    def observe(self, work: Work, seconds: float) -> None:
        """A call that did this work took so long."""
        if not self.learns:
            return
        assert work.calls == 1 and seconds >= 0, f"{work} took {seconds} s"
        expected = self.seconds(work)
        ratio = seconds / expected
        self._learn_margin(ratio)
        error = abs(ratio - 1)
        pace = max(1 - MEMORY, 1 / (self.measured + 1))
        self._scale += pace * (math.log(max(seconds, 1e-9) / self._first_seconds(work)) - self._scale)
        # The first calls may be far off what the first law says, and are believed.
        usual = self._spread if self.measured >= REFIT else math.inf
        trust = min(1.0, FAR * usual / error) if error else 1.0
        self._spread += max(ALERT, pace) * (min(error, FAR * usual) - self._spread)
        weight = trust / max(seconds, expected) ** 2  # errors are relative, and calls that were too fast count no more
        row = np.array(work)
        self._squares = MEMORY * self._squares + weight * np.outer(row, row)
        self._products = MEMORY * self._products + weight * seconds * row
        self.measured += 1
        if self.measured <= REFIT or self.measured % REFIT == 0:
            scale = math.exp(self._scale)
            self.coefficients = _non_negative(
                self._squares + self._gram / scale**2, self._products + self._moment / scale
            )

    def _first_seconds(self, work: Work) -> float:
        return sum(value * amount for value, amount in zip(self._first, work, strict=True))

    def _learn_margin(self, ratio: float) -> None:
        """A step up if this call was above the margin, a smaller one down if below: they balance at the quantile."""
        if self.measured < REFIT:
            return
        step = 0.05 * self.quantile if ratio > self.margin else -0.05 * (1 - self.quantile)
        self.margin = min(max(self.margin * math.exp(step), 1.0), 10.0)


def _prior(coefficients: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """What one call would add that takes what the law says, spread over all sizes so that each coefficient has its say."""
    calls = [ranking_work(prefix, tail, 100) for prefix, tail in [(0, 16), (0, 256), (0, 4096), (1024, 16), (4096, 64)]]
    calls += [Work(1.0, tokens, 0.0, 0.0) for tokens in (1.0, 1e3, 1e6, 1e9)]
    gram, moment = np.zeros((4, 4)), np.zeros(4)
    for call in calls:
        row = np.array(call)
        seconds = float(row @ coefficients)
        gram += np.outer(row, row) / seconds**2
        moment += row / seconds
    return gram / len(calls), moment / len(calls)


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> tuple[float, ...]:
    """Least squares with no coefficient below zero: the best of all choices of which are zero. There are few of them."""
    unit = np.sqrt(np.diag(gram))
    unit[unit == 0] = 1.0
    gram, moment = gram / np.outer(unit, unit), moment / unit
    best, least = np.zeros(len(moment)), 0.0
    for count in range(len(moment), 0, -1):
        for kept in map(list, itertools.combinations(range(len(moment)), count)):
            square = gram[np.ix_(kept, kept)] + 1e-12 * np.eye(count)
            values = np.linalg.solve(square, moment[kept])
            error = -float(values @ moment[kept])
            if values.min() >= 0 and error < least:
                best, least = np.zeros(len(moment)), error
                best[kept] = values
        if count == len(moment) and least < 0:
            break  # nothing has to be zero
    return tuple((best / unit).tolist())


@dataclasses.dataclass
class Costs:
    """The laws of an instance. ranking: of full passes and of rankings behind a prefix; prefix; copy: host to device or back."""

    ranking: Law
    prefix: Law
    copy: Law

    @classmethod
    def guess(cls, *, learns: bool = True) -> Costs:
        """To begin with where nothing is known: a small model on a few cores. The first measurements replace it."""
        first = (1e-3, 2e-5, 1e-8, 1e-8)
        return cls(Law(first, learns=learns), Law(first, learns=learns), Law((1e-4, 1e-9, 0, 0), learns=learns))

    def full_pass(self, tokens: int, candidates: int) -> float:
        """What a full pass stays under, mostly."""
        return self.ranking.high(ranking_work(0, tokens, candidates))

"""Tuning: how many micro-batches are fastest here. Measured over the first steps of training, then fixed."""

from __future__ import annotations

import statistics
import time

from nestpipe.engine.context import StepResult
from nestpipe.exchange.transport import Transport
from nestpipe.schedule.setting import MOST_PARTS

STEPS = 10  # of each candidate; in the first few the pipeline fills, the last is told only when it has run empty
FILL = 4
ENOUGH = 3  # steps, or short runs, that a measure is taken from
NO_WORSE = 1.02  # what is as fast as the fastest: fewer micro-batches are simpler


class Tuning:
    """Tries 1, 2, 4, ... micro-batches while they help: `micro_batches` is what to use now, `done` whether for good.

    The steps are steps of training like any other; which split each had shows in the last bits of the result, so a run
    that must be repeated to the bit is repeated with the number that this one reports.
    """

    def __init__(self) -> None:
        self.micro_batches, self.done = 1, False
        self.seconds: dict[int, float] = {}  # per step, of the slowest worker
        self._largest = 1
        self._measured: list[float] = []
        self.begin()

    def begin(self) -> None:
        """A run of steps begins."""
        self._ends = [time.perf_counter()]

    def tick(self, result: StepResult, world: int) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())
        self._largest = max(self._largest, result.samples // world)

    def next(self, rows: Transport) -> None:
        """A run of steps has ended, on every worker: takes its measure and picks the next candidate, or the best."""
        ends = self._ends[FILL:-1]
        if len(ends) > 1:
            self._measured += [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
        elif len(self._ends) > 1:  # cut short by a pause: all such runs fill and empty the pipeline alike
            self._measured.append((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))
        if len(self._measured) < ENOUGH:
            return
        told = rows.gather_objects((statistics.median(self._measured), self._largest))
        self.seconds[self.micro_batches] = max(seconds for seconds, _ in told)
        self._measured = []
        tried, best = list(self.seconds.values()), min(self.seconds.values())
        no_help = len(tried) > 2 and min(tried[-2:]) > best
        largest = min(MOST_PARTS, max(largest for _, largest in told))
        self.micro_batches *= 2
        if no_help or self.micro_batches > largest:
            self.done = True
            self.micro_batches = min(n for n, seconds in self.seconds.items() if seconds <= best * NO_WORSE)

    def __str__(self) -> str:
        measured = ", ".join(f"{n}: {seconds * 1e3:.1f} ms" for n, seconds in self.seconds.items())
        return f"micro-batches: {self.micro_batches} [auto; a step took {measured}]"

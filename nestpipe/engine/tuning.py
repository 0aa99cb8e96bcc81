"""Tuning: how many micro-batches are fastest here. Measured over the first steps of training, then fixed."""

from __future__ import annotations

import statistics
import time

from nestpipe.engine.step import StepResult
from nestpipe.exchange.transport import Transport

STEPS = 10  # of each candidate; in the first few the pipeline fills, the last is told only when it has run empty
FILL = 3
NO_WORSE = 1.02  # what is as fast as the fastest: fewer micro-batches are simpler


class Tuning:
    """Tries 1, 2, 4, ... micro-batches while they help: `micro_batches` is what to use now, `done` whether for good.

    The steps are steps of training like any other; which split each had shows in the last bits of the result, so a run
    that must be repeated to the bit is repeated with the number that this one reports.
    """

    def __init__(self) -> None:
        self.micro_batches, self.done = 1, False
        self.seconds: dict[int, float] = {}  # per step, of the slowest worker
        self._ends: list[float] = []
        self._largest = 1

    def tick(self, result: StepResult, world: int) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())
        self._largest = max(self._largest, result.samples // world)

    def next(self, rows: Transport) -> None:
        """A run of steps has ended, on every worker: takes its measure and picks the next candidate, or the best."""
        ends, self._ends = self._ends[FILL:-1], []
        if len(ends) < 3:
            return  # cut short by a pause: once more
        step = statistics.median(b - a for a, b in zip(ends[:-1], ends[1:], strict=True))
        told = rows.gather_objects((step, self._largest))
        self.seconds[self.micro_batches] = max(seconds for seconds, _ in told)
        best = min(self.seconds.values())
        tried = list(self.seconds.values())
        enough = len(tried) > 2 and min(tried[-2:]) > best
        self.micro_batches *= 2
        if enough or self.micro_batches > max(largest for _, largest in told):
            self.done = True
            self.micro_batches = min(n for n, seconds in self.seconds.items() if seconds <= best * NO_WORSE)

    def __str__(self) -> str:
        measured = ", ".join(f"{n}: {seconds * 1e3:.1f} ms" for n, seconds in self.seconds.items())
        return f"micro-batches: {self.micro_batches} [auto; a step took {measured}]"

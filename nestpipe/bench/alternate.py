"""Times several ways of doing a training step against each other, in the same processes, in alternating blocks.

A machine drifts (clock, caches, neighbours), so one long run after another compares the weather. Here every round
times one block of each contestant, the order rotates from round to round, and ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class Pipelined(Protocol):
    """Does several steps in a row and is at rest after them: what it has begun is done, and its threads wait."""

    def run(self, steps: int, /) -> object: ...


Contestant = Callable[[], object] | Pipelined  # a callable does one step


@dataclasses.dataclass(frozen=True)
class Timing:
    """One contestant. Milliseconds per step; a block counts with the time of the slowest worker.

    median_ms, iqr_ms: over the rounds; the IQR is the distance between the quartiles.
    cpu_ms: median CPU time per step of the busiest worker, all its threads together; it stays comparable on a machine
        that other programs use as well, where the wall clock does not.
    ratio: median over the rounds of (this contestant / the reference, in that round); below 1 is faster than it.
    rounds_ms: every round, in order.
    counted: median per step of what `count` counted, of all workers together.
    """

    name: str
    median_ms: float
    iqr_ms: float
    cpu_ms: float
    ratio: float
    rounds_ms: list[float]
    counted: float = 0.0


def alternate(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int = 7,
    steps: int = 5,
    warmup: int = 5,
    lead_in: int = 1,
    reference: str | None = None,
    count: Callable[[], float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Timing]:
    """Times each contestant on every worker; all workers get the same result.

    Without torch.distributed it times this process alone. Every worker must call it with the same arguments.

    rounds, steps: blocks per contestant, and timed steps per block.
    warmup: untimed steps of each contestant before the first round.
    lead_in: untimed steps at the start of each block: they refill caches and pipelines, and take the blame for work
        that the contestant before left in flight.
    reference: the contestant that ratios divide by; the first if left out.
    count: this worker's counter of something, such as bytes sent; what it grows by in each block is shared out to its steps.
    """
    names = list(contestants)
    if not names:
        raise ValueError("alternate: no contestants; give at least one name with a callable that does one step")
    if reference is not None and reference not in contestants:
        raise ValueError(f"alternate: the reference {reference!r} is not among the contestants {names}")
    if rounds < 1 or steps < 1 or warmup < 0 or lead_in < 0:
        raise ValueError(
            f"alternate: rounds and steps must be at least 1, warmup and lead_in at least 0, "
            f"got rounds={rounds} steps={steps} warmup={warmup} lead_in={lead_in}"
        )
    reference = reference or names[0]
    count = count or _nothing
    for name in names:
        _run(contestants[name], warmup)

    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    counted: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # else a full collection walks every module of every contestant, in the middle of somebody's block
    try:
        for turn in range(rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                _run(contestants[name], lead_in)
                _barrier(group)
                counted_begin, begin, cpu_begin = count(), time.perf_counter(), time.process_time()
                _run(contestants[name], steps)
                wall[name].append((time.perf_counter() - begin) / steps)
                cpu[name].append((time.process_time() - cpu_begin) / steps)
                counted[name].append((count() - counted_begin) / steps)
    finally:
        gc.unfreeze()

    wall_ms = {name: _slowest_ms(wall[name], group) for name in names}
    cpu_ms = {name: _slowest_ms(cpu[name], group) for name in names}
    total = {name: statistics.median(_sum(counted[name], group)) for name in names}
    return {name: _timing(name, wall_ms[name], cpu_ms[name], wall_ms[reference], total[name]) for name in names}


def _run(contestant: Contestant, steps: int) -> None:
    if isinstance(contestant, Pipelined):
        if steps:
            contestant.run(steps)
    else:
        for _ in range(steps):
            contestant()


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group=group)


def _slowest_ms(seconds: list[float], group: dist.ProcessGroup | None) -> list[float]:
    worst = 1e3 * torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return worst.tolist()


def _sum(values: list[float], group: dist.ProcessGroup | None) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total.tolist()


def _nothing() -> float:
    return 0.0


def spread(values: Sequence[float]) -> float:
    """The IQR: the distance between the quartiles; 0 of one value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _timing(
    name: str, rounds_ms: list[float], cpu_ms: list[float], reference_ms: list[float], counted: float
) -> Timing:
    ratio = statistics.median(mine / theirs for mine, theirs in zip(rounds_ms, reference_ms, strict=True))
    median, cpu = statistics.median(rounds_ms), statistics.median(cpu_ms)
    return Timing(name, median, spread(rounds_ms), cpu, ratio, rounds_ms, counted)

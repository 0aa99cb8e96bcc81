"""stale: what asynchronous prefetchers do, for comparison. NOT synchronous training: rows are read one update too early."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.dbp import stages_ahead
from nestpipe.schedule.ops import COMPUTE, Schedule, Task
from nestpipe.schedule.semi_async import one_behind


def stale(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    """Rows as early as under semi_async, but they and their gradients travel on the compute lane, in one piece: lookups are
    hidden and communication is not, as in the systems that it stands for."""
    ahead = stages_ahead("stale", look_ahead)

    def step(t: int) -> Iterator[Task]:
        yield from one_behind(t, ahead, micro_batches, parts=1, lane=COMPUTE)

    return Schedule("stale", "rows read one update too early: differs from synchronous training", step, stale_by=1)

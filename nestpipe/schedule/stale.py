"""stale: what asynchronous prefetchers do, for comparison. NOT synchronous training: rows are read one update too early."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.dbp import dbp
from nestpipe.schedule.ops import COMPUTE, EMB, RETRIEVE, SYNC, UPDATE, Op, Schedule, Task


def stale(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    """Like dbp, but the rows of batch t + 1 leave before update t: they are not synchronised with it. The update itself is
    applied to the row as it is then, so none is lost."""
    synchronous = dbp(micro_batches=micro_batches, look_ahead=look_ahead)

    def step(t: int) -> Iterator[Task]:
        for task in synchronous.step(t):
            if task.op in (Op(SYNC, t), Op(EMB, t)):
                continue  # done a step earlier
            if task.op == Op(UPDATE, t):
                yield Task(Op(SYNC, t + 1), COMPUTE, (Op(RETRIEVE, t + 1),))
                yield Task(Op(EMB, t + 1), COMPUTE)
                yield task
                yield Task(Op(SYNC, t + 1, 1), COMPUTE)
            else:
                yield task._replace(after=tuple(Op(SYNC, t, 1) if op == Op(SYNC, t) else op for op in task.after))

    return Schedule("stale", "rows read one update too early: differs from synchronous training", step, stale_by=1)

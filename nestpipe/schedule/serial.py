"""serial: one operation after the other. What every other schedule must equal."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.ops import AGREE, BWD, COMPUTE, DENSE, EMB, FWD, GRAD, H2D, PREFETCH, REDUCE, RETRIEVE  # isort: skip
from nestpipe.schedule.ops import ROUTE, SYNC, UPDATE, WRITEBACK, Op, Schedule, Task  # isort: skip


def serial(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    if look_ahead:
        raise ValueError(
            f"schedule 'serial' has no look-ahead, got look_ahead={look_ahead}; leave it out, or use 'dbp'"
        )

    def step(t: int) -> Iterator[Task]:
        for name in (PREFETCH, H2D, ROUTE, RETRIEVE, SYNC, EMB):
            yield Task(Op(name, t), COMPUTE)
        for m in range(micro_batches):
            yield Task(Op(FWD, t, m), COMPUTE)
            yield Task(Op(BWD, t, m), COMPUTE)
        for name in (REDUCE, AGREE, GRAD, UPDATE, DENSE, WRITEBACK):
            yield Task(Op(name, t), COMPUTE)

    return Schedule(
        "serial", "one operation after the other; only the source of data reads ahead, in its own thread", step
    )

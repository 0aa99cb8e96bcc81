"""semi_async: the rows of a batch leave one update early, so that none is waited for. NOT synchronous training."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.dbp import lookups, stages_ahead
from nestpipe.schedule.ops import (
    AGREE,
    BWD,
    COMPUTE,
    DENSE,
    EMB,
    FWD,
    GRAD,
    REDUCE,
    RETRIEVE,
    SYNC,
    UPDATE,
    WRITEBACK,
    Op,
    Schedule,
    Task,
)


def semi_async(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    """The rows of batch t + 1 travel while batch t computes, and the update of batch t is applied while batch t + 1 computes.
    Dense weights are updated before the next batch reads them, as ever."""
    ahead = stages_ahead("semi_async", look_ahead)

    def step(t: int) -> Iterator[Task]:
        yield from one_behind(t, ahead, micro_batches, parts=micro_batches, lane="comm")

    summary = "rows one update behind, so that neither they nor their gradients are waited for: differs from synchronous training"
    return Schedule("semi_async", summary, step, stale_by=1)


def one_behind(t: int, ahead: int, micro_batches: int, *, parts: int, lane: str) -> Iterator[Task]:
    """A step in which rows of batch t + 1 leave before update t; the update itself is applied to the rows as they then are, so
    none is lost. parts: of a batch's rows and gradients, one or as many as micro-batches. lane: on which they travel."""
    for task in lookups(t, ahead):
        if task.op.name == WRITEBACK:
            yield task._replace(after=(*task.after, Op(UPDATE, t - 1)))  # which DENSE(t - 1) has not waited for
        elif task.op.name == RETRIEVE:
            yield task._replace(after=tuple(Op(SYNC, t, 1) if op.name == SYNC else op for op in task.after))
        elif task.op.name != SYNC:
            yield task

    for m in range(micro_batches):
        yield Task(Op(FWD, t, m), COMPUTE, (Op(EMB, t, min(m, parts - 1)),))
        yield Task(Op(BWD, t, m), COMPUTE)
    # Rows that batch t is about to change go as they are. Behind UPDATE(t - 1) in this lane: they are one behind, never two.
    yield Task(Op(SYNC, t + 1), lane, (Op(RETRIEVE, t + 1),))
    for m in range(parts):
        yield Task(Op(EMB, t + 1, m), lane)
    for m in range(parts - 1):
        yield Task(Op(GRAD, t, m), lane, (Op(BWD, t, m),))
    # Nobody updates anything before all know that losses and gradients are finite.
    yield Task(Op(AGREE, t), lane, (Op(BWD, t, micro_batches - 1),))
    yield Task(Op(REDUCE, t), COMPUTE)
    # There is a whole batch of time for these: the sum of dense gradients, which is waited for, has the wire first.
    yield Task(Op(GRAD, t, parts - 1), lane, (Op(REDUCE, t),))
    yield Task(Op(UPDATE, t), lane)
    # Batch t + 1 has been sent the rows as they were; its own update goes on from what this one has made of them.
    yield Task(Op(SYNC, t + 1, 1), lane)
    yield Task(Op(DENSE, t), COMPUTE, (Op(AGREE, t),))

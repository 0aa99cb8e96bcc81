"""Replicas of tables, added to any schedule: what keeps them together has its place beside the operations that it completes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from nestpipe.schedule.ops import AVERAGE, GRAD, MERGE, UPDATE, Op, Schedule, Task

# Each comes right behind that operation, in its lane: one lane issues what travels inside a group and between groups.
BEHIND = {MERGE: GRAD, AVERAGE: UPDATE}


def replicated(schedule: Schedule, operations: Collection[str]) -> Schedule:
    """The schedule with these of MERGE and AVERAGE; who waits for the operation before one of them waits for it too.

    MERGE has the parts of GRAD: sums that are complete with a micro-batch travel to the other replicas while the next ones
    compute, and only those of the last are waited for.
    """
    following = {before: name for name, before in BEHIND.items() if name in operations}

    def step(t: int) -> Iterator[Task]:
        for task in schedule.step(t):
            more = (op._replace(name=following[op.name]) for op in task.after if op.name in following)
            yield task._replace(after=(*task.after, *more))
            if task.op.name in following:
                yield Task(Op(following[task.op.name], task.op.batch, task.op.part), task.lane)

    return dataclasses.replace(schedule, step=step) if following else schedule

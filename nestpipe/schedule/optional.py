"""Operations that some runs need and others do not, added to any schedule: each has its place right behind another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from nestpipe.schedule.ops import OPERATIONS, Op, Schedule, Task


def including(schedule: Schedule, operations: Collection[str]) -> Schedule:
    """The schedule with these optional operations; who waits for the one before one of them waits for it too.

    Each comes right behind the operation that the table names, in its lane, and has its parts. So sums of gradients that are
    complete with a micro-batch travel to the other replicas (MERGE) while the next ones compute, and only those of the last
    are waited for.
    """
    following = {OPERATIONS[name].behind: name for name in operations}

    def step(t: int) -> Iterator[Task]:
        for task in schedule.step(t):
            more = (op._replace(name=following[op.name]) for op in task.after if op.name in following)
            yield task._replace(after=(*task.after, *more))
            if task.op.name in following:
                yield Task(Op(following[task.op.name], task.op.batch, task.op.part), task.lane)

    return dataclasses.replace(schedule, step=step) if following else schedule

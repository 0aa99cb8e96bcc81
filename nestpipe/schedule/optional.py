"""Operations that some runs need and others do not, added to any schedule: each has its place right behind another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from nestpipe.schedule.ops import BWD, FWD, OPERATIONS, SHARE, SHARING, Op, Schedule, Task


def including(schedule: Schedule, operations: Collection[str]) -> Schedule:
    """The schedule with these optional operations; who waits for the one before one of them waits for it too.

    Each comes right behind the operation that the table names, in its lane, and has its parts. So sums of gradients that are
    complete with a micro-batch travel to the other replicas (MERGE) while the next ones compute, and only those of the last
    are waited for.
    """
    following = {OPERATIONS[name].behind: name for name in operations if name not in SHARING}

    def step(t: int) -> Iterator[Task]:
        for task in schedule.step(t):
            more = (op._replace(name=following[op.name]) for op in task.after if op.name in following)
            yield task._replace(after=(*task.after, *more))
            if task.op.name in following:
                yield Task(Op(following[task.op.name], task.op.batch, task.op.part), task.lane)

    included = dataclasses.replace(schedule, step=step) if following else schedule
    return _sharing(included) if SHARE in operations else included


def _sharing(schedule: Schedule) -> Schedule:
    """With a loss that is of the whole batch of all workers: every forward comes first, then the exchange, the losses and the way
    back, then every backward. The frozen window stays as it is: rows of later micro-batches travel behind the forwards of
    earlier ones, their gradients behind the backwards."""
    last = schedule.micro_batches - 1

    def step(t: int) -> Iterator[Task]:
        held: list[Task] = []
        has_all = False  # forwards of this step's batch
        for task in schedule.step(t):
            if task.op.name == BWD and not has_all:
                held.append(task)
                continue
            yield task
            if task.op.name == FWD and task.op.part == last:
                has_all = True
                yield from (Task(Op(name, task.op.batch), task.lane) for name in SHARING)
                yield from held

    return dataclasses.replace(schedule, step=step)

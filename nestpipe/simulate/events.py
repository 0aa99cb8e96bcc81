"""Runs a schedule against costs instead of workers: when each operation begins and ends on each worker.

A lane runs its tasks in the order of the schedule, each as soon as the one before it is done and everything it waits for; an
operation that several workers do together goes on when the last of them has come to it. Nothing else takes time. As every
order is fixed by the schedule, beginnings and ends follow from each other without a clock, for all workers at once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from nestpipe.schedule.ops import Op, Schedule, Task
from nestpipe.trace.record import Event, RankTrace

Seconds = np.ndarray | float  # one number for all workers, or one for each


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an operation takes on each worker.

    alone: before it meets the others.
    together: from when the last worker of its group has come to it. None: it meets nobody.
    group: a number for each worker; those with the same number meet. None: all workers.
    """

    alone: Seconds = 0.0
    together: Seconds | None = None
    group: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Simulated:
    """times[op]: beginnings and ends in seconds, one row of workers each. counts[w]: how many workers like w there are."""

    schedule: Schedule
    steps: int
    times: Mapping[Op, np.ndarray]
    counts: np.ndarray

    @property
    def world(self) -> int:
        return int(self.counts.sum())

    def trace(self, worker: int) -> RankTrace:
        """What the engine would have recorded on a worker."""
        lanes = self.schedule.lanes
        lane_of = {(task.op.name, task.op.part): lanes.index(task.lane) for task in self.schedule.tasks}
        events = []
        for (name, batch, part), (begins, ends) in self.times.items():
            shown = part if self.schedule.num_parts(name) > 1 else None
            lane = lane_of[name, part]
            events.append(Event(lane, name, batch, shown, round(begins[worker] * 1e9), round(ends[worker] * 1e9)))
        return RankTrace(
            rank=worker,
            world=self.world,
            schedule=f"{self.schedule.name} (simulated)",
            text=str(self.schedule),
            lanes=lanes,
            wall_ns=0,
            events=events,
        )


def simulate(
    schedule: Schedule, cost: Callable[[Op], Cost], *, steps: int, counts: np.ndarray | None = None
) -> Simulated:
    """Batches 0 to `steps` from an empty pipeline to an empty one.

    counts: how many workers each column of a cost stands for. Workers whose costs are always the same are always at the
        same point: one column does for all of them, and a meeting of many is a meeting of few.
    """
    counts = np.ones(1, np.int64) if counts is None else np.asarray(counts)
    queues: dict[str, collections.deque[Task]] = {lane: collections.deque() for lane in schedule.lanes}
    for task in schedule.unroll(0, steps):
        queues[task.lane].append(task)
    free = {lane: np.zeros(len(counts)) for lane in queues}
    times: dict[Op, np.ndarray] = {}
    while any(queues.values()):
        stuck = True
        for lane, queue in queues.items():
            while queue and all(op in times or not 0 <= op.batch < steps for op in queue[0].after):
                task = queue.popleft()
                begin = free[lane]
                for op in task.after:
                    if op in times:
                        begin = np.maximum(begin, times[op][1])
                end = _end(begin, cost(task.op))
                times[task.op] = np.stack([begin, end])
                free[lane], stuck = end, False
        if stuck:
            waiting = ", ".join(f"{lane}: {queue[0].op}" for lane, queue in queues.items() if queue)
            raise ValueError(f"schedule {schedule.name!r} waits for itself and never ends; it stands at {waiting}")
    return Simulated(schedule, steps, times, counts)


def _end(begin: np.ndarray, cost: Cost) -> np.ndarray:
    end = begin + cost.alone
    if cost.together is None:
        return end
    if cost.group is None:
        return end.max() + np.broadcast_to(cost.together, end.shape)
    last = np.full(int(cost.group.max()) + 1, -np.inf)
    np.maximum.at(last, cost.group, end)
    return last[cost.group] + cost.together

"""Lanes: run the tasks of a schedule on threads, each when what it waits for is done.

Every lane walks the same list of tasks and runs its own; the compute lane is the thread that called `run`. A waiting
lane sleeps on a condition of its own, so an idle pipeline uses no CPU and only those are woken up that wait.

How it stops. When an operation fails on all workers alike (they agreed on it), its lane does nothing more for that batch
and later ones; neither does a lane whose task waits for something that will not come. Everything else is still done. As
the schedule is the same everywhere, all workers leave out the same operations: no collective is left with a worker missing,
and batches before the failing one are trained on to the end, as they would have been serially. Any other failure (a lost
peer, a bug) ends all lanes of this worker at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable

from nestpipe.engine.streams import Streams
from nestpipe.errors import TrainingError
from nestpipe.schedule.ops import COMPUTE, Op, Schedule, Task

LOOK_UP = 0.5  # seconds: a signal that comes just before the main thread begins to wait does not wake it up
LEAVE = 5.0  # seconds for a lane that is stuck in a collective after a failure that was not agreed on


class Lanes:
    """execute(task): does the work. `stop_before(batch)`, called from within: there are no batches from this one on.

    on_failure: called when something has gone wrong, to wake up a lane that waits for what comes from outside.
    """

    def __init__(
        self, schedule: Schedule, execute: Callable[[Task], None], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self._schedule, self._execute, self._on_failure = schedule, execute, on_failure
        self._lane_of = {(task.op.name, task.op.part): task.lane for task in schedule.tasks}
        self._tasks_of = {lane: [task for task in schedule.tasks if task.lane == lane] for lane in schedule.lanes}
        # Which other lanes wait for an operation: nobody else need be woken up for it.
        self._waiting_for: dict[tuple[str, int], set[str]] = {}
        for task in schedule.tasks:
            for op in task.after:
                if self._lane_of.get((op.name, op.part)) != task.lane:
                    self._waiting_for.setdefault((op.name, op.part), set()).add(task.lane)
        self._behind, self._look_ahead = schedule.behind, schedule.look_ahead
        self._lock = threading.Lock()
        self._changed = {lane: threading.Condition(self._lock) for lane in schedule.lanes}

    def run(self, first: int, last: int) -> None:
        """Runs batches `first` to `last` (exclusive) to their end; raises what went wrong, the earliest batch's first."""
        self._first, self._last = first, last
        self._done: dict[tuple[str, int], int] = {}  # (name, part) -> last batch
        self._cut: dict[str, int] = {}  # lane -> the batch from which on it does nothing
        self._failures: list[tuple[int, BaseException]] = []
        self.failed = first  # the batch in which something went wrong
        self.stuck: list[str] = []  # lanes that have not come back after a failure
        self._stop_all = False
        self._streams = Streams(self._schedule.lanes)
        threads = [
            threading.Thread(target=self._run_lane, args=(lane,), name=f"nestpipe-{lane}", daemon=True)
            for lane in self._schedule.lanes
            if lane != COMPUTE
        ]
        try:
            for thread in threads:
                thread.start()
            self._run_lane(COMPUTE)
            for thread in threads:
                while thread.is_alive() and not self._stop_all:
                    thread.join(LOOK_UP)
        except BaseException as failure:  # Ctrl-C, between two tasks
            self._fail(COMPUTE, first, failure)
        deadline = time.monotonic() + LEAVE
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = [thread.name.removeprefix("nestpipe-") for thread in threads if thread.is_alive()]
        if self._failures:
            # A lower batch fails first in a serial run; among equals, the one that came first.
            self.failed, earliest = min(self._failures, key=lambda entry: entry[0])
            raise earliest

    def stop_before(self, batch: int) -> None:
        with self._lock:
            self._last = min(self._last, batch)
            self._wake(self._changed)

    # -- one lane ------------------------------------------------------------------------------------------------------

    def _run_lane(self, lane: str) -> None:
        self._streams.enter(lane)
        for t in itertools.count(self._first - self._look_ahead):
            if self._stop_all or t - self._behind >= min(self._last, self._cut.get(lane, self._last)):
                return
            for of_step in self._tasks_of[lane]:
                task = of_step.at(t)
                if task.op.batch < self._first:
                    continue
                try:
                    if not self._wait(task):
                        continue
                    self._streams.wait(task)
                    self._execute(task)
                    self._streams.done(task)
                except BaseException as failure:
                    self._fail(lane, task.op.batch, failure)
                    continue
                with self._lock:
                    done = task.op.name, task.op.part
                    self._done[done] = task.op.batch
                    self._wake(self._waiting_for.get(done, ()))

    def _wait(self, task: Task) -> bool:
        """Returns True when the task may run, False if it is left out."""
        batch = task.op.batch
        with self._lock:
            while True:
                if self._stop_all or batch >= self._last or batch >= self._cut.get(task.lane, self._last):
                    return False
                missing = [op for op in task.after if not self._is_done(op)]
                if not missing:
                    return True
                if any(op.batch >= self._cut.get(self._lane_of[op.name, op.part], self._last) for op in missing):
                    self._leave(task.lane, batch)
                    return False
                self._changed[task.lane].wait(LOOK_UP if task.lane == COMPUTE else None)

    def _is_done(self, op: Op) -> bool:
        return op.batch < self._first or self._done.get((op.name, op.part), self._first - 1) >= op.batch

    def _leave(self, lane: str, batch: int) -> None:
        self._cut[lane] = min(batch, self._cut.get(lane, batch))
        self._wake(self._changed)

    def _wake(self, lanes: Iterable[str]) -> None:
        for lane in lanes:
            self._changed[lane].notify()

    def _fail(self, lane: str, batch: int, failure: BaseException) -> None:
        with self._lock:
            self._failures.append((batch, failure))
            self._stop_all |= not isinstance(failure, TrainingError)
            self._leave(lane, self._first if self._stop_all else batch)
        # Batches before the failing one have long been read: the source is not asked again.
        self._on_failure()

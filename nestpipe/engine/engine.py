"""Engine: runs a schedule on this worker. It knows operations, not schedules."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.engine.context import Context, StepResult
from nestpipe.engine.lanes import Lanes
from nestpipe.engine.ledger import Ledger
from nestpipe.engine.step import StepOperations
from nestpipe.exchange.window import Window
from nestpipe.schedule.check import require
from nestpipe.schedule.ops import (
    AGREE,
    BWD,
    COMPUTE,
    DEAL,
    EMB,
    FWD,
    OPERATIONS,
    PREFETCH,
    ROUTE,
    SHARING,
    WRITEBACK,
    Op,
    Task,
)
from nestpipe.schedule.setting import Setting
from nestpipe.trace.record import Event, RankTrace, wall_offset_ns

TRACED = 500_000  # operations that are kept, the newest ones

# Called in place of an operation, with the operation itself: tests delay it, benches make it last.
Around = Callable[[Task, Callable[[], None]], None]


class Engine:
    """`run` trains on consecutive batches; what belongs to each lives in its Context from PREFETCH to WRITEBACK.

    setting: the schedule, and how its micro-batches are cut and their rows travel.
    trace: whether to record every operation's start and end; see `recorded`.
    """

    def __init__(self, setting: Setting, ops: StepOperations, *, trace: bool = False) -> None:
        needed = [*ops.plan.keeping, *(SHARING if ops.sharing is not None else ())]
        schedule = setting.make(needed)
        require(schedule, [*([DEAL] if setting.deals else []), *needed])
        self.setting, self.schedule, self.ops = setting, schedule, ops
        self.around: Around | None = None
        self.stopped = False  # whether a worker has been asked to stop, as all know
        self.trained = 0  # batches of this worker in the last run that have been trained on to the end
        self._lanes = Lanes(schedule, self._execute, lambda: self._abandon())
        self._names = [feature.name for feature in ops.plan.features]
        # The method of each operation has its name; one that is cut into micro-batches gets the number of its own.
        self._methods: dict[str, Callable[..., None]] = {name: getattr(ops, name.lower()) for name in OPERATIONS}
        self._nothing = Window([0] * (schedule.micro_batches + 1), schedule.num_parts(EMB), setting.window_cache)
        ops.parts = self._nothing.parts
        self._contexts: dict[int, Context] = {}
        self._ledger = Ledger(0, schedule)
        self._running: dict[str, tuple[Op, float]] = {}  # by lane: an operation and when it began
        self._arenas: list[Arena] = []  # of finished batches, to be used again
        self._events: collections.deque[Event] | None = collections.deque(maxlen=TRACED) if trace else None
        self._num_events = 0
        self._num_parts = {task.op.name: schedule.num_parts(task.op.name) for task in schedule.tasks}
        self._lane_numbers = {lane: i for i, lane in enumerate(schedule.lanes)}
        last_here = [task.op for task in schedule.tasks if task.lane == COMPUTE]
        # After this operation of a batch the compute lane is done with it.
        self._closing = max(last_here, key=lambda op: (-op.batch, last_here.index(op))).name

    @property
    def in_flight(self) -> int:
        """Batches whose rows have been asked for and that are not finished: while there are any, tables are in between."""
        return sum(1 for ctx in list(self._contexts.values()) if ctx.source is not None)

    def run(
        self,
        read: Callable[[], Batch | None],
        *,
        first: int,
        last: int,
        on_step: Callable[[StepResult], None],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Trains on batches `first` to `last` (exclusive), or until no worker has any. on_step is called after each, in
        order, by the thread that called `run`; for batch last - 1 with nothing in flight any more. abandon: makes a `read`
        that waits return, when something has gone wrong elsewhere."""
        self._last, self._on_step, self._abandon = last, on_step, abandon
        self._held: StepResult | None = None
        self.stopped, self.trained = False, 0
        self._contexts.clear()
        self._ledger = Ledger(first, self.schedule)
        self.ops.begin(read, self.setting.clustering, first)
        try:
            self._lanes.run(first, last)
            self.ops.settle(last)
        finally:
            self._contexts.clear()
            self._running.clear()
        if self._held is not None:
            self._tell(self._held)

    def _tell(self, result: StepResult) -> None:
        self._running[COMPUTE] = Op("on_step", result.step), time.monotonic()
        self._on_step(result)
        self._running.pop(COMPUTE, None)

    def between(self, steps: int) -> str | None:
        """After a run that has failed: why the tables are not as `steps` steps left them, or None if they are."""
        if self._lanes.stuck:
            return f"lane {self._lanes.stuck[0]} has not come back"
        forgives = not any(store.counts for store in self.ops.stores)
        return self._ledger.between(steps, failed=self._lanes.failed, forgives=forgives)

    def longest_work(self) -> tuple[str, float] | None:
        """The operation that has been running for longest without waiting for another worker, and since when."""
        running = list(self._running.values())
        return min(
            ((str(op), since) for op, since in running if not op.meets), key=lambda entry: entry[1], default=None
        )

    def recorded(self, *, rank: int, world: int, clear: bool = False) -> RankTrace:
        """What ran when, since the start or since it was cleared."""
        assert self._events is not None, "the engine was made without trace=True"
        trace = RankTrace(
            rank=rank,
            world=world,
            schedule=self.schedule.name,
            text=str(self.schedule),
            lanes=self.schedule.lanes,
            wall_ns=wall_offset_ns(),
            events=list(self._events),
            dropped=self._num_events - len(self._events),
        )
        if clear:
            self._events.clear()
            self._num_events = 0
        return trace

    # -- one task ------------------------------------------------------------------------------------------------------

    def _execute(self, task: Task) -> None:
        start = time.perf_counter_ns()
        self._running[task.lane] = task.op, time.monotonic()
        if self.around is None:
            self._do(task)
        else:
            self.around(task, lambda: self._do(task))
        self._running.pop(task.lane, None)
        name, batch, part = task.op
        end = time.perf_counter_ns()
        if name in (FWD, BWD):
            self._contexts[batch].seconds += (end - start) / 1e9
        if self._events is not None:
            shown = part if self._num_parts[name] > 1 else None
            self._events.append(Event(self._lane_numbers[task.lane], name, batch, shown, start, end))
            self._num_events += 1

    def _do(self, task: Task) -> None:
        name, batch, part = task.op
        ctx = self._open(batch) if name == PREFETCH else self._contexts[batch]
        self._ledger.begin(task.op)
        if OPERATIONS[name].cut == "never":
            self._methods[name](ctx)
        else:
            self._methods[name](ctx, part)
        if name == ROUTE and ctx.ends:
            if ctx.stops:
                self.stopped = True
                self._abandon()  # another worker may wait for its data as long
            self._lanes.stop_before(batch)
        elif name == AGREE and ctx.asked_to_stop:
            # Nobody has taken a later batch than that from its data: FWD of the next one, which PREFETCH waits for, comes
            # after this.
            self.stopped = True
            self._lanes.stop_before(batch + self.schedule.look_ahead + 1)
        elif name == WRITEBACK:
            self._arenas.append(self._contexts.pop(batch).arena)
            self.trained += ctx.has_data
        if not ctx.cut_short:
            self._ledger.end(task.op)
        if name == self._closing:
            assert ctx.result is not None
            if batch == self._last - 1:
                self._held = ctx.result
            else:
                self._tell(ctx.result)

    def _open(self, number: int) -> Context:
        arena = self._arenas.pop() if self._arenas else Arena()
        ctx = Context(number, Batch.empty(self._names), self._nothing, arena, has_data=False)
        self._contexts[number] = ctx
        return ctx

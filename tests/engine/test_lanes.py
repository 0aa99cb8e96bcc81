"""Lanes: order, ends, failures; all with a pretended execution, in one process."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.engine.lanes import LOOK_UP, Lanes
from nestpipe.errors import TrainingError
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.check import _graph, _Order
from nestpipe.schedule.ops import AVERAGE, DEAL, MERGE, OPERATIONS, SHARING, Op, Schedule, Task
from nestpipe.schedule.optional import including
from tests.waiting import PATIENCE


class Pretended:
    """Sleeps instead of working; remembers when each operation ran."""

    def __init__(self, schedule: Schedule, *, seed: int = 0, fails: Callable[[Op], BaseException | None] | None = None):
        self.started: dict[Op, float] = {}
        self.ended: dict[Op, float] = {}
        self.threads: set[str] = set()
        self.schedule = schedule
        self._seed, self._fails = seed, fails
        self.lanes = Lanes(schedule, self._execute)

    def _execute(self, task: Task) -> None:
        self.threads.add(threading.current_thread().name)
        self.started[task.op] = time.perf_counter()
        draw = np.random.default_rng([self._seed, zlib.crc32(task.op.name.encode()), task.op.batch, task.op.part])
        time.sleep(float(draw.random()) ** 4 * 0.004)
        failure = self._fails(task.op) if self._fails else None
        if failure is not None:
            raise failure
        self.ended[task.op] = time.perf_counter()


NAMES = sorted(SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), num_batches=st.integers(1, 12))
def test_nothing_starts_before_what_it_waits_for_has_ended(name: str, seed: int, num_batches: int) -> None:
    schedule = SCHEDULES[name](micro_batches=2)
    run = Pretended(schedule, seed=seed)
    run.lanes.run(3, 3 + num_batches)
    tasks = list(schedule.unroll(3, 3 + num_batches))
    assert set(run.ended) == {task.op for task in tasks}
    for op, earlier in _graph(tasks).items():
        assert all(run.ended[one] <= run.started[op] for one in earlier)


@pytest.mark.parametrize("name", ["dbp", "fwp", "nested", "semi_async", "stale"])
@settings(max_examples=25, deadline=None)
@given(
    failing=st.sampled_from(list(OPERATIONS)),
    batch=st.integers(0, 7),
    seeds=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)),
)
def test_workers_with_other_timing_leave_out_the_same_operations(
    name: str, failing: str, batch: int, seeds: tuple[int, int]
) -> None:
    """Else a collective would wait for a worker that has left."""
    schedule = including(SCHEDULES[name](micro_batches=2), [DEAL, MERGE, AVERAGE, *SHARING])

    def fails(op: Op) -> BaseException | None:
        return TrainingError(str(op)) if op == Op(failing, batch) else None

    runs = [Pretended(schedule, seed=seed, fails=fails) for seed in seeds]
    for run in runs:
        with pytest.raises(TrainingError, match=failing):
            run.lanes.run(0, 10)
    assert set(runs[0].ended) == set(runs[1].ended)
    # What the failing batch does not stand in the way of is done: all of the batches before it.
    tasks = list(schedule.unroll(0, 10))
    graph = _graph(tasks)
    before = _Order(graph, {op: i for i, op in enumerate(graph)})
    assert {task.op for task in tasks if before(task.op, Op(failing, batch))} <= set(runs[0].ended)
    assert {task.op for task in tasks if task.op.batch < batch} <= set(runs[0].ended)


def test_of_two_failures_the_earlier_batch_is_told_as_a_serial_run_would() -> None:
    def fails(op: Op) -> BaseException | None:
        return TrainingError(f"{op} failed") if op in (Op("ROUTE", 4), Op("AGREE", 3)) else None

    for seed in range(5):
        with pytest.raises(TrainingError, match=r"AGREE\(3\) failed"):
            Pretended(SCHEDULES["dbp"](), seed=seed, fails=fails).lanes.run(0, 10)


@pytest.mark.parametrize("failing", ["PREFETCH", "RETRIEVE", "FWD"])
def test_a_failure_that_was_not_agreed_on_ends_all_lanes_at_once(failing: str) -> None:
    def fails(op: Op) -> BaseException | None:
        return ConnectionError("peer is gone") if op == Op(failing, 2) else None

    run = Pretended(SCHEDULES["nested"](micro_batches=2), fails=fails)
    with pytest.raises(ConnectionError, match="peer is gone"):
        run.lanes.run(0, 2**60)
    assert max(op.batch for op in run.started) <= 2 + run.schedule.look_ahead + run.schedule.behind
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nestpipe-")]


def test_a_lane_that_is_stuck_does_not_keep_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestpipe.engine.lanes.LEAVE", 0.2)
    release, left = threading.Event(), []

    def execute(task: Task) -> None:
        if task.op == Op("ROUTE", 3):
            release.wait(PATIENCE)  # as in a collective whose peer is gone
            left.append(task.op)
        if task.op == Op("FWD", 1):
            raise ConnectionError("peer is gone")

    try:
        with pytest.raises(ConnectionError):
            Lanes(SCHEDULES["dbp"](), execute).run(0, 100)
        assert not left
    finally:
        release.set()


def test_the_end_of_data_is_known_only_when_it_comes() -> None:
    done: list[Op] = []

    def execute(task: Task) -> None:
        if task.op == Op("ROUTE", 6):
            lanes.stop_before(6)
        else:
            done.append(task.op)

    lanes = Lanes(SCHEDULES["dbp"](), execute)
    lanes.run(0, 2**60)
    trained = {op for op in done if op.batch < 6}
    assert trained == {task.op for task in SCHEDULES["serial"]().unroll(0, 6)}
    assert {op.name for op in done if op.batch >= 6} <= {"PREFETCH", "H2D"}


def test_compute_runs_in_the_thread_that_called() -> None:
    run = Pretended(SCHEDULES["dbp"]())
    run.lanes.run(0, 3)
    assert run.threads == {"MainThread", *(f"nestpipe-{lane}" for lane in ("data", "copy", "keys", "store"))}


def test_lanes_that_wait_are_woken_up_only_for_what_they_wait_for() -> None:
    """Else they would take the time of those that work."""
    woken: list[str] = []
    during: list[float] = []

    def execute(task: Task) -> None:
        if task.op == Op("PREFETCH", 2):
            time.sleep(0.1)  # the others come to what they wait for
            before, begin = len(woken), time.monotonic()
            time.sleep(0.3)
            during.extend([len(woken) - before, time.monotonic() - begin])

    lanes = Lanes(SCHEDULES["dbp"](), execute)
    for lane, changed in lanes._changed.items():
        changed.wait = lambda timeout=None, lane=lane, wait=changed.wait: (wait(timeout), woken.append(lane))[0]
    lanes.run(0, 4)
    times, seconds = during
    assert times <= seconds / LOOK_UP + 2 * len(lanes._changed), "compute looks up now and then; what else?"

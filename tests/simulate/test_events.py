"""Events: the same times as a clock that ticks through every worker and lane, and the operations that the engine records."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe import Batch, Feature, Jagged, RowwiseAdagrad, Table, Trainer
from nestpipe.bench.emulated import EmulatedModel
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import Op, Schedule, Task
from nestpipe.simulate.events import Cost, simulate

NAMES = sorted(SCHEDULES)
ALL_MEET = ("AGREE", "REDUCE")
GROUP_MEETS = ("ROUTE", "EMB", "GRAD")

Times = dict[Op, np.ndarray]


class Clock:
    """Workers and lanes as state machines: a lane is idle, busy alone, or has come to a meeting; a heap says what is next."""

    def __init__(self, schedule: Schedule, cost: Callable[[Op], Cost], *, steps: int, workers: int) -> None:
        self.steps, self.workers = steps, workers
        self.cost = functools.cache(cost)
        tasks = list(schedule.unroll(0, steps))
        self.todo = {
            (w, lane): [task for task in tasks if task.lane == lane] for w in range(workers) for lane in schedule.lanes
        }
        self.idle = set(self.todo)
        self.ended: list[dict[Op, float]] = [{} for _ in range(workers)]
        self.begun: list[dict[Op, float]] = [{} for _ in range(workers)]
        self.come: dict[tuple[Op, int], list[tuple[int, str]]] = collections.defaultdict(list)
        self.heap: list[tuple[float, int, str, int, str, Op]] = []
        self.number = itertools.count()

    def run(self) -> Times:
        for worker in range(self.workers):
            self._look(0.0, worker)
        while self.heap:
            now, _, what, worker, lane, op = heapq.heappop(self.heap)
            if what == "alone" and self.cost(op).together is not None:
                self._meet(now, worker, lane, op)
                continue
            self.ended[worker][op] = now
            self.idle.add((worker, lane))
            self._look(now, worker)
        assert not any(self.todo.values())
        return {
            op: np.array([[self.begun[w][op] for w in range(self.workers)],
                          [self.ended[w][op] for w in range(self.workers)]])
            for op in self.ended[0]
        }  # fmt: skip

    def _look(self, now: float, worker: int) -> None:
        """Starts what an idle lane of the worker can start."""
        for place in [place for place in sorted(self.idle) if place[0] == worker]:
            if self.todo[place] and all(
                op in self.ended[worker] for op in self.todo[place][0].after if 0 <= op.batch < self.steps
            ):
                op = self.todo[place].pop(0).op
                self.idle.remove(place)
                self.begun[worker][op] = now
                self._push(now + float(np.broadcast_to(self.cost(op).alone, self.workers)[worker]), "alone", *place, op)

    def _meet(self, now: float, worker: int, lane: str, op: Op) -> None:
        cost = self.cost(op)
        groups = np.zeros(self.workers, int) if cost.group is None else cost.group
        here = self.come[op, groups[worker]]
        here.append((worker, lane))
        if len(here) == np.sum(groups == groups[worker]):
            for one, its_lane in here:
                self._push(
                    now + float(np.broadcast_to(cost.together, self.workers)[one]), "together", one, its_lane, op
                )

    def _push(self, when: float, what: str, worker: int, lane: str, op: Op) -> None:
        heapq.heappush(self.heap, (when, next(self.number), what, worker, lane, op))


def drawn(seed: int, workers: int, groups: np.ndarray | None) -> Callable[[Op], Cost]:
    """Random costs, some of them zero; some meetings take one time for all, some each worker its own."""

    def cost(op: Op) -> Cost:
        rng = np.random.default_rng([seed, zlib.crc32(op.name.encode()), op.batch, op.part])
        alone = rng.exponential(size=workers) * (rng.random(workers) < 0.8)
        if op.name not in ALL_MEET + GROUP_MEETS:
            return Cost(alone)
        together = rng.exponential(size=workers) if rng.random() < 0.5 else float(rng.exponential())
        return Cost(alone, together, groups if op.name in GROUP_MEETS else None)

    return cost


def same(ours: Times, theirs: Times) -> None:
    assert ours.keys() == theirs.keys()
    for op in ours:
        np.testing.assert_array_equal(ours[op], theirs[op], err_msg=str(op))


@pytest.mark.parametrize("grouped", [False, True], ids=["all meet", "groups"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), workers=st.sampled_from([1, 3, 4]), steps=st.integers(1, 7))
def test_every_operation_begins_and_ends_as_by_the_clock(
    name: str, micro_batches: int, grouped: bool, seed: int, workers: int, steps: int
) -> None:
    schedule = SCHEDULES[name](micro_batches=micro_batches)
    cost = drawn(seed, workers, np.arange(workers) % 2 if grouped else None)
    ours = simulate(schedule, cost, steps=steps, counts=np.ones(workers, np.int64))
    assert ours.world == workers
    same(dict(ours.times), Clock(schedule, cost, steps=steps, workers=workers).run())


def test_a_serial_step_is_the_sum_of_its_costs() -> None:
    schedule, cost = SCHEDULES["serial"](micro_batches=3), drawn(7, 1, None)
    run = simulate(schedule, cost, steps=4)
    for batch in range(4):
        ops = [task.op for task in schedule.unroll(0, 4) if task.op.batch == batch]
        costs = [cost(op) for op in ops]
        whole = sum(float(np.sum(one.alone)) + float(np.sum(one.together or 0.0)) for one in costs)
        took = run.times[ops[-1]][1, 0] - run.times[ops[0]][0, 0]
        assert len(ops) == 12 + 2 * 3 and took == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    "schedule", [SCHEDULES["serial"](), SCHEDULES["nested"](micro_batches=2)], ids=lambda s: s.name
)
def test_a_straggler_holds_up_its_group_and_the_others_only_when_all_meet(schedule: Schedule) -> None:
    groups = np.array([0, 0, 1, 1])

    def cost(op: Op, late: float = 0.0) -> Cost:
        slow = Op("SYNC", 2)
        alone = np.where((np.arange(4) == 1) & (op == slow), 0.1 + late, 0.1)
        if op.name in ALL_MEET:
            return Cost(alone, 0.01)
        return Cost(alone, 0.01, groups) if op.name in GROUP_MEETS else Cost(alone)

    counts = np.ones(4, np.int64)
    even = simulate(schedule, cost, steps=4, counts=counts).times
    late = simulate(schedule, functools.partial(cost, late=9.0), steps=4, counts=counts).times
    delay = {op: late[op][1] - even[op][1] for op in even}
    np.testing.assert_allclose(delay[Op("SYNC", 2)], [0, 9, 0, 0], atol=1e-9)
    np.testing.assert_allclose(delay[Op("EMB", 2)], [9, 9, 0, 0], atol=1e-9)
    np.testing.assert_allclose(delay[Op("FWD", 2)], [9, 9, 0, 0], atol=1e-9)
    np.testing.assert_allclose(delay[Op("AGREE", 2)], [9, 9, 9, 9], atol=1e-9)
    for op in even:
        if op.batch < 2 and op.name != "WRITEBACK":  # a write-back of nested runs beside the batch after it
            np.testing.assert_allclose(delay[op], 0, atol=1e-9, err_msg=str(op))


@pytest.mark.parametrize("grouped", [False, True], ids=["all meet", "groups"])
@pytest.mark.parametrize("name", ["serial", "nested"])
def test_folded_workers_have_the_very_times_of_all_of_them(name: str, grouped: bool) -> None:
    schedule = SCHEDULES[name](micro_batches=2)
    kind = np.array([0, 1, 0, 2, 1, 0, 0, 2, 0])
    rng = np.random.default_rng(3)
    names = list(dict.fromkeys(task.op.name for task in schedule.tasks))
    costs = {op: rng.random(3)[kind] for op in names}
    groups = np.array([0, 1, 0])[kind] if grouped else np.zeros(len(kind), np.int64)

    first, counts = np.array([0, 1, 3]), np.array([5, 2, 2])  # one of each kind, and how many there are

    def cost(op: Op, kept: np.ndarray) -> Cost:
        alone = costs[op.name][kept]
        return Cost(alone, 0.3, groups[kept]) if op.name in GROUP_MEETS + ALL_MEET else Cost(alone)

    whole = simulate(
        schedule, functools.partial(cost, kept=np.arange(9)), steps=5, counts=np.ones(9, np.int64)
    )  # fmt: skip
    folded = simulate(schedule, functools.partial(cost, kept=first), steps=5, counts=counts)
    assert folded.world == whole.world == 9
    same(dict(whole.times), {op: times[:, kind] for op, times in folded.times.items()})


def test_a_schedule_that_waits_for_itself_says_where_it_stands() -> None:
    whole = SCHEDULES["dbp"]()

    def step(t: int) -> Iterator[Task]:
        for task in whole.step(t):
            yield task._replace(after=(Op("GRAD", t),)) if task.op == Op("EMB", t) else task

    knot = dataclasses.replace(whole, name="knot", step=step)
    with pytest.raises(ValueError, match=r"'knot' waits for itself.*compute: EMB\(0\)") as error:
        simulate(knot, lambda op: Cost(1.0), steps=8)
    assert "PREFETCH(4)" in str(error.value), "the lane that reads ahead stands as well"


class TestTrace:
    @staticmethod
    def recorded(name: str, micro_batches: int, steps: int) -> list[tuple[str, int, int | None, str]]:
        """What the engine does in so many steps, on one worker."""
        rng = np.random.default_rng(0)
        keys = [Jagged.from_lists(rng.integers(0, 30, (8, 3)).tolist()) for _ in range(steps + 3)]
        trainer = Trainer(
            EmulatedModel(dim=4),
            [Table("item", 4, optimizer=RowwiseAdagrad(lr=0.01))],
            [Feature("history", "item")],
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            schedule=name,
            micro_batches=micro_batches,
            record=True,
        )
        trainer.fit((Batch({"history": one}) for one in keys), steps=steps)
        trace = trainer.recorded()
        assert trace.dropped == 0
        return sorted(((e.op, e.batch, e.part, trace.lanes[e.lane]) for e in trace.events), key=str)

    @pytest.mark.parametrize("micro_batches", [1, 3])
    @pytest.mark.parametrize("name", NAMES)
    def test_it_has_the_operations_that_the_engine_records(self, name: str, micro_batches: int) -> None:
        schedule = SCHEDULES[name](micro_batches=micro_batches)
        trace = simulate(schedule, lambda op: Cost(0.5), steps=6).trace(0)
        ours = sorted(((e.op, e.batch, e.part, trace.lanes[e.lane]) for e in trace.events), key=str)
        assert ours == self.recorded(name, micro_batches, 6)

    def test_it_is_in_nanoseconds_and_says_that_it_is_simulated(self) -> None:
        counts = np.array([5, 2])
        run = simulate(SCHEDULES["serial"](), lambda op: Cost(np.array([0.25, 0.5])), steps=1, counts=counts)
        trace = run.trace(1)
        assert (trace.rank, trace.world, trace.schedule) == (1, 7, "serial (simulated)")
        assert [(e.start_ns, e.end_ns) for e in trace.events[:2]] == [(0, 500_000_000), (500_000_000, 1_000_000_000)]
        assert trace.text == str(SCHEDULES["serial"]()) and trace.lanes == ["compute"]

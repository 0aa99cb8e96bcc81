"""The checker: accepts what is exact, measures what is stale, and names the edge that a broken schedule lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.check import ScheduleError, check, require
from nestpipe.schedule.ops import (
    AGREE,
    AVERAGE,
    BWD,
    COMPUTE,
    DEAL,
    DENSE,
    EMB,
    FWD,
    GRAD,
    H2D,
    MERGE,
    OPERATIONS,
    PREFETCH,
    REDUCE,
    RETRIEVE,
    ROUTE,
    SYNC,
    UPDATE,
    WRITEBACK,
    Op,
    Schedule,
    Task,
)
from nestpipe.schedule.optional import including

DBP = SCHEDULES["dbp"]()


def changed(change: Callable[[int, list[Task]], list[Task]], of: Schedule = DBP) -> Schedule:
    """A schedule whose steps have gone through change(t, tasks)."""

    def step(t: int) -> Iterator[Task]:
        yield from change(t, list(of.step(t)))

    return dataclasses.replace(of, name="changed", step=step)


def without_edge(name: str, waits_for: str, of: Schedule = DBP) -> Schedule:
    def change(t: int, tasks: list[Task]) -> list[Task]:
        return [
            task._replace(after=tuple(op for op in task.after if task.op.name != name or op.name != waits_for))
            for task in tasks
        ]

    return changed(change, of)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_serial_is_fresh(micro_batches: int) -> None:
    verdict = require(SCHEDULES["serial"](micro_batches=micro_batches))
    assert verdict.problems == [] and verdict.stale_by == 0 and verdict.in_flight == 1


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("look_ahead", [None, 1, 2, 3, 4, 9])
def test_dbp_is_fresh_and_bounded_for_every_look_ahead(look_ahead: int | None, micro_batches: int) -> None:
    verdict = require(SCHEDULES["dbp"](look_ahead=look_ahead, micro_batches=micro_batches))
    assert verdict.problems == [] and verdict.stale_by == 0
    # Those ahead, the one that computes, and two at most that are not yet back in their tier.
    assert verdict.in_flight <= (look_ahead or 4) + 3


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize(("name", "in_flight"), [("fwp", 1), ("nested", 7)])
def test_the_frozen_window_is_fresh_for_every_number_of_micro_batches(
    name: str, in_flight: int, micro_batches: int
) -> None:
    schedule = SCHEDULES[name](micro_batches=micro_batches)
    verdict = require(schedule)
    assert verdict.problems == [] and verdict.stale_by == 0 and verdict.in_flight <= in_flight
    assert [schedule.num_parts(op) for op in (EMB, FWD, BWD, GRAD, UPDATE)] == [micro_batches] * 4 + [1]


@pytest.mark.parametrize("micro_batches", [1, 3, 12])
@pytest.mark.parametrize("look_ahead", [None, 1, 2, 9])
@pytest.mark.parametrize("name", ["semi_async", "stale"])
def test_schedules_with_rows_one_update_behind_say_so(name: str, look_ahead: int | None, micro_batches: int) -> None:
    schedule = SCHEDULES[name](look_ahead=look_ahead, micro_batches=micro_batches)
    verdict = require(schedule)
    assert verdict.problems == [] and verdict.stale_by == schedule.stale_by == 1
    assert verdict.in_flight <= (look_ahead or 4) + 3
    assert "differs from synchronous training" in schedule.summary


@pytest.mark.parametrize("name", ["semi_async", "stale"])
def test_a_stale_schedule_that_claims_to_be_fresh_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="stale by 1, not 0"):
        require(dataclasses.replace(SCHEDULES[name](micro_batches=2), stale_by=0))


SEMI_ASYNC = SCHEDULES["semi_async"](micro_batches=3)


def test_an_update_that_comes_after_the_rows_of_the_batch_after_next_is_refused() -> None:
    """Two buffers cannot hold three batches: the rows wait for the update, and the update for the rows."""

    def late(t: int, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if task.op.name != UPDATE]
        place = next(i for i, task in enumerate(kept) if task.op == Op(EMB, t + 1, 2)) + 1
        return [*kept[:place], Task(Op(UPDATE, t - 1), "comm"), *kept[place:]]

    (problem,) = check(changed(late, SEMI_ASYNC)).problems
    assert problem.startswith("cycle: ") and "UPDATE(" in problem and "EMB(" in problem


def test_rows_more_updates_behind_than_the_declared_one_are_refused() -> None:
    """Everything on one lane, so that nothing else is in the way."""

    def early(t: int, tasks: list[Task]) -> list[Task]:
        ahead = (PREFETCH, H2D, ROUTE, RETRIEVE, SYNC, EMB)
        return [task.at(2) if task.op.name in ahead else task for task in tasks]

    schedule = dataclasses.replace(changed(early, SCHEDULES["serial"]()), stale_by=1)
    with pytest.raises(ScheduleError, match=r"stale by \d, not 1 as it says"):
        require(schedule)


# The wire is another matter: nothing goes wrong if GRAD does not wait for REDUCE, it is only slower.
BEHIND = [
    (task.op.name, op.name)
    for task in SCHEDULES["semi_async"]().tasks
    for op in task.after
    if (task.op.name, op.name) != (GRAD, REDUCE)
]


@pytest.mark.parametrize(("name", "waits_for"), BEHIND, ids=[f"{a} after {b}" for a, b in BEHIND])
def test_semi_async_without_any_one_of_its_edges_is_refused(name: str, waits_for: str) -> None:
    problems = check(without_edge(name, waits_for, SEMI_ASYNC)).problems
    if name == PREFETCH:
        assert len(problems) == 1 and problems[0].startswith("unbounded: nothing keeps PREFETCH(t)")
    else:
        assert any(text.startswith("missing edge") and f"{name}(t" in text.split(":")[0] for text in problems), problems


EDGES = [(task.op.name, op.name, op.batch - task.op.batch) for task in DBP.tasks for op in task.after]


@pytest.mark.parametrize(("name", "waits_for", "shift"), EDGES, ids=[f"{a} after {b}" for a, b, _ in EDGES])
def test_dbp_without_any_one_of_its_edges_is_refused_and_the_edge_is_named(
    name: str, waits_for: str, shift: int
) -> None:
    problems = check(without_edge(name, waits_for)).problems
    if name == PREFETCH:
        assert len(problems) == 1 and problems[0].startswith("unbounded: nothing keeps PREFETCH(t)")
    else:
        earlier = f"{waits_for}(t{shift:+d})" if shift else f"{waits_for}(t)"
        assert any(text.startswith(f"missing edge {earlier} -> {name}(t):") for text in problems), problems


NESTED = SCHEDULES["nested"](micro_batches=3)
WINDOW = ((FWD, EMB), (GRAD, BWD), (AGREE, BWD), (DENSE, UPDATE))


@pytest.mark.parametrize(("name", "waits_for"), WINDOW, ids=[f"{a} after {b}" for a, b in WINDOW])
@pytest.mark.parametrize("schedule", [NESTED, SCHEDULES["fwp"](micro_batches=3)], ids=lambda one: one.name)
def test_a_window_without_any_one_of_its_edges_is_refused(schedule: Schedule, name: str, waits_for: str) -> None:
    problems = check(without_edge(name, waits_for, schedule)).problems
    assert any(text.startswith("missing edge") and f"{name}(t" in text.split(":")[0] for text in problems), problems


def test_a_gradient_that_leaves_before_its_last_use_is_found() -> None:
    """A row that micro-batches 0 and 2 use must not be sent back after micro-batch 1."""

    def early(t: int, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if task.op != Op(GRAD, t, 2)]
        place = next(i for i, task in enumerate(kept) if task.op == Op(AGREE, t))
        return [*kept[:place], Task(Op(GRAD, t, 2), "comm", (Op(BWD, t, 1),)), *kept[place:]]

    problems = check(changed(early, NESTED)).problems
    assert any("missing edge BWD(t,2) -> GRAD(t,2): both touch the gradients" in text for text in problems), problems


def test_a_frozen_window_whose_rows_leave_before_the_update_is_found() -> None:
    def early(t: int, tasks: list[Task]) -> list[Task]:
        return [task._replace(after=()) if task.op.name == EMB else task for task in tasks]

    problems = check(changed(early, SCHEDULES["fwp"](micro_batches=3))).problems
    assert any("EMB(t)" in text and "nothing orders them" in text for text in problems), problems


def test_rows_and_gradients_must_have_the_parts_of_one_window() -> None:
    def whole(t: int, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if task.op.name != GRAD or task.op.part == 2]
        mended = [task._replace(op=Op(GRAD, t)) if task.op.name == GRAD else task for task in kept]
        return [
            task._replace(after=(Op(GRAD, t),)) if task.op == Op(UPDATE, t) else task for task in mended
        ]  # fmt: skip

    assert any("do not have the same parts" in text for text in check(changed(whole, NESTED)).problems)


def test_a_write_back_after_the_retrieval_that_may_need_it_is_found() -> None:
    def late(t: int, tasks: list[Task]) -> list[Task]:
        """On a lane of its own nothing orders it before RETRIEVE."""
        return [task._replace(lane="writer") if task.op.name == WRITEBACK else task for task in tasks]

    assert any("missing edge WRITEBACK(t-2) -> RETRIEVE(t)" in text for text in check(changed(late)).problems)


def test_retrieval_two_batches_ahead_into_two_buffers_is_found() -> None:
    def early(t: int, tasks: list[Task]) -> list[Task]:
        return [
            Task(Op(RETRIEVE, t + 2), "store", (Op(ROUTE, t + 2),)) if task.op.name == RETRIEVE else task
            for task in tasks
        ]

    problems = check(changed(early)).problems
    assert any("RETRIEVE(t)" in text and "buffer" in text for text in problems), problems


def test_a_schedule_without_sync_is_refused() -> None:
    def drop(t: int, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if task.op.name != SYNC]
        return [task._replace(after=tuple(op for op in task.after if op.name != SYNC)) for task in kept]

    assert any(text.startswith("no SYNC(t)") for text in check(changed(drop)).problems)


def test_sync_before_the_update_is_measured_as_stale() -> None:
    """Every pair of operations is in some order, so nothing races; but it is the wrong order."""

    def early(t: int, tasks: list[Task]) -> list[Task]:
        tasks = [task for task in tasks if task.op.name not in (SYNC, UPDATE, DENSE)]
        update = [Task(Op(SYNC, t + 1), COMPUTE, (Op(RETRIEVE, t + 1),))]
        update += [Task(Op(name, t), COMPUTE) for name in (UPDATE, DENSE)]
        return [*tasks, *update]

    assert check(changed(early)).stale_by >= 1


def test_collectives_of_one_group_on_two_lanes_are_refused() -> None:
    def split(t: int, tasks: list[Task]) -> list[Task]:
        return [task._replace(lane="comm", after=(Op(SYNC, t),)) if task.op.name == EMB else task for task in tasks]

    problems = check(changed(split)).problems
    assert any("group rows" in text and "EMB on lane comm" in text for text in problems), problems


def test_a_cycle_is_named() -> None:
    def knot(t: int, tasks: list[Task]) -> list[Task]:
        return [task._replace(after=(Op(GRAD, t),)) if task.op == Op(EMB, t) else task for task in tasks]

    (problem,) = check(changed(knot)).problems
    assert problem.startswith("cycle: ") and "EMB(" in problem and "GRAD(" in problem


def test_a_task_that_waits_for_nobodys_operation_is_named() -> None:
    def odd(t: int, tasks: list[Task]) -> list[Task]:
        return [task._replace(after=(Op(FWD, t, 7),)) if task.op == Op(GRAD, t) else task for task in tasks]

    assert any("which no step has" in text for text in check(changed(odd)).problems)


def test_an_operation_there_twice_is_named() -> None:
    def twice(t: int, tasks: list[Task]) -> list[Task]:
        return [*tasks, Task(Op(UPDATE, t), COMPUTE)]

    assert "UPDATE(t) is there twice" in check(changed(twice)).problems


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if not operation.optional])
def test_a_schedule_that_lacks_an_operation_is_refused(name: str) -> None:
    def drop(t: int, tasks: list[Task]) -> list[Task]:
        return [task for task in tasks if task.op.name != name]

    assert check(changed(drop, SCHEDULES["serial"]())).problems


# -- replicas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeping", [[MERGE], [AVERAGE], [MERGE, AVERAGE]], ids="+".join)
@pytest.mark.parametrize("micro_batches", [1, 3, 12])
@pytest.mark.parametrize("name", ["serial", "dbp", "fwp", "nested", "semi_async", "stale"])
def test_every_schedule_is_as_fresh_with_replicas(name: str, micro_batches: int, keeping: list[str]) -> None:
    plain = SCHEDULES[name](micro_batches=micro_batches)
    schedule = including(plain, keeping)
    verdict, before = require(schedule, keeping), check(plain)
    assert (verdict.stale_by, verdict.in_flight) == (before.stale_by, before.in_flight)
    assert len(schedule.tasks) == len(plain.tasks) + (MERGE in keeping) * plain.num_parts(GRAD) + (AVERAGE in keeping)


@pytest.mark.parametrize("name", [MERGE, AVERAGE])
def test_replicas_that_nothing_keeps_together_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"no {name}\(t\): replicas of tables would drift apart"):
        require(NESTED, [name])


def test_sums_that_leave_before_their_gradients_have_come_are_found() -> None:
    def early(t: int, tasks: list[Task]) -> list[Task]:
        merges = [task._replace(lane="early") for task in tasks if task.op.name == MERGE]
        return [*(task for task in tasks if task.op.name != MERGE), *merges]

    problems = check(changed(early, including(NESTED, [MERGE]))).problems
    assert any("collectives of group rows have no single order" in text for text in problems)
    assert any("missing edge GRAD(t" in text and "-> MERGE(t" in text for text in problems)


def test_an_average_that_comes_after_the_next_rows_have_left_is_found() -> None:
    def late(t: int, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if task.op.name != AVERAGE]
        place = next(i for i, task in enumerate(kept) if task.op.name == EMB) + 1
        return [*kept[:place], Task(Op(AVERAGE, t - 1), COMPUTE), *kept[place:]]

    verdict = check(changed(late, including(SCHEDULES["serial"](), [AVERAGE])))
    assert verdict.problems or verdict.stale_by == 1


# -- samples dealt over workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeping", [[], [MERGE, AVERAGE]], ids=["alone", "replicas"])
@pytest.mark.parametrize("name", ["serial", "dbp", "fwp", "nested", "stale"])
def test_every_schedule_is_as_fresh_with_samples_dealt(name: str, keeping: list[str]) -> None:
    plain = SCHEDULES[name](micro_batches=2)
    schedule = including(plain, [DEAL, *keeping])
    verdict, before = require(schedule, [DEAL, *keeping]), check(plain)
    assert (verdict.stale_by, verdict.in_flight) == (before.stale_by, before.in_flight)
    dealt, read = (next(task for task in schedule.tasks if task.op.name == op) for op in (DEAL, PREFETCH))
    assert dealt.op.batch == read.op.batch == schedule.look_ahead and dealt.lane == read.lane


def test_a_run_that_deals_samples_and_a_schedule_that_does_not_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"no DEAL\(t\): workers would compute on what they have read"):
        require(NESTED, [DEAL])


def test_a_batch_that_is_copied_while_it_is_dealt_is_found() -> None:
    def undo(t: int, tasks: list[Task]) -> list[Task]:
        return [task._replace(after=tuple(op for op in task.after if op.name != DEAL)) for task in tasks]

    problems = check(changed(undo, including(NESTED, [DEAL]))).problems
    assert any("missing edge DEAL(t) -> H2D(t): both touch the batch" in text for text in problems), problems


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_schedule_prints_as_one_line_a_lane() -> None:
    assert str(DBP).splitlines() == [
        "data     PREFETCH(t+4)",
        "copy     H2D(t+3)",
        "keys     ROUTE(t+2)",
        "store    WRITEBACK(t-1) RETRIEVE(t+1)",
        "compute  SYNC(t) EMB(t) FWD(t) BWD(t) AGREE(t) GRAD(t) UPDATE(t) REDUCE(t) DENSE(t)",
    ]


def test_many_micro_batches_are_cut_short_in_print() -> None:
    assert str(SCHEDULES["nested"](micro_batches=32)).splitlines()[-2:] == [
        "comm     SYNC(t) EMB(t,0) EMB(t,1) ... EMB(t,31) GRAD(t,0) GRAD(t,1) ... AGREE(t) GRAD(t,31) UPDATE(t)",
        "compute  FWD(t,0) BWD(t,0) FWD(t,1) BWD(t,1) ... FWD(t,31) BWD(t,31) REDUCE(t) DENSE(t)",
    ]


def test_unrolling_fills_and_empties_the_pipeline() -> None:
    tasks = list(DBP.unroll(0, 2))
    assert [task.op for task in tasks if task.lane == "store"] == [
        Op(RETRIEVE, 0), Op(RETRIEVE, 1), Op(WRITEBACK, 0), Op(WRITEBACK, 1),
    ]  # fmt: skip
    assert {task.op for task in tasks} == {task.op for task in SCHEDULES["serial"]().unroll(0, 2)}
    assert {H2D, BWD, AGREE} <= {task.op.name for task in tasks}


@pytest.mark.parametrize(
    ("name", "look_ahead"), [("serial", 2), ("fwp", 2), ("dbp", 0), ("nested", 0), ("semi_async", 0), ("stale", -1)]
)
def test_a_look_ahead_that_does_not_fit_is_refused_with_the_fix(name: str, look_ahead: int) -> None:
    with pytest.raises(ValueError, match=r"look-?_?ahead.*(leave it out|at least 1)"):
        SCHEDULES[name](look_ahead=look_ahead)


def moved(of: Schedule, name: str, before: str) -> Schedule:
    def change(t: int, tasks: list[Task]) -> list[Task]:
        rest = [task for task in tasks if task.op.name != name]
        place = next(i for i, task in enumerate(rest) if task.op.name == before)
        return [*rest[:place], *(task for task in tasks if task.op.name == name), *rest[place:]]

    return changed(change, of)


@pytest.mark.parametrize(
    ("name", "before", "problem"),
    [
        (AVERAGE, UPDATE, "AVERAGE(t) reads the updated before UPDATE(t)"),
        (MERGE, DENSE, "UPDATE(t) reads the merged before MERGE(t)"),
        (MERGE, GRAD, "MERGE(t) reads the returned before GRAD(t)"),
        (GRAD, DENSE, "UPDATE(t) reads the returned before GRAD(t)"),
        (AGREE, DENSE, "UPDATE(t) reads the agreed before AGREE(t)"),
        (EMB, REDUCE, "FWD(t) reads the vectors before EMB(t)"),
    ],
)
def test_an_operation_that_comes_before_what_it_needs_is_found(name: str, before: str, problem: str) -> None:
    schedule = including(SCHEDULES["serial"](), [MERGE, AVERAGE] if name in (MERGE, AVERAGE) else [])
    assert not check(schedule).problems
    assert any(text.startswith(problem) for text in check(moved(schedule, name, before)).problems)

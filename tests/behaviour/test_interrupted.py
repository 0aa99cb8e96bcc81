"""fit that is left in the middle: on_step that raises, Ctrl-C, stop; the trainer goes on from there, or says why it cannot."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nestpipe import Batch, TrainingError
from nestpipe.schedule.ops import Op, Task
from tests.behaviour.test_schedules import Case, batches, close, make
from tests.cluster import Cluster

SCHEDULES = ["serial", "dbp", "fwp", "nested"]
STEPS = 14


def case_of(schedule: str, tier: str) -> Case:
    return Case(schedule, tier, steps=STEPS, micro_batches=2)


def undisturbed(schedule: str, tier: str) -> str:
    trainer, features, folder = make(case_of("serial", "memory"))
    try:
        trainer.fit(batches(features, case_of(schedule, tier), trainer.rank, trainer.world))
        return trainer.digest()
    finally:
        close(trainer, folder)


def raise_in_on_step(schedule: str, tier: str, step: int, only: int | None) -> tuple[str, int, str]:
    """on_step raises, on all ranks or on one; then the same iterator is gone on with."""
    trainer, features, folder = make(case_of(schedule, tier))
    try:
        source = batches(features, case_of(schedule, tier), trainer.rank, trainer.world)

        def on_step(result: Any) -> None:
            if result.step == step and only in (None, trainer.rank):
                raise LookupError("enough")

        try:
            trainer.fit(source, on_step=on_step)
            told = ""
        except (LookupError, TrainingError) as error:
            told = f"{type(error).__name__}: {error}"
        stopped = trainer.steps
        trainer.fit(source)
        return told, stopped, trainer.digest()
    finally:
        close(trainer, folder)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_on_step_that_raises_loses_nothing(cluster: Cluster, schedule: str, tier: str) -> None:
    (expected,) = cluster.run(1, undisturbed, schedule, tier)
    for step in (5, STEPS - 1, STEPS):
        ((told, stopped, digest),) = cluster.run(1, raise_in_on_step, schedule, tier, step, None)
        assert told == "LookupError: enough" and step <= stopped <= step + 6 and digest == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_on_step_that_raises_on_one_rank_is_told_on_all_after_the_same_step(cluster: Cluster, schedule: str) -> None:
    expected = cluster.run(2, undisturbed, schedule, "memory")[0]
    first, second = cluster.run(2, raise_in_on_step, schedule, "memory", 6, 1)
    assert second[0] == "LookupError: enough"
    assert first[0].startswith("TrainingError: rank 1, on_step, after step ") and "LookupError: enough" in first[0]
    assert first[1:] == second[1:] and first[2] == expected


def raise_in_a_pause() -> str:
    trainer, features, folder = make(case_of("nested", "memory"))
    try:

        def on_step(result: Any) -> None:
            if result.step == 4 and trainer.rank == 1:
                raise LookupError("enough")

        trainer.fit(batches(features, case_of("nested", "memory"), trainer.rank, 2), on_step=on_step, pause_every=4)
    except (LookupError, TrainingError) as error:
        return str(error).split(" (at")[0]
    finally:
        close(trainer, folder)
    return ""


def test_an_on_step_that_raises_in_a_pause_on_one_rank_ends_all(cluster: Cluster) -> None:
    assert cluster.run(2, raise_in_a_pause) == ["rank 1, on_step, after step 4: LookupError: enough", "enough"]


def raise_while_another_evaluates(schedule: str, pause_every: int | None) -> tuple[str, int]:
    """Rank 1 fails where rank 0 makes a call that takes both; then both go on."""
    case = case_of(schedule, "memory")
    trainer, features, folder = make(case)
    source = batches(features, case, trainer.rank, 2)

    def on_step(result: Any) -> None:
        if result.step == 4:
            if trainer.rank == 1:
                raise OSError("disk full")
            trainer.evaluate(batches(features, case, trainer.rank, 2), {})

    try:
        try:
            trainer.fit(source, on_step=on_step, pause_every=pause_every)
            told = ""
        except (OSError, TrainingError) as error:
            told = str(error).split(" (at")[0]
        trainer.fit(source)
        return told, trainer.digest()
    finally:
        close(trainer, folder)


@pytest.mark.parametrize(("schedule", "pause_every"), [("serial", None), ("serial", 4), ("fwp", None), ("nested", 4)])
def test_an_on_step_that_raises_while_another_worker_evaluates_is_told_at_once(
    cluster: Cluster, schedule: str, pause_every: int | None
) -> None:
    expected = cluster.run(2, undisturbed, schedule, "memory")[0]
    first, second = cluster.run(2, raise_while_another_evaluates, schedule, pause_every)
    assert "rank 1" in first[0] and first[0].endswith("disk full") and second[0] == "disk full"
    assert first[1] == second[1] == expected


def call_differently() -> list[str]:
    trainer, features, folder = make(case_of("serial", "memory"))
    data = list(batches(features, case_of("serial", "memory"), trainer.rank, 2))
    calls = [
        (lambda: trainer.evaluate(data, {}), lambda: trainer.digest()),
        (lambda: trainer.step(data[0]), lambda: trainer.digest()),
        (lambda: trainer.fit(data), lambda: trainer.step(data[0])),
    ]
    told = []
    try:
        for pair in calls:
            try:
                pair[trainer.rank]()
            except TrainingError as error:
                told.append(str(error))
    finally:
        close(trainer, folder)
    return told


def test_workers_that_make_different_calls_are_told_so(cluster: Cluster) -> None:
    first, second = cluster.run(2, call_differently)
    assert first == second and len(first) == 3
    assert "workers make different calls (rank 0: evaluate, rank 1: compute the digest)" in first[0]
    assert "(rank 0: train, rank 1: compute the digest)" in first[1]
    assert "workers make different calls" in first[2]


def interrupt_once(schedule: str, tier: str) -> tuple[str, str]:
    """Ctrl-C in the middle of a step, and then the same iterator is gone on with."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    trainer, features, folder = make(case_of(schedule, tier))

    def around(task: Task, work: Any) -> None:
        work()
        if task.op == Op("BWD", 5):
            os.kill(os.getpid(), signal.SIGINT)

    try:
        source = batches(features, case_of(schedule, tier), trainer.rank, trainer.world)
        trainer.around = around
        try:
            trainer.fit(source)
            told = ""
        except KeyboardInterrupt as error:
            told = str(error)
        assert not [t for t in threading.enumerate() if t.name in ("nestpipe-comm", "nestpipe-store", "nestpipe-keys")]
        trainer.around = None
        trainer.fit(source)
        return told, trainer.digest()
    finally:
        close(trainer, folder)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_ctrl_c_ends_fit_between_two_steps_and_training_can_go_on(cluster: Cluster, schedule: str, tier: str) -> None:
    (expected,) = cluster.run(1, undisturbed, schedule, tier)
    ((told, digest),) = cluster.run(1, interrupt_once, schedule, tier)
    assert told.startswith("training has stopped after step") and digest == expected


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_ctrl_c_at_a_terminal_reaches_both_workers_and_their_training_can_go_on(cluster: Cluster, tier: str) -> None:
    expected = cluster.run(2, undisturbed, "nested", tier)
    results = cluster.run(2, interrupt_once, "nested", tier)
    assert results[0] == results[1] and results[0][0].startswith("training has stopped after step")
    assert [digest for _, digest in results] == expected


def interrupt_twice(schedule: str) -> list[str]:
    """The second Ctrl-C comes while compute waits for rows; the trainer refuses then, or goes on, and never hangs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer, features, folder = make(case_of(schedule, "memory"))

    def around(task: Task, work: Any) -> None:
        if task.op == Op("EMB", 5):
            os.kill(os.getpid(), signal.SIGINT)
            while not trainer._worker.ops.stop_asked:  # until it has been heard
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            while not trainer._worker.training.engine._lanes._stop_all:
                time.sleep(0.01)
        work()

    told = []
    try:
        source = batches(features, case_of(schedule, "memory"), trainer.rank, trainer.world)
        trainer.around = around
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(source)
        trainer.around = None
        for call in (trainer.digest, lambda: trainer.fit(source)):
            try:
                call()
            except ValueError as error:
                told.append(str(error))
        assert not [t for t in threading.enumerate() if t.name in ("nestpipe-comm", "nestpipe-store", "nestpipe-keys")]
        return told
    finally:
        close(trainer, folder)


@pytest.mark.parametrize(("schedule", "world"), [("fwp", 1), ("nested", 1), ("nested", 2)])
def test_a_second_ctrl_c_while_compute_waits_leaves_no_lane_behind(cluster: Cluster, schedule: str, world: int) -> None:
    for told in cluster.run(world, interrupt_twice, schedule):
        assert len(told) == 2 and all("in between two steps (" in text and "new trainer" in text for text in told)


def stop_and_go_on(schedule: str) -> tuple[int, str]:
    trainer, features, folder = make(case_of(schedule, "memory"))
    try:
        source: Iterator[Batch] = iter(list(batches(features, case_of(schedule, "memory"), trainer.rank, 1)))
        trainer.fit(source, on_step=lambda r: trainer.stop() if r.step == 3 else None)
        stopped = trainer.steps
        assert trainer.position == stopped
        trainer.fit(source)
        return stopped, trainer.digest()
    finally:
        close(trainer, folder)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_stop_the_same_iterator_is_gone_on_with_and_no_batch_is_lost(cluster: Cluster, schedule: str) -> None:
    (expected,) = cluster.run(1, undisturbed, schedule, "memory")
    ((stopped, digest),) = cluster.run(1, stop_and_go_on, schedule)
    assert stopped < STEPS and digest == expected


def test_a_step_of_ones_own_loop_advances_the_position() -> None:
    trainer, features, folder = make(case_of("serial", "memory"))
    try:
        for batch in list(batches(features, case_of("serial", "memory"), 0, 1))[:3]:
            result = trainer.step(batch)
        assert result is not None and result.step == trainer.steps == trainer.position == 3
    finally:
        close(trainer, folder)


def test_pauses_come_at_steps_that_the_result_names() -> None:
    trainer, features, folder = make(case_of("nested", "memory"))
    paused: list[int] = []

    def on_step(result: Any) -> None:
        if trainer._worker.training.engine.in_flight == 0 and result.step < STEPS:
            paused.append(result.step)

    try:
        trainer.fit(batches(features, case_of("nested", "memory"), 0, 1), on_step=on_step, pause_every=5)
        assert paused == [5, 10]
    finally:
        close(trainer, folder)


class Fails(torch.nn.Module):
    def forward(self, batch: Batch, rows: Any) -> torch.Tensor:
        return batch.labels @ torch.zeros(99)  # the user's own line


def test_the_traceback_of_a_model_that_fails_begins_at_the_users_own_line() -> None:
    import traceback

    from nestpipe import Feature, Jagged, Table, Trainer

    trainer = Trainer(
        Fails(),
        [Table("a", 4)],
        [Feature("a", "a")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        schedule="nested",
    )
    with pytest.raises(TrainingError, match=rf"RuntimeError: .* \(at {__file__}:\d+, in forward\)") as caught:
        trainer.fit([Batch({"a": Jagged.from_lists([[1]])}, labels=torch.ones(1))])
    cause = caught.value.__cause__
    assert traceback.extract_tb(cause.__traceback__)[0].line.endswith("# the user's own line")  # type: ignore[union-attr]
    assert len(traceback.format_exception(caught.value)) < 20

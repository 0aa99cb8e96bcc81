"""What goes wrong on one rank, in any lane, ends all lanes on all ranks, with its cause."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer
from nestpipe.errors import TrainingError
from tests.behaviour.test_schedules import STEPS, Case, Model, batches, close, make
from tests.cluster import Cluster
from tests.waiting import PATIENCE

TROUBLE = 12  # batch at which it begins


def fit_until_trouble(case: Case, make_trouble: Callable[[Trainer, Any], Iterator[Batch]]) -> dict[str, Any]:
    trainer, features, folder = make(case)
    try:
        try:
            trainer.fit(make_trouble(trainer, batches(features, case, trainer.rank, trainer.world)))
        except TrainingError as error:
            message = str(error)
        else:
            message = ""
        report: dict[str, Any] = {"message": message, "steps": trainer.steps}
        try:
            report["digest"] = trainer.digest()
        except ValueError as error:
            report["digest"] = str(error)
        return report
    finally:
        close(trainer, folder)


def bad_source(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    for number, batch in enumerate(source):
        if number == TROUBLE and trainer.rank == 1:
            raise OSError("the feed broke")
        yield batch


@pytest.fixture(scope="module")
def broken_source_in_serial(cluster: Cluster) -> dict[str, Any]:
    return cluster.run(2, fit_until_trouble, Case(steps=STEPS, micro_batches=2), bad_source)[0]


@pytest.mark.parametrize(
    ("schedule", "tier"),
    [("dbp", "memory"), ("dbp", "disk"), ("fwp", "disk"), ("nested", "memory"), ("nested", "disk")],
)
def test_a_broken_source_ends_all_lanes_on_all_ranks_after_the_batches_before_it(
    cluster: Cluster, broken_source_in_serial: dict[str, Any], schedule: str, tier: str
) -> None:
    case = Case(schedule, tier, steps=STEPS, micro_batches=2, delays=5)
    reports = cluster.run(2, fit_until_trouble, case, bad_source)
    assert reports[0] == reports[1] == broken_source_in_serial and reports[0]["steps"] == TROUBLE
    assert f"rank 1, batch {TROUBLE}: OSError: the feed broke" in reports[0]["message"]


def bad_label(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    for number, batch in enumerate(source):
        yield (
            dataclasses.replace(batch, labels=batch.labels * 1e38) if number == TROUBLE and trainer.rank == 1 else batch
        )


@pytest.mark.parametrize(("schedule", "micro_batches"), [("dbp", 1), ("fwp", 3), ("nested", 3)])
def test_a_bad_loss_ends_all_lanes_on_all_ranks_and_torn_tables_are_not_used_again(
    cluster: Cluster, schedule: str, micro_batches: int
) -> None:
    case = Case(schedule, "disk", steps=STEPS, micro_batches=micro_batches, clustering="window", delays=6)
    reports = cluster.run(2, fit_until_trouble, case, bad_label)
    assert reports[0] == reports[1] and reports[0]["steps"] == TROUBLE
    assert f"rank 1, batch {TROUBLE}: the loss of sample" in reports[0]["message"]
    assert "load a checkpoint into a new trainer" in reports[0]["digest"]


def full_disk(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    """From batch TROUBLE on the store of rank 1 takes nothing back."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device", "item.rows")

    for number, batch in enumerate(source):
        if number == TROUBLE and trainer.rank == 1:
            trainer.stores[2].write_back = refuse  # type: ignore[union-attr, method-assign]
        yield batch


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_a_write_back_that_fails_ends_all_ranks_with_its_cause(cluster: Cluster, schedule: str) -> None:
    reports = cluster.run(2, fit_until_trouble, Case(schedule, "disk", steps=STEPS), full_disk)
    assert reports[0] == reports[1]
    assert "rank 1" in reports[0]["message"] and "No space left on device" in reports[0]["message"]


def corrupt_file(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    """After some batches every block of one file of rank 1 is overwritten."""
    for number, batch in enumerate(source):
        if number == TROUBLE and trainer.rank == 1:  # rows have left memory by then
            path = trainer.stores[0].file.path  # type: ignore[union-attr]
            path.write_bytes(b"\x5a" * path.stat().st_size)
        yield batch


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_a_corrupted_file_ends_all_ranks_and_is_named(cluster: Cluster, schedule: str) -> None:
    reports = cluster.run(2, fit_until_trouble, Case(schedule, "disk", steps=60), corrupt_file)
    assert reports[0] == reports[1] and 2 < reports[0]["steps"] < 60  # when a block is read again
    assert "rank 1, batch" in reports[0]["message"] and "sgd%200.1.rows" in reports[0]["message"]


def full_disk_at_the_end(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    return full_disk(trainer, itertools.islice(source, TROUBLE + 1))


def test_a_last_write_back_that_fails_is_not_lost(cluster: Cluster) -> None:
    for schedule in ("serial", "dbp"):
        reports = cluster.run(2, fit_until_trouble, Case(schedule, "disk", steps=STEPS), full_disk_at_the_end)
        assert reports[0] == reports[1] and "No space left on device" in reports[0]["message"]


def bad_middle(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    """The model of rank 1 fails in the middle of a batch, when others' rows and gradients are on their way."""
    forward, calls = trainer.model.forward, 0

    def fails(batch: Batch, rows: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20 and trainer.rank == 1:
            raise RuntimeError("out of memory, say")
        return forward(batch, rows)

    trainer.model.mixes_samples = False  # type: ignore[assignment]
    trainer.model.forward = fails  # type: ignore[method-assign]
    yield from source


@pytest.mark.parametrize("schedule", ["fwp", "nested"])
def test_a_model_that_fails_in_the_middle_of_a_window_ends_all_ranks(cluster: Cluster, schedule: str) -> None:
    case = Case(schedule, "memory", steps=20, micro_batches=6, delays=1)
    reports = cluster.run(2, fit_until_trouble, case, bad_middle)
    assert reports[0] == reports[1] and reports[0]["steps"] == 3
    assert "rank 1, batch 3: RuntimeError: out of memory, say" in reports[0]["message"]


def step_after_a_bad_step(schedule: str) -> str:
    """A step fails on rank 0, in a loop that catches it and goes on."""
    table = Table("item", 4, optimizer=SGD(lr=0.1))
    features = [Feature("item", "item", "sum")]
    trainer = Trainer(
        Model(features, [table]),
        [table],
        features,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2),
        schedule=schedule,
        micro_batches=2,
    )

    def batch(scale: float) -> Batch:
        return Batch({"item": Jagged.from_lists([[1, 2], [3], [4, 2], [9]])}, {}, torch.arange(4.0) * scale)

    trainer.step(batch(1.0))
    with contextlib.suppress(TrainingError):
        trainer.step(batch(3e38 if trainer.rank == 0 else 1.0))
    trainer.step(batch(2.0))
    return trainer.digest()


def test_a_step_that_failed_leaves_nothing_to_the_next(cluster: Cluster) -> None:
    digests = {schedule: cluster.run(2, step_after_a_bad_step, schedule) for schedule in ("serial", "fwp", "nested")}
    assert len({digest for pair in digests.values() for digest in pair}) == 1, digests


OVER = threading.Event()  # set when fit has returned


def slow_source(trainer: Trainer, source: Iterator[Batch]) -> Iterator[Batch]:
    """A bad batch, and nothing after it until fit has returned."""
    for number, batch in enumerate(bad_label(trainer, source)):
        if number == TROUBLE + 1:
            OVER.wait(2 * PATIENCE)
        yield batch


def fit_slow_source(schedule: str) -> dict[str, Any]:
    OVER.clear()
    try:
        return fit_until_trouble(Case(schedule, "memory", steps=STEPS), slow_source)
    finally:
        OVER.set()


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested"])
def test_trouble_does_not_wait_for_a_source_that_is_slow(cluster: Cluster, schedule: str) -> None:
    reports = cluster.run(2, fit_slow_source, schedule)
    assert f"rank 1, batch {TROUBLE}: the loss of sample" in reports[0]["message"]


def fit_rare_keys(schedule: str) -> dict[str, Any]:
    """From batch 4 on rank 0 reads keys that nobody has seen before."""
    table = Table("rare", 4, optimizer=SGD(lr=0.1), admit_after=3, max_rare_keys=16)
    features = [Feature("rare", "rare", "sum")]
    trainer = Trainer(Model(features, [table]), [table], features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
                      schedule=schedule)  # fmt: skip

    def source() -> Iterator[Batch]:
        for number in range(8):
            fresh = 100 * number if number >= 4 and trainer.rank == 0 else 0
            yield Batch({"rare": Jagged.from_lists([[fresh + i] for i in range(8)])}, {}, torch.zeros(8))

    try:
        trainer.fit(source())
    except TrainingError as error:
        return {"message": str(error), "steps": trainer.steps}
    return {"message": "", "steps": trainer.steps}


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_too_many_rare_keys_end_training_on_all_ranks_with_the_same_words(cluster: Cluster, schedule: str) -> None:
    reports = cluster.run(2, fit_rare_keys, schedule)
    assert reports[0] == reports[1]
    assert "table 'rare': step" in reports[0]["message"] and "max_rare_keys=16" in reports[0]["message"]
    assert 4 <= reports[0]["steps"] < 8

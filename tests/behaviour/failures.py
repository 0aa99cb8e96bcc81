"""`make failures`: an exception before and after every operation of a step, on one rank, in every schedule.

Afterwards the trainer either refuses to go on, and says why, or goes on to the bits of a run that nobody disturbed; a new
trainer that loads the last checkpoint always does. pytest runs a part of it (test_failures.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe import Batch, Table, Trainer
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import AVERAGE, GRAD, MERGE, OPERATIONS, Op, Task
from tests.behaviour import test_schedules
from tests.behaviour.test_schedules import Case, batches, close, make
from tests.cluster import Cluster

SAVED, FAILS, STEPS = 4, 7, 12
EXACT = ("serial", "dbp", "fwp", "nested")


@dataclasses.dataclass(frozen=True)
class Failure:
    schedule: str
    tier: str
    plain: bool  # tables without admission and eviction
    op: str
    part: int
    after: bool  # the operation, or before it
    interrupt: bool = False  # Ctrl-C, the second one
    rank: int = 0  # where it happens
    replicas: int = 1
    averaged: int = 0

    @property
    def case(self) -> Case:
        return Case(
            self.schedule,
            self.tier,
            steps=STEPS,
            micro_batches=2,
            replicas=self.replicas,
            averaged=self.averaged,
        )


def all_failures(*, world: int) -> Iterator[Failure]:
    names = [name for name, operation in OPERATIONS.items() if not operation.optional]
    for schedule, tier, plain, op, after in itertools.product(
        EXACT, ("memory", "disk"), (True, False), names, (False, True)
    ):
        for part in range(SCHEDULES[schedule](micro_batches=2).num_parts(op)):
            for interrupt in (False, True) if world == 1 else (False,):
                yield Failure(schedule, tier, plain, op, part, after, interrupt, rank=world - 1)


def of_replicas() -> Iterator[Failure]:
    """On two workers that hold all tables each, at what only replicas do."""
    for schedule, tier, op, after in itertools.product(EXACT, ("memory", "disk"), (MERGE, AVERAGE), (False, True)):
        parts = SCHEDULES[schedule](micro_batches=2).num_parts(GRAD) if op == MERGE else 1
        for part in range(parts):
            yield Failure(schedule, tier, False, op, part, after, rank=1, replicas=2, averaged=2)


def of_rank(features: Any, case: Case, rank: int, world: int) -> list[Batch]:
    return list(batches(features, case, rank, world))


def made(failure: Failure) -> tuple[Trainer, list[Batch], str]:
    declared = test_schedules.declared
    if failure.plain:
        test_schedules.declared = without_limits
    try:
        trainer, features, folder = make(failure.case)
    finally:
        test_schedules.declared = declared
    return trainer, of_rank(features, failure.case, trainer.rank, trainer.world), folder


def without_limits(tier: str, samples: int = 6) -> Any:
    tables, features = DECLARED(tier, samples)
    return [dataclasses.replace(t, admit_after=1, eviction=None) for t in tables if isinstance(t, Table)], features


DECLARED = test_schedules.declared


def undisturbed(failure: Failure) -> str:
    trainer, data, folder = made(dataclasses.replace(failure, schedule="serial"))
    try:
        trainer.fit(data)
        return trainer.digest()
    finally:
        close(trainer, folder)


def injected(failure: Failure) -> Callable[[Task, Callable[[], None]], None]:
    def around(task: Task, work: Callable[[], None]) -> None:
        mine = task.op == Op(failure.op, FAILS, failure.part)
        error = KeyboardInterrupt("injected") if failure.interrupt else RuntimeError("injected")
        if mine and not failure.after:
            raise error
        work()
        if mine:
            raise error

    return around


def disturbed(failure: Failure, store: str) -> dict[str, Any]:
    """What the trainer said when asked to go on (a refusal, or the digest at the end), and the digest of one that resumed."""
    trainer, data, folder = made(failure)
    saved = Path(store + "-saved")
    told: dict[str, Any] = {"failed": "", "refused": "", "digest": ""}
    try:
        trainer.fit(data[:SAVED])
        trainer.save(saved)
        if trainer.rank == failure.rank:
            trainer.around = injected(failure)
        rest = iter(data[SAVED:])
        try:
            trainer.fit(rest)
        except BaseException as error:
            told["failed"] = f"{type(error).__name__}: {error}"
        trainer.around = None
        told["position"] = trainer.position - min(trainer.steps, len(data))
        try:
            trainer.fit(rest)  # what was taken and not trained on comes again
            told["digest"] = trainer.digest()
        except ValueError as error:
            told["refused"] = str(error)
    finally:
        world = trainer.world
        close(trainer, folder)
        if world > 1:
            rank = trainer.rank
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    again, data, folder = made(failure)
    try:
        again.load(saved)
        again.fit(data[SAVED:])
        told["resumed"] = again.digest()
    finally:
        close(again, folder)
        if world > 1:  # before its file is removed: torch looks for it as long as workers wait for each other
            dist.destroy_process_group()
    return told


def check(failure: Failure, told: dict[str, Any], expected: str) -> list[str]:
    """What is wrong with it."""
    wrong = []
    if not told["failed"]:
        wrong.append("nothing failed")
    if told["resumed"] != expected:
        wrong.append("the resumed run ends in other bits")
    if told["refused"]:
        if "load a checkpoint into a new trainer" not in told["refused"]:
            wrong.append(f"an unclear refusal: {told['refused']}")
    elif told["position"]:
        wrong.append(f"its position is {told['position']} beyond its steps")
    elif told["digest"] != expected:
        wrong.append(f"it went on to other bits ({told['failed']})")
    return wrong


def run(cluster: Cluster, world: int, failure: Failure, expected: dict[Any, str]) -> tuple[list[str], bool]:
    """What is wrong, and whether the trainer refused to go on."""
    kind = (world, failure.plain, failure.replicas, failure.averaged)
    if kind not in expected:
        expected[kind] = cluster.run(world, undisturbed, failure)[0]
    folder = tempfile.mkdtemp()
    try:
        reports = cluster.run(world, disturbed, failure, f"{folder}/store")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [
        f"rank {rank}: {text}" for rank, told in enumerate(reports) for text in check(failure, told, expected[kind])
    ]
    return wrong, bool(reports[failure.rank]["refused"])


def main() -> None:
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    cluster, start, expected, wrong, refused = Cluster(), time.perf_counter(), {}, 0, 0
    cases = [(world, failure) for world in (1, 2) for failure in all_failures(world=world)]
    cases = [*cases, *((2, failure) for failure in of_replicas())][::every]
    for number, (world, failure) in enumerate(cases):
        try:
            flaws, did_refuse = run(cluster, world, failure, expected)
        except AssertionError as error:
            flaws, did_refuse = [str(error)[-2000:]], False
        refused += did_refuse
        if flaws:
            wrong += 1
            print("WRONG", world, failure, flaws, flush=True)
        if number % 50 == 49:
            print(f"{number + 1} of {len(cases)}: {wrong} wrong, {refused} refused, "
                  f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    cluster.close()
    print(
        f"{len(cases)} failures: {refused} refused, {len(cases) - refused - wrong} went on to the same bits, {wrong} wrong"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

"""A worker that the others wait for is named by them, or names itself, long before anybody gives up."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nestpipe import Trainer
from nestpipe.engine import heartbeat
from tests.cluster import Cluster
from tests.engine.test_dense import FEATURE, TABLE, Tower, batch
from tests.waiting import until


class Told(logging.Handler):
    """Lines of the log, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def wait_for(self, fragment: str) -> None:
        until(lambda: any(fragment in line for line in self.lines), f"it was told that {fragment}")


def make(late: float) -> tuple[Trainer, Told]:
    heartbeat.BEAT, heartbeat.LATE = late / 8, late
    told = Told()
    logging.getLogger("nestpipe").addHandler(told)
    return Trainer(Tower(), TABLE, FEATURE, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), schedule="nested"), told


def fit(trainer: Trainer, steps: int, **options: Any) -> None:
    trainer.fit([batch(step, trainer.rank, trainer.world) for step in range(steps)], **options)


def stopped() -> bool:
    """Rank 1 is stopped as a debugger would; rank 0 names it, wakes it up, and both train on."""
    trainer, told = make(late=1.0)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    fit(trainer, 3)
    named = [trainer.rank == 1]
    if trainer.rank == 0:

        def watch() -> None:
            try:
                told.wait_for("rank 1 has given no sign of life for")
                named[0] = True
            finally:
                os.kill(pids[1], signal.SIGCONT)

        watcher = threading.Thread(target=watch)
        watcher.start()
        fit(trainer, 3)
        watcher.join()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
        fit(trainer, 3)
    trainer.close()
    return named[0] and trainer.steps == 6


def test_a_stopped_worker_is_named_and_training_goes_on_when_it_does(cluster: Cluster) -> None:
    assert cluster.run(2, stopped) == [True, True]


def held_up(where: str, named: Path) -> bool:
    """Rank 1 is busy with something: in its on_step, in the data of an evaluation, or outside of the trainer. It, or rank 0,
    tells so; then it goes on."""
    trainer, told = make(late=0.5)
    fit(trainer, 3)
    fragment = {
        "on_step": "rank 1 has been in on_step(4) for",
        "evaluate": "rank 1 has been in evaluate for",
        "outside": "rank 1 is alive but in no call of the trainer",
    }[where]
    teller = 0 if where == "outside" else 1

    def watch() -> None:
        told.wait_for(fragment)
        named.touch()

    def be_busy() -> None:
        until(named.exists, "it was named")

    if trainer.rank == teller:
        threading.Thread(target=watch, daemon=True).start()
    if where == "evaluate":

        def late() -> Iterator[Any]:
            if trainer.rank == 1:
                be_busy()
            yield batch(0, trainer.rank, trainer.world)

        trainer.evaluate(late(), {})
    elif trainer.rank == 1:

        def on_step(result: Any) -> None:
            if result.step == 4 and where == "on_step":
                be_busy()

        if where == "outside":
            be_busy()
        fit(trainer, 3, on_step=on_step)
    else:
        fit(trainer, 3)
    trainer.close()
    return named.exists()


@pytest.mark.parametrize("where", ["on_step", "evaluate", "outside"])
def test_a_worker_that_is_busy_with_something_else_is_named(cluster: Cluster, tmp_path: Path, where: str) -> None:
    assert cluster.run(2, held_up, where, tmp_path / "named") == [True, True]


def slow_steps() -> list[str]:
    """Steps that take long, on all workers, are nobody's fault."""
    trainer, told = make(late=2.0)

    def on_step(result: Any) -> None:
        time.sleep(0.6)

    fit(trainer, 4, on_step=on_step)
    trainer.close()
    return told.lines


def test_nobody_is_named_while_all_work(cluster: Cluster) -> None:
    for lines in cluster.run(2, slow_steps):
        assert not [line for line in lines if "rank" in line]

"""A trainer gives back what it took: files, descriptors, threads; when closed, dropped, or not even made."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import Feature, Table, Trainer, TrainingError
from tests.cluster import Cluster
from tests.engine.test_dense import Tower, batch
from tests.waiting import until

FEATURE = [Feature("item", "item", "sum")]


def make(folder: Path, *, optimizer: Any = None) -> Trainer:
    tables = [Table("item", 4, tier="disk", memory="20MB")]
    return Trainer(
        Tower(), tables, FEATURE, dense_optimizer=optimizer or (lambda p: torch.optim.SGD(p, 0.1)), storage=folder
    )


def test_a_cell_that_is_run_twice_finds_a_file_for_its_table(tmp_path: Path) -> None:
    digests = []
    for _ in range(3):
        trainer = make(tmp_path)  # while the one before still has its name
        trainer.fit([batch(0, 0, 1)])
        digests.append(trainer.digest())
    assert len(set(digests)) == 1
    trainer.close()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_constructor_that_fails_leaves_no_file_locked(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises((TrainingError, ValueError), match="which is not known"):
            Trainer(
                Tower(),
                [Table("item", 4, tier="disk"), Table("other", 4, tier="disk", memory=1)],
                [*FEATURE, Feature("other", "other", "sum")],
                dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
                storage=tmp_path,
                clustering="unknown",
            )
    blocked = tmp_path / "other.0.rows"
    blocked.mkdir()  # so that the second table cannot be opened
    with pytest.raises(TrainingError, match="other"):
        Trainer(
            Tower(),
            [Table("item", 4, tier="disk"), Table("other", 4, tier="disk")],
            [*FEATURE, Feature("other", "other", "sum")],
            dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
            storage=tmp_path,
        )
    blocked.rmdir()
    make(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_in_a_with_block_is_closed_at_its_end(tmp_path: Path) -> None:
    with make(tmp_path) as trainer:
        trainer.fit([batch(0, 0, 1)])
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    for call in (trainer.digest, lambda: trainer.fit([]), lambda: trainer.load("x")):
        with pytest.raises(ValueError, match="the trainer is closed; make a new one"):
            call()
    trainer.close()  # twice is fine


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def make_many(folder: str, how: str) -> list[tuple[int, int]]:
    counts = []
    for number in range(6):
        trainer = make(Path(folder))
        trainer.fit([batch(0, trainer.rank, trainer.world)])
        if how == "close":
            trainer.close()
        del trainer
        gc.collect()
        if number:  # the first starts what stays: pools of torch and of the system
            if counts:  # threads of the system take a moment to go
                until(
                    lambda: all(now <= first for now, first in zip(resources(), counts[0], strict=True)),
                    "they are gone",
                )
            counts.append(resources())
    assert not [t for t in threading.enumerate() if t.name.startswith("nestpipe-")]
    return counts


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts what /proc shows")
@pytest.mark.parametrize("how", ["close", "drop"])
def test_trainers_that_are_gone_leave_no_descriptors_and_no_threads(cluster: Cluster, tmp_path: Path, how: str) -> None:
    for counts in cluster.run(2, make_many, str(tmp_path), how):
        assert counts[-1][0] <= counts[0][0] and counts[-1][1] <= counts[0][1], counts

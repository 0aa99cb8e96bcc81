"""A disk that is really full: a small file system of its own, where this process may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Table, Trainer
from nestpipe.checkpoint import complete, problems, saving
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.store import rowfile
from tests.cluster import Cluster
from tests.waiting import Signpost

MEGABYTE = 1 << 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.out = nn.Linear(16, 1)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return self.out(rows["item"])[:, 0].square()


@contextlib.contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system of its own: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", 12 * MEGABYTE) as place:
        yield place


def fill(place: Path, *, leave: int) -> Path:
    """A file that takes all room but so much."""
    path, room = place / "others", os.statvfs(place)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - leave)
    return path


def make(storage: Path, **settings: Any) -> Trainer:
    table = Table("item", 16, **settings)
    return Trainer(
        Model(), [table], [Feature("item", "item", pooling="sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), storage=storage,
    )  # fmt: skip


def train(trainer: Trainer, *, keys: range, step: int = 1_000) -> None:
    """Each key once, so many in a step."""
    for start in range(keys.start, keys.stop, step):
        mine = np.array_split(np.arange(start, min(start + step, keys.stop)), trainer.world)[trainer.rank]
        trainer.step(Batch({"item": Jagged.from_lists([[int(key)] for key in mine])}))


def save_on_a_disk_that_fills_up(folder: Path, small: Path) -> dict[str, Any]:
    trainer = make(folder)
    checkpoints = trainer.checkpoints(small / "saved", keep=5)
    told: list[str] = []
    checkpoints._tell = told.append
    digests = {}
    for step in range(4):
        train(trainer, keys=range(20_000), step=20_000)
        digests[trainer.steps] = trainer.digest()
        others = fill(small, leave=MEGABYTE) if trainer.rank == 0 and step == 1 else None
        trainer.checkpoint(checkpoints)
        checkpoints.wait()
        if others is not None:
            others.unlink()
    loaded = {}
    for path in complete(small / "saved"):
        other = make(folder)
        other.load(path)
        loaded[other.steps] = other.digest()
        other.close()
    wrong = [problem for path in complete(small / "saved") for problem in problems(path)]
    names = [path.name for path in (small / "saved").iterdir()]
    trainer.close()
    return {"told": told, "digests": digests, "loaded": loaded, "wrong": wrong, "names": names}


def test_a_checkpoint_on_a_full_disk_is_given_up_and_the_others_are_sound(
    cluster: Cluster, tmp_path: Path, small_disk: Path
) -> None:
    first, second = cluster.run(2, save_on_a_disk_that_fills_up, tmp_path, small_disk)
    assert len(first["told"]) == 1 and not second["told"]
    assert "checkpoint of step 2 failed, training goes on (the newest is step-000000001)" in first["told"][0]
    assert "No space left on device" in first["told"][0] and "Make room in" in first["told"][0]
    assert sorted(first["names"]) == [folder_of(step) for step in (1, 3, 4)] and not first["wrong"]
    assert first["loaded"] == {step: first["digests"][step] for step in (1, 3, 4)}


def test_a_table_whose_disk_is_full_goes_on_without_the_checkpoint(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is overwritten while a checkpoint is written is kept beside the rows; new rows need the room more."""
    monkeypatch.setattr(rowfile, "EXTENT_BYTES", 1 << 16)
    save, trained = saving._save_table, Signpost()
    monkeypatch.setattr(saving, "_save_table", lambda path, **rest: (trained.wait_for(1), save(path, **rest)))
    on_disk, in_memory = make(small_disk, tier="disk", memory="6MB"), make(tmp_path / "memory")
    checkpoints = on_disk.checkpoints(tmp_path / "saved")
    told: list[str] = []
    checkpoints._tell = told.append
    for trainer in (on_disk, in_memory):
        train(trainer, keys=range(20_000))
    others = fill(small_disk, leave=MEGABYTE)
    on_disk.checkpoint(checkpoints)
    for trainer in (on_disk, in_memory):
        train(trainer, keys=range(25_000))
    trained.reach(1)
    checkpoints.wait()
    assert on_disk.digest() == in_memory.digest()
    assert (
        len(told) == 1
        and "rows of table 'item' that training changed meanwhile could not be kept" in told[0]
        and not complete(tmp_path / "saved")
    )
    others.unlink()
    on_disk.checkpoint(checkpoints)
    checkpoints.wait()
    loaded = make(tmp_path / "memory")
    loaded.load(complete(tmp_path / "saved")[0])
    assert loaded.digest() == on_disk.digest() and len(told) == 1
    on_disk.close()

"""`nestpipe bench checkpoint`: how long a checkpoint holds training up, and how fast it is written.

Two workers train without a break on a table in memory, then on one whose rows are mostly on disk; now and then a checkpoint
begins, full or of what has changed. The stall is what the gap between two steps was longer by than the median gap: emptying and
filling the pipeline, and the fork. Steps while it is written cost more too (pages are copied when they are first changed, and the
disk takes part of the cores): that is told beside it. The rate is compared with that of writing the same bytes to one file in the
same folder, with fsync, by the same workers at once; the two take turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.bench.computing import Layers
from nestpipe.bench.contestants import DIM, Law, load_everything, pool_of
from nestpipe.bench.figures import largest
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.checkpoint import manifest as manifests
from nestpipe.engine.context import StepResult
from nestpipe.kernels.keys import owners_of, shards
from nestpipe.optim import RowwiseAdagrad
from nestpipe.sections import Section, Table, shown
from nestpipe.tables import Feature
from nestpipe.tables import Table as Rows
from nestpipe.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int = 2_000_000
    memory: str = "250MB"  # of the table that is on disk
    samples: int = 512
    length: int = 20
    layers: int = 8
    schedule: str = "nested"
    micro_batches: int = 4
    rounds: int = 3  # each with one full checkpoint and one of changes
    quiet: int = 20  # steps before a checkpoint, at least
    most: int = 2_000  # steps to wait for one


TIERS = ("memory", "disk")
QUICK = Size(rows=20_000, memory="16MB", samples=64, length=10, layers=1, rounds=1, quiet=6)


def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else Size()
    folder = tempfile.mkdtemp(prefix="nestpipe-bench-", dir=".")
    try:
        rounds = {tier: run_workers(_measure, size, folder, tier, workers=2, threads=1) for tier in TIERS}
        return {"size": dataclasses.asdict(size), "rounds": rounds}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(size: Size, folder: str, tier: str) -> list[dict[str, Any]]:
    load_everything()
    pool = pool_of(Law(1.05, items=size.rows), size.samples, size.length)
    memory = size.memory if tier == "disk" else None
    table = Rows("item", DIM, optimizer=RowwiseAdagrad(lr=0.01), tier=tier, memory=memory)
    trainer = Trainer(
        Layers(size.layers),
        [table],
        [Feature("history", "item")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
        schedule=size.schedule,
        micro_batches=size.micro_batches,
        storage=Path(folder) / "storage",
    )
    _fill(trainer, size.rows)
    saved = trainer.checkpoints(Path(folder) / tier, keep=2, full_every=2)
    rounds = []
    for number in range(size.rounds):
        for kind in ("full", "changes"):
            tell(f"checkpoint, table in {tier}: round {number + 1} of {size.rounds}, {kind}")
            figures = _train_through(trainer, saved, pool, size)
            figures["disk_mb_s"] = _disk_rate(Path(folder), figures["bytes"])
            rounds.append({"kind": kind, **figures})
    trainer.close()
    return rounds


def _fill(trainer: Trainer, rows: int) -> None:
    (store,) = trainer.stores
    for start in range(0, rows, 1 << 16):
        keys = np.arange(start, min(start + (1 << 16), rows))
        keys = keys[owners_of(shards(keys), store.owners) == trainer.rank]
        store.put(keys, np.full((len(keys), store.record_words), 0.1, np.float32))


def _train_through(trainer: Trainer, saved: Any, pool: Any, size: Size) -> dict[str, float]:
    """Trains for a while, begins a checkpoint, trains until it is there."""
    ends: list[float] = []
    begun: list[int] = []  # after so many steps
    path: list[Path] = []
    complete: list[float] = []

    def on_step(result: StepResult) -> None:
        ends.append(time.perf_counter())
        if len(ends) == size.quiet:
            path.append(saved.folder / manifests.folder_of(trainer.steps))
            trainer.checkpoint(saved)
            begun.append(len(ends))
        elif path and not complete and path[0].exists():
            complete.append(time.perf_counter())
        if complete and len(ends) > size.quiet + 5:
            trainer.stop()

    # The pipeline is emptied where the checkpoint begins, and nowhere else.
    pause = trainer.steps + size.quiet
    batches = (pool[i % len(pool)] for i in range(size.most))
    trainer.fit(batches, on_step=on_step, pause_every=pause)
    saved.wait()
    gaps = np.diff(ends) * 1e3
    at = begun[0] - 1
    written = (complete[0] if complete else time.perf_counter()) - ends[at]
    during = gaps[at + 1 : at + 1 + max(1, sum(end < ends[at] + written for end in ends[at + 1 :]) - 1)]
    normal = statistics.median(gaps[2 : at - 1])
    mine = {
        "step_ms": normal,
        "stall_ms": float(gaps[at - 1] + gaps[at] - 2 * normal),
        "fork_ms": saved.stalls[-1] * 1e3,
        "during_ms": float(np.median(during)) if len(during) else normal,
        "seconds": written,
    }
    return {**largest(mine), "bytes": float(manifests.read(path[0]).num_bytes)}


def _disk_rate(folder: Path, num_bytes: float) -> float:
    """MB/s of all workers together, each writing its share to a file of its own."""
    block = os.urandom(1 << 20)
    path = folder / f"plain-{dist.get_rank()}"
    dist.barrier()
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, int(num_bytes / dist.get_world_size()) >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    seconds = time.perf_counter() - begin
    path.unlink()
    return num_bytes / 1e6 / seconds


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    return list(_sections(results))


def _sections(results: dict[str, Any]) -> Iterator[Section]:
    size = results["size"]
    rows = []
    for tier, kind in itertools.product(TIERS, ("full", "changes")):
        rounds = [figures for figures in results["rounds"][tier] if figures["kind"] == kind]
        median = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0] if key != "kind"}
        rate = statistics.median(figures["bytes"] / 1e6 / figures["seconds"] for figures in rounds)
        ratio = statistics.median(
            figures["bytes"] / 1e6 / figures["seconds"] / figures["disk_mb_s"] for figures in rounds
        )
        stall = statistics.median(figures["stall_ms"] / figures["step_ms"] for figures in rounds)
        rows.append(
            (
                tier,
                kind,
                shown("{:,.1f}", median["bytes"] / 1e6),
                shown("{:.2f}", median["seconds"]),
                shown("{:,.0f}", rate),
                shown("{:,.0f}", median["disk_mb_s"]),
                shown("{:.2f}", ratio),
                shown("{:.1f}", median["step_ms"]),
                shown("{:.1f}", median["stall_ms"]),
                shown("{:.2f}", stall),
                shown("{:.1f}", median["fork_ms"]),
                shown("{:.2f}", median["during_ms"] / median["step_ms"]),
            )
        )
    columns = ("table", "checkpoint", "MB", "seconds", "MB/s", "the disk alone MB/s", "ratio", "step ms", "stall ms",
               "stall in steps", "of it the fork ms", "steps while it is written, of others")  # fmt: skip
    note = (
        f"2 workers, {size['rows']:,} rows of {DIM} floats in memory, or on disk with memory = {size['memory']!r}; "
        f"{size['schedule']}, medians of {size['rounds']} rounds. The stall is by how much longer the two gaps between steps "
        "around the beginning were than two others; checksums and fsync are in the rate. Training goes on meanwhile, on the "
        "same cores."
    )
    yield Table("Checkpoints while training goes on", columns, rows, note)

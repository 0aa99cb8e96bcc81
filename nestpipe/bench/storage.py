"""`nestpipe bench storage`: the disk tier beside embedded key-value stores, and a table of 20 GB trained in 2 GB.

The second part bears every row by training on it, so that the file is as large as it says, then trains on uniform keys.
Memory is what the worker's resident set grew by at its peak, from just before the trainer was made: key index, rows in
memory, the two buffers, bounce buffers, batches on their way, exchange buffers, stacks of threads, and what malloc keeps.
A small trainer runs and ends before that, so that compiled kernels and torch's own memory are not in it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from nestpipe import sections as section
from nestpipe.batch import Batch, Jagged, Output
from nestpipe.bench import memory
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.optim import RowwiseAdagrad
from nestpipe.sections import Section, shown, shown_list
from nestpipe.sizes import num_bytes
from nestpipe.tables import Feature, Table, Uniform
from nestpipe.trainer import Trainer

HERE = Path(__file__).parent
ENVIRONMENT = Path(
    os.environ.get("NESTPIPE_STORAGE", ".venv-storage")
)  # the others are never installed beside nestpipe
PACKAGES = ("lmdb==3.0.0", "rocksdict==0.3.29")
BAG = 50  # keys of a sample


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int
    memory: str
    new_keys: int  # of a step, over all workers, while rows are born
    keys: int  # of a step after that, over all workers
    steps: int


FULL = Size(rows=73_000_000, memory="2GB", new_keys=50_000, keys=8_200, steps=200)
QUICK = Size(rows=400_000, memory="64MB", new_keys=10_000, keys=4_000, steps=10)


def run(*, quick: bool) -> dict[str, Any]:
    tell("storage: key-value stores")
    return {"key_value": _compare(quick=quick), "large": [_large(workers, quick=quick) for workers in (1, 2)]}


# -- the disk tier and key-value stores --------------------------------------------------------------------------------


def _compare(*, quick: bool) -> dict[str, Any]:
    """In a process of its own that can import the others; in quick mode without those that are not installed."""
    folders = [str(HERE.parents[1])]
    if not quick or (ENVIRONMENT / "ready").exists():
        folders.append(str(environment()))
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "nestpipe.bench.key_value", "--json", str(result)] + ["--quick"] * quick
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        # One thread by the environment: torch.set_num_threads does not bind the threads that other threads start.
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        finished = subprocess.run(command, env={**os.environ, **settings}, check=False)
        if finished.returncode:
            raise ValueError("the comparison with key-value stores failed; its own message stands above")
        return json.loads(result.read_text())


def environment() -> Path:
    """The packages of an environment that has the other stores; made on first use."""
    ready = ENVIRONMENT / "ready"
    if not ready.exists():
        print(f"installing {' and '.join(PACKAGES)} into {ENVIRONMENT} (once)", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        ready.touch()
    (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    return packages.resolve()


# -- a table larger than memory ----------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        return Output((self.last(rows["keys"])[:, 0] - batch.labels) ** 2)


def _large(workers: int, *, quick: bool) -> dict[str, Any]:
    tell(f"storage: a table larger than memory, {workers} workers")
    folder = tempfile.mkdtemp(prefix="nestpipe-bench-", dir=".")
    try:
        return run_workers(_train, dataclasses.asdict(QUICK if quick else FULL), folder, workers=workers)
    finally:
        shutil.rmtree(folder)


def _train(size_values: dict[str, Any], folder: str) -> dict[str, Any]:
    size = Size(**size_values)
    _warm_up(Path(folder))
    gc.collect()
    memory.forget_peak()
    time.sleep(0.1)
    before = memory.resident()
    trainer = _trainer(size.memory, Path(folder))
    try:
        born = trainer.fit(_new_keys(trainer, size))
        peaks = [memory.highest() - before]
        at_birth = trainer.table_stats()["item"]
        # Untimed until all rows of the beginning have left memory: these are neighbours in the file, unlike later ones.
        trainer.fit(_uniform(trainer, size, seed=0), steps=int(1.2 * at_birth.hot_rows / size.keys))
        reading = trainer.table_stats()["item"]
        trained = trainer.fit(_uniform(trainer, size, seed=1), steps=size.steps)
        peaks.append(memory.highest() - before)
        stats = trainer.table_stats()["item"]
    finally:
        trainer.close()
    part = num_bytes(size.memory) // trainer.world
    worst = torch.tensor(peaks, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    rows_read, rows_hit = stats.reads - reading.reads, stats.hits - reading.hits
    return {
        "workers": trainer.world,
        "budget_bytes": part,
        "rows": stats.rows,
        "file_bytes": stats.file_bytes,
        "hot_rows": [at_birth.hot_rows, stats.hot_rows],
        "own_count_bytes": stats.bytes,
        "peak_bytes": worst.tolist(),
        "peak_over_budget": worst.max().item() / part,
        "birth": {"seconds": born.seconds, "rows_per_second": stats.rows / born.seconds},
        "training": {
            "steps_per_second": trained.steps / trained.seconds,
            "rows_per_second": (rows_read + rows_hit) / trained.seconds,
            "read_from_disk": rows_read / (rows_read + rows_hit),
        },
    }


def _trainer(budget: str, folder: Path) -> Trainer:
    init = Uniform()  # a twentieth of the CPU time of Normal: this is about the disk
    table = Table("item", 64, optimizer=RowwiseAdagrad(lr=0.01), init=init, tier="disk", memory=budget)
    return Trainer(
        Linear(),
        [table],
        [Feature("keys", "item", "sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
        schedule="dbp",
        storage=folder,
    )


def _warm_up(folder: Path) -> None:
    size = dataclasses.replace(QUICK, rows=60_000, memory="24MB", new_keys=2_000, keys=1_000)
    trainer = _trainer(size.memory, folder / "warm-up")
    trainer.fit(_new_keys(trainer, size))
    trainer.fit(_uniform(trainer, size, seed=0), steps=5)
    trainer.close()


def _new_keys(trainer: Trainer, size: Size) -> Iterator[Batch]:
    for start in range(0, size.rows, size.new_keys):
        end = min(start + size.new_keys, size.rows)
        yield _batch(np.arange(start, end)[trainer.rank :: trainer.world])


def _uniform(trainer: Trainer, size: Size, *, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng([seed, trainer.rank])
    while True:
        yield _batch(rng.integers(0, size.rows, size.keys // trainer.world))


def _batch(keys: np.ndarray) -> Batch:
    samples = -(-len(keys) // BAG)
    lengths = torch.full((samples,), BAG)
    lengths[-1] = len(keys) - BAG * (samples - 1)
    return Batch({"keys": Jagged.from_lengths(torch.from_numpy(keys), lengths)}, {}, torch.ones(samples))


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    size = results["key_value"]["size"]
    stores = section.Table(
        "The disk tier beside key-value stores",
        ("store", "read rows/s", "write-back rows/s", "both rows/s", "CPU ms per batch", "compute beside it"),
        [
            (
                name,
                shown("{:,.0f}", figures["read"]),
                shown("{:,.0f}", figures["write"]),
                shown("{:,.0f}", figures["both"]),
                shown("{:.0f}", figures["cpu_ms"]),
                shown("{:.0%}", figures["compute"]),
            )
            for name, figures in results["key_value"]["stores"].items()
        ],
        f"{size['rows']:,} rows x 64 with row-wise Adagrad state, {size['memory']} of memory each, batches of {size['keys']:,} "
        "uniform keys.",
    )
    columns = (
        "workers", "rows", "file GB", "budget MB a worker", "peak MB, rows born / trained", "peak / budget", "rows born/s",
        "steps/s", "rows/s", "read from disk",
    )  # fmt: skip
    return [stores, section.Table("A table larger than memory", columns, list(map(_large_row, results["large"])))]


def _large_row(table: dict[str, Any]) -> tuple[str, ...]:
    training = table["training"]
    return (
        shown("{}", table["workers"]),
        shown("{:,}", table["rows"]),
        shown("{:.2f}", table["file_bytes"] / 1e9),
        shown("{:,.0f}", table["budget_bytes"] / 1e6),
        shown_list("{:,.0f}", [peak / 1e6 for peak in table["peak_bytes"]]),
        shown("{:.3f}", table["peak_over_budget"]),
        shown("{:,.0f}", table["birth"]["rows_per_second"]),
        shown("{:.2f}", training["steps_per_second"]),
        shown("{:,.0f}", training["rows_per_second"]),
        shown("{:.0%}", training["read_from_disk"]),
    )

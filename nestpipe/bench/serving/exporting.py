"""Export of a large table: time against a plain copy of the same bytes, a delta against the rows that changed;
predictions equal to the trainer's; and how long a new process takes to its first answer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.bench.progress import tell
from nestpipe.bench.serving.environment import environment
from nestpipe.bench.workers import run_workers
from nestpipe.export import export_bundle
from nestpipe.optim import RowwiseAdagrad
from nestpipe.sections import Section, Table, shown
from nestpipe.serve.bundle import load_bundle
from nestpipe.tables import Feature
from nestpipe.tables import Table as Rows
from nestpipe.trainer import Trainer

DIM = 64
BLOCK = 1 << 16
BAG = 10  # keys of a sample
FIRST_ANSWER = """
import sys, numpy, torch, nestpipe
from nestpipe.bench.serving.exporting import Sum, batch_of
bundle = nestpipe.load_bundle(sys.argv[1], model=Sum())
print(bundle.predict(batch_of(0)).sum().item())
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """rows: of the table, 256 bytes each. changed: share of them between the two exports."""

    rows: int = 19_600_000
    changed: float = 0.01


QUICK = Size(rows=200_000)


class Sum(nn.Module):
    """As small as a model can be."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(DIM, 1)
        nn.init.constant_(self.last.weight, 1e-3)  # small: a sigmoid of exactly 1 would leave all rows as they are

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        predictions = torch.sigmoid(self.last(rows["keys"])[:, 0])
        assert isinstance(batch.labels, Tensor)
        return Output((predictions - batch.labels) ** 2, predictions=predictions)


class Seen:
    """A metric that keeps the predictions it was given."""

    def __init__(self) -> None:
        self.predictions: list[Tensor] = []

    def reset(self) -> None:
        self.predictions.clear()

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.predictions.append(predictions.clone())

    def compute(self, group: Any = None) -> float:
        return 0.0


def batch_of(seed: int, samples: int = 256, keys: int = 10_000) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return _bags(torch.randint(0, keys, (samples * BAG,), generator=draw))


def _bags(keys: Tensor) -> Batch:
    """Samples of so many keys, the last one of those that are left."""
    samples = -(-len(keys) // BAG)
    lengths = torch.full((samples,), BAG)
    lengths[-1] = len(keys) - BAG * (samples - 1)
    return Batch({"keys": Jagged.from_lengths(keys, lengths)}, {}, torch.ones(samples))


def measure(size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-", dir=".") as name:
        folder = Path(name)
        tell(f"serving: export of {size.rows:,} rows")
        run_workers(train, size, name, workers=1, threads=2, timeout=600)
        full, full_seconds = exported(folder / "first", folder / "bundle")
        delta, delta_seconds = exported(folder / "second", folder / "delta", since=folder / "bundle")
        copied = _copy_seconds(folder / "bundle", folder / "copy")
        tell("serving: process start to first answer")
        return {
            "rows": size.rows,
            "changed": size.changed,
            "bytes": full,
            "seconds": full_seconds,
            "copy_seconds": copied,
            "delta_bytes": delta,
            "delta_seconds": delta_seconds,
            "predictions": 4 * 256,
            "different": different(folder),
            "first_answer_seconds": _first_answer(folder / "delta"),
        }


def train(size: Size, name: str) -> None:
    """Checkpoints before and after some rows change, and what the trainer predicts then. (Rows are put into the store:
    training on each of them would take hours.)"""
    folder = Path(name)
    trainer = Trainer(
        Sum(),
        [Rows("item", DIM, optimizer=RowwiseAdagrad(lr=0.05))],
        [Feature("keys", "item", "sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2),
        schedule="serial",
    )
    (store,) = trainer.stores
    draw = np.random.default_rng(0)
    for start in range(0, size.rows, BLOCK):
        keys = np.arange(start, min(start + BLOCK, size.rows))
        store.put(keys, draw.random((len(keys), store.record_words), np.float32))
    trainer.save(folder / "first")
    changed = torch.from_numpy(draw.choice(size.rows, int(size.changed * size.rows), replace=False))
    trainer.fit([_bags(keys) for keys in changed.split(BLOCK)])
    seen = Seen()
    trainer.evaluate([batch_of(seed) for seed in range(4)], {"seen": seen})
    np.save(folder / "predictions.npy", torch.cat(seen.predictions).numpy())
    trainer.save(folder / "second")
    trainer.close()


def exported(source: Path, out: Path, *, since: Path | None = None) -> tuple[int, float]:
    """Bytes and seconds."""
    begin = time.perf_counter()
    made = export_bundle(source, out, since=since)
    return made.num_bytes, time.perf_counter() - begin


def _copy_seconds(source: Path, out: Path) -> float:
    """Of a plain copy of all files, until it is on the disk as an export is."""
    begin = time.perf_counter()
    shutil.copytree(source, out)
    for path in out.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begin


def different(folder: Path) -> int:
    """Predictions of the delta that are not those of the trainer, to the bit."""
    bundle = load_bundle(folder / "delta", model=Sum())
    ours = np.concatenate([bundle.predict(batch_of(seed)).numpy() for seed in range(4)])
    return int((ours.view(np.uint32) != np.load(folder / "predictions.npy").view(np.uint32)).sum())


def _first_answer(bundle: Path) -> float:
    """Seconds of a process that starts, loads and predicts: its imports are most of it."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", FIRST_ANSWER, str(bundle)], env=environment(), stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - begin


def sections(results: Mapping[str, Any]) -> list[Section]:
    rows = int(results["rows"])
    row = (
        shown("{:,}", rows),
        shown("{:,.0f}", results["bytes"] / 1e6),
        shown("{:.1f}", results["seconds"]),
        shown("{:.1f}", results["copy_seconds"]),
        shown("{:.2f}x", results["seconds"] / results["copy_seconds"]),
        shown("{:.1%}", results["changed"]),
        shown("{:,.1f}", results["delta_bytes"] / 1e6),
        shown("{:.2%}", results["delta_bytes"] / results["bytes"]),
        shown("{:.1f}", results["delta_seconds"]),
        shown("{} of {:,}", results["different"], results["predictions"]),
        shown("{:.1f}", results["first_answer_seconds"]),
    )
    columns = ("rows", "MB", "export s", "plain copy s", "over copy", "rows changed", "delta MB", "of the bundle", "delta s",
               "predictions that differ from the trainer's", "process start to first answer s")  # fmt: skip
    note = (
        f"Rows of {DIM} floats. Export reads the checkpoint, writes rows and index, checks every byte of both and has "
        f"them on the disk "
        "(fsync); the copy is of the finished bundle, with fsync. The first answer is that of a new Python process: "
        "imports, bundle, "
        "one batch of 256 samples."
    )
    return [Table("Export of a large table", columns, [row], note)]

"""`nestpipe bench overlap`: how much of the lookup from disk each schedule leaves exposed. Real disk, real compute.

Two workers train on a table that lies on disk, read past the page cache (O_DIRECT), with few of its rows in memory; keys
are uniform, so that nearly every lookup goes to the disk. The model is made so deep that compute is longer than the lookup
(first workload) or shorter (second); serial and dbp then run in alternating blocks in the same processes, and everything
is taken from the trace of their steady state.

*Lookup* is all operations of that kind (schedule/ops.py); nearly all of its time is RETRIEVE and WRITEBACK. In a serial run
all of it is exposed. Under dbp it is exposed while its lanes are busy and the compute lane runs nothing, and during SYNC, which
is on the compute lane.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from nestpipe import sections as section
from nestpipe.batch import Batch, Jagged, Output
from nestpipe.bench.contestants import Contestant, alternate, load_everything
from nestpipe.bench.figures import COLUMNS, EXPLAINED, Rounds, bars, cells, verdict
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.kernels.keys import owners_of, shards
from nestpipe.optim import RowwiseAdagrad
from nestpipe.schedule.ops import LOOKUP, SYNC, of_kind
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, shown
from nestpipe.store.disk import DiskStore
from nestpipe.tables import Feature, Table
from nestpipe.trace import RankTrace, summary
from nestpipe.trace.figures import Figures
from nestpipe.trainer import Trainer

DIM, WIDTH = 64, 256
SETTINGS = (Setting("serial"), Setting("dbp"))
WORKLOADS = {"compute longer than lookup": 2.0, "lookup longer than compute": 0.1}  # compute, of a serial step's lookup


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int
    memory: str
    samples: int
    keys: int  # per sample
    rounds: int
    steps: int  # of a block


FULL = Size(rows=2_000_000, memory="96MB", samples=256, keys=16, rounds=5, steps=30)
QUICK = Size(rows=100_000, memory="24MB", samples=32, keys=8, rounds=2, steps=14)


def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    folder = tempfile.mkdtemp(prefix="nestpipe-bench-", dir=".")
    try:
        return run_workers(_measure, size, folder, workers=2)
    finally:
        shutil.rmtree(folder)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(DIM, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        x = self.first(rows["keys"])
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / len(self.layers)  # finite however many it takes
        return Output((self.last(x)[:, 0] - batch.labels) ** 2)


class OnDisk(Contestant):
    """One over a table on disk that is full from the start, trained on uniform keys."""

    def __init__(self, setting: Setting, size: Size, layers: int, folder: Path) -> None:
        self.size = size
        rng = np.random.default_rng(dist.get_rank())

        def make() -> Trainer:
            trainer = Trainer(
                Deep(layers),
                [Table("item", DIM, optimizer=RowwiseAdagrad(lr=0.01), tier="disk", memory=size.memory)],
                [Feature("keys", "item", "sum")],
                dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
                schedule=setting.schedule,
                storage=folder / f"{setting.schedule}-{layers}",
                record=True,
            )
            _fill(trainer, size.rows)
            return trainer

        def batches(steps: int) -> Iterator[Batch]:
            for _ in range(steps):
                keys = torch.from_numpy(rng.integers(0, size.rows, size.samples * size.keys))
                lengths = torch.full((size.samples,), size.keys)
                yield Batch({"keys": Jagged.from_lengths(keys, lengths)}, {}, torch.randn(size.samples))

        super().__init__(setting, make, batches, warm_up=size.steps)

    def figures(self, trace: RankTrace) -> Figures:
        rank = summary([trace])[0]
        return {
            **super().figures(trace),
            "sync": sum(time.ms for time in rank.ops if time.op == SYNC),
            "store lane": sum(lane.busy_ms for lane in rank.lanes if lane.lane == "store"),
        }


def _fill(trainer: Trainer, rows: int) -> None:
    (store,) = trainer.stores
    assert isinstance(store, DiskStore)
    for start in range(0, rows, 1 << 16):
        keys = np.arange(start, min(start + (1 << 16), rows))
        keys = keys[owners_of(shards(keys), store.owners) == trainer.rank]
        values = np.random.default_rng(start).standard_normal((len(keys), store.record_words)).astype(np.float32) * 0.1
        values[:, -1] = 1.0  # the optimizer's sum of squares
        store.put(keys, values)


def _measure(size: Size, folder: str) -> dict[str, Any]:
    load_everything()
    results = {}
    for name, layers in _depths(size, Path(folder)).items():
        contestants = [OnDisk(setting, size, layers, Path(folder)) for setting in SETTINGS]
        rounds = alternate(contestants, rounds=size.rounds, steps=size.steps, what=f"overlap: {name}")
        results[name] = {"layers": layers, "rows": size.rows, **_verdict(rounds), **_disk(contestants[-1])}
        for contestant in contestants:
            contestant.trainer.close()
    return results


def _depths(size: Size, folder: Path) -> dict[str, int]:
    """Layers that make compute as long as the workloads say; from figures of all ranks, so the same on all. A layer takes at
    least a fortieth of a step with nine: where others use the machine as well, nine may have seemed no longer than one."""
    tell("overlap: how deep a model must be")
    few, many = (OnDisk(SETTINGS[0], size, layers, folder) for layers in (1, 9))
    a, b = (contestant.block(size.steps) for contestant in (few, many))
    for contestant in (few, many):
        contestant.trainer.close()
    per_layer = max(b["compute"] / 40, (b["compute"] - a["compute"]) / 8)
    return {name: max(1, round(share * a["lookup"] / per_layer)) for name, share in WORKLOADS.items()}


def _verdict(rounds: Rounds) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round."""
    pairs = list(zip(rounds["serial"], rounds["dbp"], strict=True))
    hidden = [1 - dbp["exposed lookup"] / serial["lookup"] for serial, dbp in pairs]
    return {
        "hidden": statistics.median(hidden),
        "hidden_rounds": hidden,
        "step_over_store_lane": statistics.median(dbp["step"] / dbp["store lane"] for _, dbp in pairs),
        "ms": verdict(rounds),
        "rounds": rounds,
    }


def _disk(contestant: Contestant) -> dict[str, Any]:
    (store,) = contestant.trainer.stores
    assert isinstance(store, DiskStore)
    stats = contestant.trainer.table_stats()["item"]
    return {
        "direct": store.file.direct,
        "file_mb": stats.file_bytes / 1e6,
        "read_from_disk": stats.reads / max(1, stats.reads + stats.hits),
    }


def sections(results: dict[str, Any]) -> list[Section]:
    columns = (
        "workload", "schedule", *COLUMNS, "compute lane ms", "store lane ms", "lookup ms", "lookup hidden",
        "step / longest lane", "step / store lane",
    )  # fmt: skip
    rows = []
    for name, workload in results.items():
        for schedule, ms in workload["ms"].items():
            serial = schedule == "serial"
            rows.append(
                (
                    name,
                    schedule,
                    *cells(ms),
                    shown("{:.1f}", ms["compute lane"]),
                    shown("{:.1f}", ms["store lane"]),
                    shown("{:.1f}", ms["lookup"]),
                    shown("0%", 0.0) if serial else shown("{:.1%}", workload["hidden"]),
                    shown("{:.3f}", ms["step over longest lane"]),
                    "" if serial else shown("{:.3f}", workload["step_over_store_lane"]),
                )
            )
    told = [
        f"{name}: {workload['layers']} layers, {workload['rows']:,} rows in a file of {workload['file_mb']:,.0f} MB, "
        f"{workload['read_from_disk']:.0%} of rows read from it{'' if workload['direct'] else ' (through the page cache)'}"
        for name, workload in results.items()
    ]
    note = (
        f"2 workers, real disk, real compute on the CPU. {'; '.join(told)}. Lookup is {', '.join(of_kind(LOOKUP))}; "
        f"with dbp the paper hid 98.7% of it at 1,536 workers. {EXPLAINED}"
    )
    charts = [
        bars(f"A step on disk: {name}", workload["ms"], "Real disk, real compute.")
        for name, workload in results.items()
    ]
    return [section.Table("Lookups from disk, hidden", columns, rows, note), *charts]

"""`nestpipe bench overlap`: how much of the lookup from disk each schedule leaves exposed. Real disk, real compute.

Two workers train on a table that lies on disk, read past the page cache (O_DIRECT), with few of its rows in memory; keys
are uniform, so that nearly every lookup goes to the disk. The model is made so deep that compute is longer than the lookup
(first workload) or shorter (second); serial and dbp then run in alternating blocks in the same processes, and everything
is taken from the trace of their steady state.

*Lookup* is RETRIEVE, WRITEBACK and SYNC. In a serial run all of it is exposed. Under dbp it is exposed while the store
lane is busy and the compute lane runs nothing, and during SYNC, which is on the compute lane.
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

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.bench.workers import run_workers
from nestpipe.kernels.keys import NUM_SHARDS, shards
from nestpipe.optim import RowwiseAdagrad
from nestpipe.store.disk import DiskStore
from nestpipe.tables import Feature, Table
from nestpipe.trace import RankSummary, summary
from nestpipe.trainer import Trainer

LOOKUP = ("RETRIEVE", "WRITEBACK", "SYNC")
WIDTH = 256


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
        return run_workers(_measure, dataclasses.asdict(size), folder, workers=2)
    finally:
        shutil.rmtree(folder)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        x = self.first(rows["keys"])
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.1
        return Output((self.last(x)[:, 0] - batch.labels) ** 2)


class Contestant:
    """A trainer over a table that is full from the start."""

    def __init__(self, schedule: str, size: Size, layers: int, folder: Path) -> None:
        table = Table("item", 64, optimizer=RowwiseAdagrad(lr=0.01), tier="disk", memory=size.memory)
        features = [Feature("keys", "item", "sum")]
        self.size = size
        self.trainer = Trainer(
            Deep(layers),
            [table],
            features,
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            schedule=schedule,
            storage=folder / f"{schedule}-{layers}",
            record=True,
        )
        self.store = self.trainer._ops.stores[0]
        assert isinstance(self.store, DiskStore)
        self._fill(self.store)
        self._rng = np.random.default_rng(self.trainer.rank)

    def _fill(self, store: DiskStore) -> None:
        for start in range(0, self.size.rows, 1 << 16):
            keys = np.arange(start, min(start + (1 << 16), self.size.rows))
            keys = keys[shards(keys) * self.trainer.world // NUM_SHARDS == self.trainer.rank]
            rows = (
                np.random.default_rng(start).standard_normal((len(keys), store.record_words)).astype(np.float32) * 0.1
            )
            rows[:, -1] = 1.0  # the optimizer's sum of squares
            store.put(keys, rows)

    def batches(self, steps: int) -> Iterator[Batch]:
        size = self.size
        for _ in range(steps):
            keys = torch.from_numpy(self._rng.integers(0, size.rows, size.samples * size.keys))
            lengths = torch.full((size.samples,), size.keys)
            yield Batch({"keys": Jagged.from_lengths(keys, lengths)}, {}, torch.randn(size.samples))

    def block(self) -> RankSummary:
        """One block of steps; what its middle looked like on this rank."""
        self.trainer.fit(self.batches(self.size.steps), steps=self.size.steps)
        trace = self.trainer._engine.recorded(rank=self.trainer.rank, world=self.trainer.world, clear=True)
        return summary([trace])[0]


def figures(one: RankSummary) -> dict[str, float]:
    """Milliseconds per step of this rank."""
    ops = {time.op: time for time in one.ops}
    lookup = sum(ops[name].ms for name in LOOKUP)
    exposed = sum(ops[name].exposed_ms for name in LOOKUP)
    lanes = {lane.lane: lane.busy_ms for lane in one.lanes}
    return {
        "step": one.mean_step_ms,
        "lookup": lookup,
        "exposed": exposed,
        "sync": ops["SYNC"].ms,
        "compute": ops["FWD"].ms + ops["BWD"].ms,
        "busiest": max(lanes.values()),
        **{f"lane {lane}": busy for lane, busy in lanes.items()},
    }


def _measure(size_values: dict[str, Any], folder: str) -> dict[str, Any]:
    size = Size(**size_values)
    layers = _layers(size, Path(folder))
    results = {}
    for name, depth in (("compute longer than lookup", layers[0]), ("lookup longer than compute", layers[1])):
        contestants = {s: Contestant(s, size, depth, Path(folder)) for s in ("serial", "dbp")}
        rounds: dict[str, list[dict[str, float]]] = {s: [] for s in contestants}
        for contestant in contestants.values():
            contestant.block()  # kernels compiled, hot sets filled
        for turn in range(size.rounds):
            order = list(contestants) if turn % 2 == 0 else list(reversed(contestants))
            for schedule in order:
                dist.barrier()
                rounds[schedule].append(_worst(figures(contestants[schedule].block())))
        results[name] = {"layers": depth, "rows": size.rows, **_verdict(rounds), **_disk(contestants)}
        for contestant in contestants.values():
            contestant.trainer.close()
    return results


def _layers(size: Size, folder: Path) -> tuple[int, int]:
    """Depths that make compute 2 times, and a tenth of, the lookup of a serial step."""
    few, many = (Contestant("serial", size, layers, folder) for layers in (1, 9))
    for contestant in (few, many):
        contestant.block()
    a, b = (_worst(figures(contestant.block())) for contestant in (few, many))
    for contestant in (few, many):
        contestant.trainer.close()
    per_layer = max(1e-3, (b["compute"] - a["compute"]) / 8)
    # Computed from figures of all ranks, so it is the same on all.
    return max(2, round(2.0 * a["lookup"] / per_layer)), max(1, round(0.1 * a["lookup"] / per_layer))


def _worst(mine: dict[str, float]) -> dict[str, float]:
    """The largest over ranks, figure by figure."""
    values = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(mine, values.tolist(), strict=True))


def _verdict(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round."""
    pairs = list(zip(rounds["serial"], rounds["dbp"], strict=True))
    hidden = [1 - dbp["exposed"] / serial["lookup"] for serial, dbp in pairs]
    medians = {s: {key: statistics.median(one[key] for one in many) for key in many[0]} for s, many in rounds.items()}
    return {
        "hidden": statistics.median(hidden),
        "hidden_rounds": hidden,
        "step_over_longest_lane": statistics.median(dbp["step"] / dbp["busiest"] for _, dbp in pairs),
        "step_over_store_lane": statistics.median(dbp["step"] / dbp["lane store"] for _, dbp in pairs),
        "speedup": statistics.median(serial["step"] / dbp["step"] for serial, dbp in pairs),
        "ms": medians,
    }


def _disk(contestants: dict[str, Contestant]) -> dict[str, Any]:
    stats = contestants["dbp"].trainer.table_stats()["item"]
    file = contestants["dbp"].store.file  # type: ignore[union-attr]
    return {
        "direct": file.direct,
        "file_mb": stats.file_bytes / 1e6,
        "read_from_disk": stats.reads / max(1, stats.reads + stats.hits),
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | schedule | step ms | compute lane | store lane | lookup ms | exposed ms | hidden | step / longest lane |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results.items():
        for schedule, ms in one["ms"].items():
            hidden, ratio = "0%", ""
            if schedule == "dbp":
                hidden, ratio = f"{one['hidden']:.1%}", f"{one['step_over_longest_lane']:.3f}"
            lines.append(
                f"| {name} | {schedule} | {ms['step']:.1f} | {ms['lane compute']:.1f} | {ms.get('lane store', 0):.1f} "
                f"| {ms['lookup']:.1f} | {ms['exposed']:.1f} | {hidden} | {ratio} |"
            )
        lines.append(
            f"| | dbp / serial | {one['speedup']:.2f}x faster | | | | | {one['read_from_disk']:.0%} of rows read from disk "
            f"| store lane: {one['step_over_store_lane']:.3f} |"
        )
    return "\n".join(lines)

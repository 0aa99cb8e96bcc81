"""nestpipe and TorchRec on the same batches, from the same rows, in the same processes, in turn.

Runs in the peers' environment: python -m nestpipe.bench.peers.compare --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.batch import Batch
from nestpipe.bench.alternate import alternate
from nestpipe.bench.peers.dense_only import DenseOnly
from nestpipe.bench.peers.workloads import WORKLOADS, Workload
from nestpipe.bench.workers import run_workers
from nestpipe.trainer import Trainer

PIPELINES = ("base", "sparse_dist")
TOLERANCE = 1e-4
CHECKED_STEPS = 5
CHUNK = 250_000


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The dense optimizer of every contestant."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class NestpipeSide:
    """One contestant: `step()` trains on the next of the given batches, around and around."""

    def __init__(self, load: Workload, model: nn.Module, batches: Sequence[Batch], **options: Any) -> None:
        self.trainer = Trainer(model, load.tables(), load.features(), dense_optimizer=adam, **options)
        self._batches = itertools.cycle(batches)

    def step(self) -> float:
        result = self.trainer.step(next(self._batches))
        assert result is not None
        return result.loss


def torchrec(load: Workload, model: nn.Module, batches: Sequence[Batch], pipeline: str) -> Any:
    from nestpipe.bench.peers.torchrec_side import TorchRecSide  # only here is TorchRec needed

    return TorchRecSide(
        model,
        load.tables(),
        load.features(),
        rows_per_table=load.rows_per_table(),
        batches=batches,
        dense_optimizer=adam,
        pipeline=pipeline,
        sharding="row_wise" if load.pooling is None else "table_wise",  # its fastest on gloo
    )


def agreement(load: Workload, keys: str) -> float:
    """How far apart the rows are after both trained from the same start: a small copy of the workload, made smooth.

    Smooth, because at the kink of a ReLU the last bit of a sum decides whether a sample has a gradient at all.
    """
    small = dataclasses.replace(load, num_rows=20_000, num_samples=256)
    batches = small.batches(rank=dist.get_rank(), count=CHECKED_STEPS, keys=keys)
    ours = NestpipeSide(small, _smooth(small.model()), batches)
    side = torchrec(small, _smooth(small.model()), batches, PIPELINES[-1])
    _copy_rows(small, ours.trainer, side)
    for _ in range(CHECKED_STEPS):
        ours.step()
        side.step()
    worst = 0.0
    for table, num_rows in small.rows_per_table().items():
        everything = torch.arange(num_rows)
        a, b = ours.trainer.rows(table, everything), side.rows(table, everything)
        worst = max(worst, float((a - b).norm() / b.norm()))
    return worst


def measure(load: dict[str, Any], keys: str, rounds: int, steps: int, num_batches: int) -> dict[str, Any]:
    """Runs on every worker."""
    workload = Workload(**load)
    difference = agreement(workload, keys)
    if difference > TOLERANCE:
        raise ValueError(
            f"{workload.name}, {keys} keys: after {CHECKED_STEPS} steps rows differ by {difference:.2e} (relative), over "
            f"{TOLERANCE}; the two do not train the same model, so their times are not compared"
        )
    batches = workload.batches(rank=dist.get_rank(), count=num_batches, keys=keys)
    ours = NestpipeSide(workload, workload.model(), batches)
    theirs = {f"torchrec {pipeline}": torchrec(workload, workload.model(), batches, pipeline) for pipeline in PIPELINES}
    for side in theirs.values():
        _copy_rows(workload, ours.trainer, side)
    dense = DenseOnly(workload.model(), workload.tables(), workload.features(), batches=batches, dense_optimizer=adam)
    turns: dict[str, Callable[[], float]] = {"nestpipe": ours.step, **{n: s.step for n, s in theirs.items()}}
    turns["dense only"] = dense.step
    sent = ours.trainer.bytes_sent()
    # Every batch once before the first timed block: after that no row is new.
    timings = alternate(turns, rounds=rounds, steps=steps, warmup=num_batches)
    taken = num_batches + rounds * (steps + 1)
    return {
        "timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "difference": difference,
        "nestpipe_bytes_per_step": (ours.trainer.bytes_sent() - sent) / taken,
        "nestpipe_exchange": ours.trainer.describe(),
    }


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Against the fastest of TorchRec's pipelines. Ratios and differences are taken within a round, then the median over
    rounds: what the machine does to all contestants of a round cancels out."""
    rounds = {name: one["rounds_ms"] for name, one in measured["timings"].items()}
    best = min((n for n in rounds if n.startswith("torchrec")), key=lambda n: measured["timings"][n]["median_ms"])

    def over_dense(name: str) -> float:
        return statistics.median(a - b for a, b in zip(rounds[name], rounds["dense only"], strict=True))

    return {
        **measured,
        "best_peer": best,
        "step_ratio": statistics.median(a / b for a, b in zip(rounds["nestpipe"], rounds[best], strict=True)),
        "over_dense_ms": {"nestpipe": over_dense("nestpipe"), best: over_dense(best)},
        "over_dense_ratio": over_dense("nestpipe") / over_dense(best),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="WORKLOAD/KEYS")
    given = parser.parse_args()
    results = {}
    for name, keys in itertools.product(WORKLOADS, ("uniform", "zipf")):
        if given.only and given.only != f"{name}/{keys}":
            continue
        load = dataclasses.asdict(WORKLOADS[name])
        if given.quick:
            load |= {"num_rows": 10_000, "num_samples": 64}
        # Many short rounds: neighbours on a shared machine come and go within seconds.
        rounds, steps, num_batches = (2, 2, 4) if given.quick else (25, 2, 24)
        measured = run_workers(measure, load, keys, rounds, steps, num_batches, workers=2)
        results[f"{name}, {keys} keys"] = summarize(measured)
    given.json.write_text(json.dumps(results))


def _copy_rows(workload: Workload, trainer: Trainer, side: Any) -> None:
    for table, num_rows in workload.rows_per_table().items():
        for start in range(0, num_rows, CHUNK):
            keys = torch.arange(start, min(start + CHUNK, num_rows))
            side.set_rows(table, keys, trainer.rows(table, keys))


def _smooth(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model


if __name__ == "__main__":
    main()

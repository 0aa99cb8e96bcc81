"""nestpipe and TorchRec on the same batches, in the same processes, in turn.

Runs in the peers' environment; prints what it found as JSON: python -m nestpipe.bench.peers.compare --only bags/zipf
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.batch import Batch
from nestpipe.bench.alternate import Contestant, alternate
from nestpipe.bench.links import Links, links, throughput
from nestpipe.bench.peers.comparison import DENSE, Comparison, verdict
from nestpipe.bench.peers.dense_only import DenseOnly
from nestpipe.bench.peers.lineup import (
    FULL,
    LINKS,
    LOOPBACK,
    PAIRS,
    PIPELINES,
    QUICK,
    QUICK_PAIRS,
    SETTINGS,
    SPREAD,
    Size,
)
from nestpipe.bench.peers.stepping import Stepper
from nestpipe.bench.peers.workloads import WORKLOADS, Workload
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.process import end_with
from nestpipe.schedule.setting import Setting
from nestpipe.trainer import Trainer

WORKERS = 2
TOLERANCE = 1e-4
CHECKED_STEPS = 5
UNLIMITED = "20gbit"  # while contestants warm up


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The dense optimizer of every contestant."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class NestpipeSide:
    """One contestant: `run(n)` trains on the next n of the given batches, around and around."""

    def __init__(
        self, setting: Setting, load: Workload, model: nn.Module, batches: Sequence[Batch], *, steps: int | None = None
    ) -> None:
        self.trainer = Trainer(
            model,
            load.tables(),
            load.features(),
            dense_optimizer=adam,
            **setting.options(),
        )
        self.stepper = Stepper(self.trainer, itertools.cycle(batches), steps=steps)

    def facts(self) -> dict[str, Any]:
        """What its tables have on all workers. (The trainer itself would not say while batches are in flight.)"""
        stats = [store.stats() for store in self.trainer.stores]
        table_bytes, rows = _summed(sum(store.bytes for store in stats), sum(store.rows for store in stats))
        return {"table_bytes": table_bytes, "table_rows": rows, "exchange": self.trainer.describe()}

    def bytes_of_a_step(self) -> int:
        """Keys, rows and gradients that all workers send, as the trainer counts them."""
        before = sum(self.trainer.sent)
        self.stepper.run(1)
        return _summed(sum(self.trainer.sent) - before)[0]


def peers(load: Workload) -> list[tuple[str, str]]:
    """Pipelines and shardings of TorchRec that take part: every pipeline with the first sharding, its best with others."""
    return [(pipeline, load.shardings[0]) for pipeline in PIPELINES] + [
        (PIPELINES[-1], sharding) for sharding in load.shardings[1:]
    ]


def torchrec(load: Workload, model: nn.Module, batches: Sequence[Batch], pipeline: str, sharding: str) -> Any:
    from nestpipe.bench.peers.torchrec_side import TorchRecSide  # only here is TorchRec needed

    return TorchRecSide(
        model,
        load.tables(),
        load.features(),
        rows_per_table=load.rows_per_table(),
        batches=batches,
        dense_optimizer=adam,
        pipeline=pipeline,
        sharding=sharding,
    )


def agreement(load: Workload, keys: str, settings: Sequence[Setting]) -> float:
    """How far apart the rows are after all trained from the same start: a small copy of the workload, made smooth.

    Smooth, because at the kink of a ReLU the last bit of a sum decides whether a sample has a gradient at all.
    """
    small = dataclasses.replace(load, num_rows=min(load.num_rows, 20_000), num_samples=min(load.num_samples, 256))
    batches = small.batches(rank=dist.get_rank(), count=CHECKED_STEPS, keys=keys)
    side = torchrec(small, _smooth(small.model()), batches, PIPELINES[-1], small.shardings[0])
    everything = {table: torch.arange(num_rows) for table, num_rows in small.rows_per_table().items()}
    trained: dict[str, torch.Tensor] = {}
    worst = 0.0
    for setting in settings:
        ours = NestpipeSide(setting, small, _smooth(small.model()), batches, steps=CHECKED_STEPS)
        if not trained:
            for table, numbers in everything.items():
                side.set_rows(table, numbers, ours.trainer.rows(table, numbers))
            for _ in range(CHECKED_STEPS):
                side.step()
            trained = {table: side.rows(table, numbers) for table, numbers in everything.items()}
        ours.stepper.run(CHECKED_STEPS)
        for table, numbers in everything.items():
            a, b = ours.trainer.rows(table, numbers), trained[table]
            worst = max(worst, float((a - b).norm() / b.norm()))
    return worst


def measure(load: Workload, keys: str, size: Size, made: Links, names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs on every worker: one result for each of the named links, at whose rate `made` is set one after the other."""
    settings = list(dict.fromkeys(setting for name in names for setting in SETTINGS[name]))
    difference = agreement(load, keys, settings)
    if difference > TOLERANCE:
        raise ValueError(
            f"{load.name}, {keys} keys: after {CHECKED_STEPS} steps rows differ by {difference:.2e} (relative), over "
            f"{TOLERANCE}; the two do not train the same model, so their times are not compared"
        )
    # Rows are drawn by each side itself, from the same law: their values make no difference to the time.
    batches = load.batches(rank=dist.get_rank(), count=size.num_batches, keys=keys)
    ours = {f"nestpipe {setting.name}": NestpipeSide(setting, load, load.model(), batches) for setting in settings}
    theirs = {
        f"torchrec {pipeline}, {sharding.replace('_', '-')}": torchrec(load, load.model(), batches, pipeline, sharding)
        for pipeline, sharding in peers(load)
    }
    dense = DenseOnly(load.model(), load.tables(), load.features(), batches=batches, dense_optimizer=adam)
    contestants: dict[str, Contestant] = {name: side.stepper for name, side in ours.items()}
    contestants |= {name: side.step for name, side in theirs.items()} | {DENSE: dense.step}
    alternate(contestants, rounds=1, steps=1, warmup=size.num_batches)
    facts = {name: side.facts() for name, side in {**ours, **theirs}.items()}
    results = []
    for link in names:
        _set_rate(made, link)
        tell(f"{load.name}, {keys} keys, {link}")
        here = [f"nestpipe {setting.name}" for setting in SETTINGS[link]]
        timings = alternate(
            {name: contestant for name, contestant in contestants.items() if name in here or name not in ours},
            rounds=size.rounds,
            steps=size.steps,
            warmup=1,
            count=_counter(made),
        )
        sent = {name: ours[name].bytes_of_a_step() for name in here}
        comparison = Comparison(
            workload=load.name,
            keys=keys,
            link=link,
            mbit_per_second=max(throughput(16.0) for _ in range(3)),  # other programs may slow one down
            difference=difference,
            timings=timings,
            facts={name: {**facts[name], "bytes_sent": sent.get(name)} for name in timings if name in facts},
            **verdict(timings),
        )
        results.append(dataclasses.asdict(comparison))
    for side in ours.values():
        side.stepper.close()
    return results


def compare(pairs: Sequence[tuple[str, str]], size: Size, names: Sequence[str]) -> list[dict[str, Any]]:
    results = []
    for workload, keys in pairs:
        load = dataclasses.replace(WORKLOADS[workload], whole=(workload, keys) not in SPREAD)
        load = dataclasses.replace(
            load, num_rows=size.num_rows or load.num_rows, num_samples=size.num_samples or load.num_samples
        )
        if LOOPBACK in names:
            results += run_workers(measure, load, keys, size, Links(), [LOOPBACK], workers=WORKERS)
        limited = [name for name in names if name != LOOPBACK]
        if limited:
            with links(WORKERS, rate=UNLIMITED) as made:
                if made.namespaces:  # else it has said why not
                    results += run_workers(measure, load, keys, size, made, limited, workers=WORKERS, links=made)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="WORKLOAD/KEYS")
    parser.add_argument("--links", default=",".join(LINKS), help="names, with commas: %(default)s")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--parent", type=int, help="the process that waits for this one: without it, it ends")
    given = parser.parse_args()
    if given.parent is not None:
        end_with(given.parent)
    # What libraries print is not for those who read the result.
    result, sys.stdout = sys.stdout, sys.stderr
    size = QUICK if given.quick else FULL
    if given.rounds is not None:
        size = dataclasses.replace(size, rounds=given.rounds)
    pairs = QUICK_PAIRS if given.quick else PAIRS
    if given.only:
        workload, _, keys = given.only.partition("/")
        pairs = [(workload, keys)]
    results = compare(pairs, size, given.links.split(","))
    print(json.dumps(results), file=result)


def _set_rate(made: Links, name: str) -> None:
    dist.barrier()
    if made.namespaces and dist.get_rank() == 0:
        made.change_rate(name)
    dist.barrier()


def _counter(made: Links) -> Callable[[], float]:
    """Over loopback all workers share one interface: only the first counts."""
    return made.bytes_sent if made.namespaces or dist.get_rank() == 0 else _nothing


def _summed(*values: int) -> list[int]:
    """Over all workers."""
    total = torch.tensor(values)
    dist.all_reduce(total)
    return total.tolist()


def _nothing() -> float:
    return 0.0


def _smooth(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model


if __name__ == "__main__":
    main()

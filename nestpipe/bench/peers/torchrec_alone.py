"""TorchRec's own choices against each other, to find its best on this machine.

python -m nestpipe.bench.peers.torchrec_alone bags --keys zipf base/table_wise sparse_dist/table_wise dense
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.bench.alternate import Timing, alternate, table
from nestpipe.bench.peers.dense_only import DenseOnly
from nestpipe.bench.peers.worker import run_workers
from nestpipe.bench.peers.workloads import WORKLOADS

DENSE = "dense"


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The dense optimizer of every contestant."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def measure(workload: str, keys: str, contestants: Sequence[str], rounds: int, steps: int) -> list[dict[str, object]]:
    """Runs on every worker. A contestant is "pipeline/sharding", or "dense" for the dense module without lookups."""
    from nestpipe.bench.peers.torchrec_side import TorchRecSide  # only workers need TorchRec

    load = WORKLOADS[workload]
    batches = load.batches(rank=dist.get_rank(), count=24, keys=keys)
    turns: dict[str, Callable[[], float]] = {}
    for name in contestants:
        if name == DENSE:
            dense = DenseOnly(load.model(), load.tables(), load.features(), batches=batches, dense_optimizer=adam)
            turns[name] = dense.step
            continue
        pipeline, _, sharding = name.partition("/")
        side = TorchRecSide(
            load.model(),
            load.tables(),
            load.features(),
            rows_per_table=load.rows_per_table(),
            batches=batches,
            dense_optimizer=adam,
            pipeline=pipeline,
            sharding=sharding,
        )
        turns[name] = side.step
    timings = alternate(turns, rounds=rounds, steps=steps)
    return [dataclasses.asdict(timing) for timing in timings.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("contestants", nargs="+", help='"pipeline/sharding" each, or "dense"')
    parser.add_argument("--keys", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plain-allocator", action="store_true", help="leave glibc's allocator as it is")
    given = parser.parse_args()
    rows = run_workers(
        measure,
        given.workload,
        given.keys,
        given.contestants,
        given.rounds,
        given.steps,
        workers=given.workers,
        keep_blocks=not given.plain_allocator,
    )
    print(f"{given.workload}, {given.keys} keys, {given.workers} workers")
    print(table({row["name"]: Timing(**row) for row in rows}))


if __name__ == "__main__":
    main()

"""Whole models of histories that take turns in the same processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.batch import Batch
from nestpipe.bench.memory import Growth
from nestpipe.bench.progress import tell
from nestpipe.data import KuaiRandLike
from nestpipe.models import HSTU
from nestpipe.optim import RowwiseAdagrad
from nestpipe.tables import Feature, Table
from nestpipe.trace.figures import Figures
from nestpipe.trainer import Trainer


def pool_of(steps: int, *, samples: int, **law: Any) -> list[Batch]:
    """This worker's batches, of `kuairand_like`."""
    log = KuaiRandLike(num_users=20_000, num_items=50_000, **law)
    batches = log.batches("train", batch_size=samples, rank=dist.get_rank(), world=dist.get_world_size(), seed=1)
    return list(itertools.islice(batches, steps))


def trainer_of(model: type[HSTU], *, dim: int, streamed: bool = False, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model(dim=dim, dropout=0.0, input_dropout=0.0, **options),
        [Table("item", dim, optimizer=RowwiseAdagrad(lr=0.01))],
        [Feature("history", "item"), Feature("negatives", "item", streamed=streamed)],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
    )


def compare(
    what: str, make: Mapping[str, Callable[[], Trainer]], pools: Mapping[str, Sequence[Batch]], *, rounds: int
) -> dict[str, list[Figures]]:
    """By contestant and round: milliseconds of a step, tokens of all workers per second, MFU, negatives that a worker has drawn
    for a step, the first loss; and, of this worker, how far its resident set rose while the trainer was made and did its first
    steps."""
    trainers, peaks = {}, {}
    for name, made in make.items():
        growth = Growth()
        trainers[name] = made()
        trainers[name].fit(pools[name], steps=len(pools[name]))
        peaks[name] = growth.peak()
    results: dict[str, list[Figures]] = {name: [] for name in make}
    for turn in range(rounds):
        first = turn % len(make)
        for name in [*list(make)[first:], *list(make)[:first]]:
            if dist.get_rank() == 0:
                tell(f"sequences: {what}, round {turn + 1} of {rounds}, {name}")
            dist.barrier()
            pool, steps = pools[name], len(pools[name])
            fitted = trainers[name].fit(pool, steps=steps)
            tokens, drawn = (sum(len(b.keys[key].values) for b in pool) for key in ("history", "negatives"))
            total = torch.tensor([float(tokens)])
            dist.all_reduce(total)
            results[name].append(
                {
                    "step": 1e3 * fitted.seconds / steps,
                    "tokens": float(total) / fitted.seconds,
                    "mfu": float("nan") if fitted.mfu is None else fitted.mfu,
                    "drawn": drawn / steps,
                    "loss": fitted.first_loss,
                    "peak": peaks[name],
                }
            )
    return results

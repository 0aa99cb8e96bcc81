"""Trainers that take turns in the same processes, and the keys that they train on."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from nestpipe.batch import Batch, Jagged
from nestpipe.bench import memory
from nestpipe.bench.emulated import EmulatedModel
from nestpipe.bench.figures import largest
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.optim import RowwiseAdagrad
from nestpipe.schedule.setting import Setting
from nestpipe.tables import Feature, Table
from nestpipe.trace import RankTrace
from nestpipe.trace.figures import Figures, figures
from nestpipe.trainer import Trainer

DIM = 64
POOL = 8  # batches per worker, used in turn, so that making them costs nothing during a block


@dataclasses.dataclass(frozen=True)
class Law:
    """Where keys come from: `items` keys by a power law; with skew 0 all are as likely.

    per_user: samples of a batch, on average, that are windows over the same user's history, each one key further; they lie
        anywhere in the batch. How many a user has is drawn from a geometric law (some users do much more than others), or
        is the same for all if `equal`.
    """

    skew: float
    per_user: int = 1
    equal: bool = False
    items: int = 1_000_000

    @property
    def name(self) -> str:
        law = f"Zipf({self.skew:g})" if self.skew else "uniform"
        kind = "equal sessions" if self.equal else "sessions"
        return law if self.per_user == 1 else f"{kind} ({self.per_user} samples a user, {law})"

    def batch(self, samples: int, length: int, *, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        windows = rng.geometric(1 / self.per_user, samples)
        if self.equal:
            windows[:] = self.per_user
        windows = windows[: np.searchsorted(np.cumsum(windows), samples) + 1]  # users, until there are enough samples
        histories = windows + length - 1
        # The inverse of the integral of x^-skew from 1 to items + 1.
        exponent = 1 - self.skew
        x = (1 + rng.random(histories.sum()) * ((self.items + 1) ** exponent - 1)) ** (1 / exponent)
        ranks = np.minimum(x.astype(np.int64) - 1, self.items - 1)
        user = np.repeat(np.arange(len(windows)), windows)
        first = np.arange(len(user)) + user * (length - 1)  # each window one further, each user a history further
        keys = ranks[rng.permutation(first[:samples])[:, None] + np.arange(length)].reshape(-1)
        return Batch({"history": Jagged.from_lengths(torch.from_numpy(keys), torch.full((samples,), length))})


class Contestant:
    """A trainer that records itself, built and warmed up here so that its memory can be told from that of the others.

    make: the trainer.
    batches: so many of them, for a block; the same on every call, or others of the same kind.
    warm_up: steps in which rows are born, kernels compiled and connections opened.
    name: in tables; by default that of its setting.
    memory: bytes; see figures.py.
    """

    def __init__(
        self,
        setting: Setting,
        make: Callable[[], Trainer],
        batches: Callable[[int], Iterable[Batch]],
        *,
        warm_up: int,
        name: str | None = None,
    ) -> None:
        self.setting, self.batches, self.name = setting, batches, name or setting.name
        growth = memory.Growth()
        self.trainer = make()
        if warm_up:
            self.train(warm_up)
        self.memory = growth.peak()
        self.recorded()  # forgets it

    def train(self, steps: int) -> None:
        self.trainer.fit(self.batches(steps), steps=steps)

    def recorded(self) -> RankTrace:
        """What ran since the last call."""
        return self.trainer.recorded(clear=True)

    def figures(self, trace: RankTrace) -> Figures:
        return figures(trace)

    def block(self, steps: int) -> Figures:
        """Figures of the middle of a block of steps, the largest over ranks."""
        sent = self.trainer.bytes_sent()
        dist.barrier()
        self.train(steps)
        results = largest({**self.figures(self.recorded()), "memory": self.memory})
        return {**results, "bytes": (self.trainer.bytes_sent() - sent) / steps / self.trainer.world}


def in_memory(
    setting: Setting,
    model: nn.Module,
    pool: Sequence[Batch],
    prepare: Callable[[Trainer], None] | None = None,
    *,
    dim: int = DIM,
    warm_up: int = POOL,
    name: str | None = None,
    **declared: Any,
) -> Contestant:
    """One over a table of histories in memory, that takes the batches of a pool in turn.

    prepare: called with the trainer before the first step; see emulated.py.
    declared: of the table, besides.
    """

    def make() -> Trainer:
        trainer = Trainer(
            model,
            [Table("item", dim, optimizer=RowwiseAdagrad(lr=0.01), **declared)],
            [Feature("history", "item")],
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            **setting.options(),
            record=True,
        )
        if prepare is not None:
            prepare(trainer)
        return trainer

    def batches(steps: int) -> Iterable[Batch]:
        return itertools.islice(itertools.cycle(pool), steps)

    return Contestant(setting, make, batches, warm_up=warm_up, name=name)


def pool_of(law: Law, samples: int, length: int, *, count: int = POOL) -> list[Batch]:
    """This worker's batches."""
    seeds = np.random.SeedSequence(dist.get_rank()).generate_state(count)
    return [law.batch(samples, length, seed=int(seed)) for seed in seeds]


def alternate(
    contestants: Sequence[Contestant], *, rounds: int, steps: int | Callable[[Setting], int], what: str
) -> dict[str, list[Figures]]:
    """Figures by contestant and round; who is first changes from round to round.

    steps: of a block; of one that hides no lookups fewer will do, since nothing fills and drains.
    what: is measured, for those who wait for it.
    """
    results: dict[str, list[Figures]] = {contestant.name: [] for contestant in contestants}
    for turn in range(rounds):
        first = turn % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            setting = contestant.setting
            tell(f"{what}: round {turn + 1} of {rounds}, {contestant.name}")
            results[contestant.name].append(contestant.block(steps if isinstance(steps, int) else steps(setting)))
    return results


def load_everything() -> None:
    """Small trainers, at the beginning of a worker: what every process loads, or compiles, once is then not in the memory of
    the first contestant, nor in its time."""
    gc.collect()
    gc.freeze()  # modules stay: a collection before each contestant need not walk all of them
    batches = pool_of(Law(1.05), 16, 4, count=3)
    for setting in (Setting("dbp"), Setting("nested", 2, True, "taper"), Setting("nested", 2, False, "shared")):
        in_memory(setting, EmulatedModel(dim=8), batches, dim=8, warm_up=len(batches))


def compile_kernels() -> None:
    """Before many workers start: two compile what is not yet in the cache on disk sooner than eight, each for itself."""
    run_workers(load_everything, workers=2, threads=1)

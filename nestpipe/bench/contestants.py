"""Trainers that take turns in the same processes, the keys that they train on, and figures from their traces."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from nestpipe.batch import Batch, Jagged
from nestpipe.engine.engine import Engine
from nestpipe.optim import RowwiseAdagrad
from nestpipe.tables import Feature, Table
from nestpipe.trace import COMPUTE, RankSummary, RankTrace, summary
from nestpipe.trace.times import covered, union
from nestpipe.trainer import Trainer

DIM = 64
POOL = 8  # batches per worker, used in turn, so that making them costs nothing during a block
COMMUNICATION = ("EMB", "GRAD", "AGREE")
LOOKUP = ("PREFETCH", "H2D", "ROUTE", "RETRIEVE", "WRITEBACK", "SYNC")


@dataclasses.dataclass(frozen=True)
class Way:
    """One contestant."""

    schedule: str
    micro_batches: int = 1
    window_cache: bool = True
    clustering: str = "none"

    @property
    def name(self) -> str:
        if self.micro_batches == 1:
            return self.schedule
        cache = "" if self.window_cache else ", no window cache"
        clustering = f", clustering {self.clustering}" if self.clustering != "none" else ""
        return f"{self.schedule}, N = {self.micro_batches}{cache}{clustering}"


@dataclasses.dataclass(frozen=True)
class Law:
    """Where keys come from: `items` keys by a power law.

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
        law = f"Zipf({self.skew:g})"
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
    """A trainer over a table in memory, and the batches that it trains on in turn."""

    def __init__(
        self,
        way: Way,
        model: nn.Module,
        batches: Sequence[Batch],
        prepare: Callable[[Engine], None] | None = None,
    ) -> None:
        self.way, self.batches = way, batches
        self.trainer = Trainer(
            model,
            [Table("item", DIM, optimizer=RowwiseAdagrad(lr=0.01))],
            [Feature("history", "item")],
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            schedule=way.schedule,
            micro_batches=way.micro_batches,
            window_cache=way.window_cache,
            clustering=way.clustering,
            record=True,
        )
        if prepare is not None:
            prepare(self.trainer._engine)

    def train(self, steps: int) -> None:
        self.trainer.fit(itertools.islice(itertools.cycle(self.batches), steps), steps=steps)

    def block(self, steps: int) -> dict[str, float]:
        """Figures of the middle of a block of steps, the largest over ranks."""
        dist.barrier()
        self.train(steps)
        trace = self.trainer._engine.recorded(rank=self.trainer.rank, world=self.trainer.world, clear=True)
        return largest(figures(trace))


def figures(trace: RankTrace) -> dict[str, float]:
    """Milliseconds per step of this rank. Of the time in which compute runs nothing, what communication takes counts for it
    alone: lookup that happens to run then is not what compute waits for."""
    one = summary([trace])[0]

    def total(names: Sequence[str], of: Callable[[Any], float]) -> float:
        return sum(of(op) for op in one.ops if op.op in names)

    return {
        "step": one.mean_step_ms,
        "compute": total(("FWD", "BWD"), lambda op: op.ms),
        "communication": total(COMMUNICATION, lambda op: op.ms),
        "exposed communication": total(COMMUNICATION, lambda op: op.exposed_ms),
        "lookup": total(LOOKUP, lambda op: op.ms),
        "exposed lookup": _exposed_lookup(trace, one),
        "longest lane": one.busiest.busy_ms,
        "compute lane": one.lane(COMPUTE).busy_ms,
    }


def _exposed_lookup(trace: RankTrace, one: RankSummary) -> float:
    columns, compute = trace.columns, trace.lanes.index(COMPUTE)
    start, end = columns.start.clip(*one.window_ns), columns.end.clip(*one.window_ns)
    lookup, communication = (
        np.isin(columns.op, [columns.names.index(name) for name in names if name in columns.names])
        for names in (LOOKUP, COMMUNICATION)
    )
    here = lookup & (columns.lane == compute)
    hiding = (columns.lane == compute) | communication
    elsewhere = union(start[lookup & ~hiding], end[lookup & ~hiding])
    hidden = covered(*elsewhere, by=union(start[hiding], end[hiding]))
    waited = (end - start)[here].sum() + (elsewhere[1] - elsewhere[0] - hidden).sum()
    return float(waited) / 1e6 / one.steps


def largest(mine: Mapping[str, float]) -> dict[str, float]:
    """The largest over ranks, figure by figure."""
    values = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(mine, values.tolist(), strict=True))


def alternate(contestants: Sequence[Contestant], *, rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Figures by contestant and round; who is first changes from round to round."""
    results: dict[str, list[dict[str, float]]] = {one.way.name: [] for one in contestants}
    for turn in range(rounds):
        first = turn % len(contestants)
        for one in [*contestants[first:], *contestants[:first]]:
            results[one.way.name].append(one.block(steps))
    return results


def verdict(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each contestant's figures, and of its ratios to the serial run in the same round."""
    reference = rounds["serial"]
    results = {}
    for name, many in rounds.items():
        both = list(zip(many, reference, strict=True))
        results[name] = {key: statistics.median(one[key] for one in many) for key in many[0]} | {
            "speedup": statistics.median(s["step"] / one["step"] for one, s in both),
            "exposed of serial": statistics.median(
                one["exposed communication"] / s["communication"] for one, s in both
            ),
            "exposed of own": statistics.median(one["exposed communication"] / one["communication"] for one in many),
            "step over longest lane": statistics.median(one["step"] / one["longest lane"] for one in many),
            "step over compute lane": statistics.median(one["step"] / one["compute lane"] for one in many),
        }
    return results


def pool(law: Law, samples: int, length: int) -> list[Batch]:
    seeds = np.random.SeedSequence(dist.get_rank()).generate_state(POOL)
    return [law.batch(samples, length, seed=int(seed)) for seed in seeds]

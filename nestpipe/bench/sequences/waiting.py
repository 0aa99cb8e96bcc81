"""Workers that wait for the one with the longest users, and what dealing samples does about it.

On several workers, with an emulated accelerator that takes a set time for every token and for the square of every sample's
tokens; and on two, with an HSTU that really computes. The same global batches, undealt; dealt by the data, which every rank can
read by index; and dealt as a stream, whose samples travel (DEAL).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.batch import Batch
from nestpipe.bench import emulated
from nestpipe.bench.contestants import Contestant, load_everything
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import medians
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.data import KuaiRandLike
from nestpipe.data.epoch import training_batches
from nestpipe.models import HSTU
from nestpipe.optim import RowwiseAdagrad
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown
from nestpipe.tables import Feature
from nestpipe.tables import Table as Declared
from nestpipe.trace.figures import Figures
from nestpipe.trainer import Trainer

AS_READ, BY_DATA, AS_STREAM = "as they come", "dealt by the data", "dealt as a stream"


@dataclasses.dataclass(frozen=True)
class Size:
    """samples: of a worker. micros: of an emulated token, 10^-6 s. squares: what the square of a token costs, in tokens."""

    workers: int = 4
    samples: int = 32
    tokens: int | None = None  # of a worker, instead of samples
    mean_length: float = 300.0
    max_length: int = 2_048
    micros: float = 12.0
    squares: float = 1e-3
    real: bool = False
    dim: int = 64
    layers: int = 2
    rounds: int = 3
    steps: int = 16


EMULATED = Size()
BY_TOKENS = Size(tokens=9_600)
REAL = Size(workers=2, samples=16, real=True, squares=4e-4, steps=8)
QUICK = Size(workers=2, samples=8, mean_length=40, max_length=128, micros=2.0, dim=8, layers=1, rounds=1, steps=6)


def measure(size: Size) -> dict[str, list[Figures]]:
    return run_workers(_measure, size, workers=size.workers, threads=1)


def _measure(size: Size) -> dict[str, list[Figures]]:
    load_everything()
    rank, world = dist.get_rank(), dist.get_world_size()
    log = KuaiRandLike(
        num_users=20_000, num_items=20_000, mean_length=size.mean_length, max_length=size.max_length, num_negatives=8
    )

    def batches(squares: float | None) -> Callable[[int], Iterable[Batch]]:
        count = None if size.tokens is not None else size.samples
        made = training_batches(
            log,
            batch_size=count,
            batch_tokens=size.tokens,
            tokens=None,
            squares=squares,
            rank=rank,
            world=world,
            seed=1,
        )
        pool = list(itertools.islice(made, size.steps))
        return lambda steps: itertools.islice(itertools.cycle(pool), steps)

    ways: dict[str, tuple[float | None, str | float]] = {
        AS_READ: (None, "none"),
        BY_DATA: (size.squares, "none"),
        AS_STREAM: (None, size.squares),
    }
    contestants = []
    for name, (squares, balance) in ways.items():
        setting = Setting("nested", 1, balance=balance)
        make = functools.partial(_trainer, size, setting)
        contestants.append(Contestant(setting, make, batches(squares), warm_up=size.steps, name=name))
    rounds: dict[str, list[Figures]] = {contestant.name: [] for contestant in contestants}
    for turn in range(size.rounds):
        first = turn % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            if rank == 0:
                tell(f"sequences: waiting, {_place(size)}, round {turn + 1} of {size.rounds}, {contestant.name}")
            dist.barrier()
            fitted = contestant.trainer.fit(contestant.batches(size.steps), steps=size.steps)
            contestant.recorded()
            assert fitted.waiting is not None
            rounds[contestant.name].append(
                {
                    "step": 1e3 * fitted.seconds / size.steps,
                    "waiting": fitted.waiting.measured,
                    "tokens": fitted.waiting.tokens or 0.0,
                }
            )
    return rounds


def _trainer(size: Size, setting: Setting) -> Trainer:
    torch.manual_seed(0)
    model: nn.Module = EmulatedModel(dim=size.dim)
    features = [Feature("history", "item")]
    if size.real:
        model = HSTU(dim=size.dim, num_layers=size.layers, max_length=size.max_length, dropout=0.0, input_dropout=0.0)
    features.append(Feature("negatives", "item"))
    trainer = Trainer(
        model,
        [Declared("item", size.dim, optimizer=RowwiseAdagrad(lr=0.01))],
        features,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
        **setting.options(),
        record=True,
    )
    if not size.real:
        micros = size.micros * 1e-6
        pad(trainer, seconds_per_token=micros, seconds_per_square=micros * size.squares)
    return trainer


def _place(size: Size) -> str:
    return f"{size.workers} workers, {'HSTU' if size.real else emulated.LABEL}"


def sections(runs: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    rows = []
    for run in runs:
        size, rounds = Size(**run["size"]), run["rounds"]
        for name, own in rounds.items():
            figures = medians(own)
            faster = statistics.median(a["step"] / b["step"] for a, b in zip(rounds[AS_READ], own, strict=True))
            rows.append(
                (
                    _place(size),
                    f"{size.tokens:,} tokens" if size.tokens else f"{size.samples} samples",
                    name,
                    shown("{:.1%}", figures["waiting"]),
                    shown("{:.2f}", figures["tokens"]),
                    shown("{:.0f}", figures["step"]),
                    shown("{:.2f}x", faster),
                )
            )
    columns = ("workers", "batch of a worker", "samples", "waiting", "tokens, most / mean", "step ms", "faster")
    note = (
        "Lengths are log-normal (`kuairand_like`, mean 300, cut at 2,048). Waiting: share of the model's time, forward and "
        "backward, that a worker waits for the slowest, over the steps of a block. `nested`, N = 1. Two real workers share a "
        "machine: what each waits for depends on the other's use of caches and memory too."
    )
    yield Table("Waiting for the worker with the longest users", columns, rows, note)

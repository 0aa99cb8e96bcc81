"""`nestpipe bench precision`: what bf16 and torch.compile make of a step, and of what it learns, on this machine.

Trainers that begin with the same weights and rows train on the same batches, taking turns. In the end all have done as many steps
and are judged on batches that none of them has seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestpipe.batch import Batch
from nestpipe.bench.alternate import alternate
from nestpipe.bench.progress import tell
from nestpipe.data import Dataset, SyntheticClicks, SyntheticSequences
from nestpipe.engine.computing import finds_a_compiler
from nestpipe.models import DLRM, HSTU
from nestpipe.optim import RowwiseAdagrad
from nestpipe.sections import Section, Table, shown
from nestpipe.tables import Feature
from nestpipe.tables import Table as Rows
from nestpipe.trainer import Trainer

# The first is what the others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "float32, compiled": {"compile": True},
    "bf16, compiled": {"precision": "bf16", "compile": True},
}
LEAD_IN = 1  # steps of a block that are not timed


@dataclasses.dataclass(frozen=True)
class Size:
    """samples, histories: of a batch of each model. judged: batches. top, layers: of DLRM, of HSTU."""

    samples: int = 1024
    histories: int = 64
    dim: int = 64
    top: tuple[int, ...] = (1024, 1024, 512)
    layers: int = 4
    rounds: int = 15
    steps: int = 5
    warm_up: int = 4
    judged: int = 10

    @property
    def total_steps(self) -> int:
        return 1 + self.warm_up + self.rounds * (LEAD_IN + self.steps)


QUICK = Size(samples=32, histories=8, dim=8, top=(16,), layers=1, rounds=1, steps=1, warm_up=0, judged=1)


@dataclasses.dataclass(frozen=True)
class Contest:
    """A model, made anew for each way, and what it trains on."""

    what: str
    model: Callable[[], nn.Module]
    data: Dataset
    batch_size: int
    features: Sequence[Feature]

    def batches(self, split: str, count: int) -> list[Batch]:
        made = self.data.batches(split, batch_size=self.batch_size, rank=0, world=1, seed=1)
        return list(itertools.islice(made, count))

    def trainer(self, dim: int, **way: Any) -> Trainer:
        torch.manual_seed(0)
        tables = [
            Rows(name, dim, optimizer=RowwiseAdagrad(lr=0.05)) for name in dict.fromkeys(f.table for f in self.features)
        ]
        return Trainer(self.model(), tables, self.features, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3), **way)


class Course:
    """A trainer on its way through the batches, which all go through in the same order."""

    def __init__(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        self.trainer, self._ahead = trainer, iter(batches)

    def run(self, steps: int) -> None:
        self.trainer.fit(list(itertools.islice(self._ahead, steps)), steps=steps)


def run(*, quick: bool) -> dict[str, Any]:
    """By model: what it is, and by way ms of a step, its ratio to the first way, seconds of the first step, the loss."""
    size = QUICK if quick else Size()
    ways = {name: way for name, way in WAYS.items() if finds_a_compiler() or not way.get("compile")}
    models = {name: _measure(name, contest, size, ways) for name, contest in _contests(size)}
    return {"steps": size.total_steps, "threads": torch.get_num_threads(), "bf16": _bf16_units(), "models": models}


def sections(results: dict[str, Any]) -> list[Section]:
    rows = []
    for name, model in results["models"].items():
        for way, found in model["ways"].items():
            rows.append(
                (
                    name,
                    way,
                    shown("{:.1f} ± {:.1f}", found["ms"], found["iqr_ms"]),
                    shown("{:.2f}x", found["ratio"]),
                    shown("{:.1f}", found["first_s"]),
                    shown("{:.4f}", found["loss"]),
                )
            )
    found_ways = next(iter(results["models"].values()))["ways"]
    models = "; ".join(f"{name}: {model['what']}" for name, model in results["models"].items())
    units = (
        f"instructions of its own ({', '.join(results['bf16'])})" if results["bf16"] else "no instructions of its own"
    )
    note = (
        f"{models}. One worker with {results['threads']} threads, `serial`. Ratio: to float32 in the same round; below 1 is "
        f"faster. First step: with compiling. Loss: on batches that were not trained on, after {results['steps']} steps "
        f"of each from the same beginning. For bf16 this CPU has {units}."
        + ("" if len(found_ways) == len(WAYS) else " Nothing is compiled: there is no C++ compiler.")
    )
    columns = ("model", "way", "step ms ± IQR", "ratio", "first step s", "loss")
    return [Table("bf16 and torch.compile: what a step takes, and what it learns", columns, rows, note)]


def _contests(size: Size) -> Iterator[tuple[str, Contest]]:
    clicks = SyntheticClicks(keys_per_table=20_000)
    names = list(clicks.features)
    yield (
        "DLRM",
        Contest(
            f"{size.samples:,} samples of {len(names)} bags, dim {size.dim}, top MLP {' x '.join(map(str, size.top))}",
            lambda: DLRM(num_dense=13, features=names, dim=size.dim, bottom=(512, 256), top=size.top),
            clicks,
            size.samples,
            [Feature(name, name, "sum") for name in names],
        ),
    )
    histories = SyntheticSequences(num_items=20_000, mean_length=50, max_length=200, num_negatives=64)
    yield (
        "HSTU",
        Contest(
            f"{size.histories:,} histories of up to 200 items, dim {size.dim}, {size.layers} layers of 2 heads, 64 negatives",
            lambda: HSTU(
                dim=size.dim, num_layers=size.layers, num_heads=2, max_length=200, dropout=0.0, input_dropout=0.0
            ),
            histories,
            size.histories,
            [Feature("history", "item"), Feature("negatives", "item")],
        ),
    )


def _measure(name: str, contest: Contest, size: Size, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    batches = contest.batches("train", size.total_steps)
    judged = contest.batches("valid", size.judged)
    with contextlib.ExitStack() as opened:
        courses, first_s = {}, {}
        for way, options in ways.items():
            tell(f"precision: {name}, {way}")
            courses[way] = Course(opened.enter_context(contest.trainer(size.dim, **options)), batches)
            begin = time.perf_counter()
            courses[way].run(1)
            first_s[way] = time.perf_counter() - begin
        tell(f"precision: {name}, {size.rounds} rounds")
        timings = alternate(courses, rounds=size.rounds, steps=size.steps, warmup=size.warm_up, lead_in=LEAD_IN)
        found = {
            way: {
                "ms": timings[way].median_ms,
                "iqr_ms": timings[way].iqr_ms,
                "ratio": timings[way].ratio,
                "first_s": first_s[way],
                "loss": course.trainer.evaluate(judged, {})["loss"],
            }
            for way, course in courses.items()
        }
    return {"what": contest.what, "ways": found}


def _bf16_units() -> list[str]:
    """Which instructions for bfloat16 the CPU has, where Linux tells; without any it is computed by way of float32."""
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.exists() else set()
    return [unit for unit in ("avx512_bf16", "amx_bf16", "bf16") if unit in flags]

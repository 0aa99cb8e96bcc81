"""A whole model of long histories: tokens per second and memory of HSTU, and of the same in plain torch with padding."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from nestpipe.bench.figures import medians
from nestpipe.bench.sequences.models import compare, pool_of, trainer_of
from nestpipe.bench.sequences.padded import PaddedHSTU
from nestpipe.bench.workers import run_workers
from nestpipe.models import HSTU
from nestpipe.sections import Section, Table, shown
from nestpipe.trace.figures import Figures

MODELS = {"padded, plain torch": PaddedHSTU, "jagged": HSTU}


@dataclasses.dataclass(frozen=True)
class Size:
    workers: int = 2
    samples: int = 8
    mean_length: float = 300.0
    max_length: int = 2_048
    num_negatives: int = 64
    dim: int = 128
    layers: int = 4
    heads: int = 2
    rounds: int = 3
    steps: int = 2


QUICK = Size(samples=4, mean_length=30, max_length=100, num_negatives=8, dim=16, layers=1, rounds=1, steps=2)


def measure(size: Size) -> dict[str, list[Figures]]:
    return run_workers(_measure, size, workers=size.workers, threads=1)


def _measure(size: Size) -> dict[str, list[Figures]]:
    pool = pool_of(
        size.steps, samples=size.samples, mean_length=size.mean_length, max_length=size.max_length,
        num_negatives=size.num_negatives,
    )  # fmt: skip
    make = {
        name: functools.partial(
            trainer_of, model, dim=size.dim, num_layers=size.layers, num_heads=size.heads, max_length=size.max_length,
            num_time_buckets=64,
        )
        for name, model in MODELS.items()
    }  # fmt: skip
    return compare("steps", make, dict.fromkeys(MODELS, pool), rounds=size.rounds)


def sections(size: Mapping[str, Any], rounds: Mapping[str, list[Figures]]) -> Iterator[Section]:
    first = rounds[next(iter(MODELS))]
    rows = []
    for name, own in rounds.items():
        middle = medians(own)
        faster = statistics.median(a["step"] / b["step"] for a, b in zip(first, own, strict=True))
        rows.append(
            (
                name,
                shown("{:.0f}", middle["step"]),
                shown("{:,.0f}", middle["tokens"]),
                shown("{:.2f}x", faster),
                shown("{:.1%}", middle["mfu"]),
                shown("{:.0f}", middle["peak"] / 1e6),
            )
        )
    note = (
        f"HSTU, {size['layers']} layers of {size['dim']}, {size['heads']} heads, position and time bias, {size['num_negatives']} "
        f"negatives a sample; {size['workers']} workers, {size['samples']} users each, histories of `kuairand_like` up to "
        f"{size['max_length']:,} items; the same batches, alternating, `serial`. MFU: what each model multiplies (padding "
        f"included) against a plain matrix product on this machine. MB: how far a worker's resident set rose while it was made "
        f"and warmed up."
    )
    columns = ("model", "step ms", "tokens/s", "faster", "MFU", "peak MB")
    yield Table("A step of a model of long histories", columns, rows, note)

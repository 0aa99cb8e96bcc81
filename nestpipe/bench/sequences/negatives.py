"""Many negatives for each position: time and memory of a step that holds all their rows, and of ways that do not."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from nestpipe.bench.figures import medians
from nestpipe.bench.sequences.models import compare, pool_of, trainer_of
from nestpipe.bench.workers import run_workers
from nestpipe.models import HSTU
from nestpipe.sections import Section, Table, shown
from nestpipe.trace.figures import Figures


@dataclasses.dataclass(frozen=True)
class Way:
    """share: of how many others it compares the negatives too; the fewer are drawn."""

    streamed: bool = True
    dtype: str = "float32"
    share: int = 0


PLAIN = "plain"
WAYS = {
    PLAIN: Way(streamed=False),
    "streamed": Way(),
    "streamed, float16": Way(dtype="float16"),
    "streamed, bfloat16": Way(dtype="bfloat16"),
    "a quarter drawn, streamed, shared with 3 others": Way(share=3),
}


@dataclasses.dataclass(frozen=True)
class Size:
    workers: int = 2
    samples: int = 32
    mean_length: float = 100.0
    max_length: int = 512
    num_negatives: int = 128
    dim: int = 64
    layers: int = 2
    rounds: int = 3
    steps: int = 3


QUICK = Size(samples=4, mean_length=10, max_length=20, num_negatives=8, dim=8, layers=1, rounds=1, steps=2)


def measure(size: Size) -> dict[str, list[Figures]]:
    return run_workers(_measure, size, workers=size.workers, threads=1)


def _measure(size: Size) -> dict[str, list[Figures]]:
    make, pools = {}, {}
    for name, way in WAYS.items():
        pools[name] = pool_of(
            size.steps, samples=size.samples, mean_length=size.mean_length, max_length=size.max_length,
            num_negatives=size.num_negatives // (1 + way.share), negatives_per="position",
        )  # fmt: skip
        make[name] = functools.partial(
            trainer_of, HSTU, dim=size.dim, num_layers=size.layers, max_length=size.max_length, streamed=way.streamed,
            negatives_per="position", negatives_dtype=way.dtype, share_negatives=way.share,
        )  # fmt: skip
    return compare("negatives", make, pools, rounds=size.rounds)


def sections(size: Mapping[str, Any], rounds: Mapping[str, list[Figures]]) -> Iterator[Section]:
    plain = rounds[PLAIN]
    rows = []
    for name, own in rounds.items():
        middle = medians(own)
        rows.append(
            (
                name,
                shown("{:,.0f}", middle["drawn"]),
                shown("{:.0f}", middle["peak"] / 1e6),
                shown("{:.2f}", middle["peak"] / max(1.0, plain[0]["peak"])),
                shown("{:.0f}", middle["step"]),
                shown("{:.2f}x", statistics.median(a["step"] / b["step"] for a, b in zip(own, plain, strict=True))),
            )
        )
    note = (
        f"HSTU, {size['layers']} layers of {size['dim']}, {size['num_negatives']} negatives compared at every position; "
        f"{size['workers']} workers, {size['samples']} users each, histories of `kuairand_like` with a mean of "
        f"{size['mean_length']:.0f} up to {size['max_length']} items, `serial`. Peak: of worker 0, how far its resident set rose "
        f"while the trainer was made and did its first steps."
    )
    columns = ("negatives", "drawn a step and worker", "peak MB", "of plain", "step ms", "time, of plain")
    yield Table("Negatives of every position", columns, rows, note)

"""Workers in groups with slow links between them: what replicas (2D) change, measured on real links.

All contestants run `nested` with the same micro-batches on an emulated accelerator, whose compute lasts as long as the
communication of a serial step in one group of all; links are real (see links.py), so all that travels is too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from nestpipe.bench import emulated
from nestpipe.bench.contestants import DIM, POOL, Contestant, Law, compile_kernels, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import medians
from nestpipe.bench.links import Links, links
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown
from nestpipe.trace.figures import Figures

ALONE = "1D"


@dataclasses.dataclass(frozen=True)
class Groups:
    """meshes: replicas x shards.
    inside: rate of each worker's link. slower: how much slower a worker's part of the link from its group to the others is.
    compute: of a step, as a multiple of the communication of a serial one.
    every: steps between averages.
    """

    meshes: Sequence[tuple[int, int]] = ((2, 4), (4, 2))
    inside: int = 200  # Mbit/s
    slower: float = 5.0
    law: Law = Law(1.05)
    samples: int = 256
    length: int = 50
    compute: float = 1.0
    micro_batches: int = 8
    every: int = 4
    rounds: int = 3
    steps: int = 12


QUICK = Groups(meshes=((2, 2),), samples=64, length=20, micro_batches=4, rounds=1, steps=6)


def measure(size: Groups) -> list[dict[str, Any]]:
    compile_kernels()
    results = []
    for replicas, shards in size.meshes:
        between = f"{size.inside * shards / size.slower:g}mbit"
        workers = replicas * shards
        with links(workers, rate=f"{size.inside}mbit", groups=replicas, between=between) as made:
            rounds = run_workers(_measure, size, replicas, made, workers=workers, threads=1, links=made)
        results.append({"mesh": (replicas, shards), "links": made.label, "why": made.why, "rounds": rounds})
    return results


def _measure(size: Groups, replicas: int, made: Links) -> dict[str, list[Figures]]:
    load_everything()
    pool = pool_of(size.law, size.samples, size.length)
    one = Setting("nested", size.micro_batches, True, "window")
    alone = in_memory(Setting("serial"), EmulatedModel(dim=DIM), pool).block(POOL)
    seconds = size.compute * alone["communication"] / 1e3 / (size.samples * size.length)
    two = dataclasses.replace(one, replicas=replicas)
    declared: dict[str, tuple[Setting, Mapping[str, Any]]] = {
        ALONE: (one, {}),
        "2D exact": (two, {}),
        f"2D averaged every {size.every} steps": (two, {"sync": "average", "sync_every": size.every}),
    }
    contestants = [
        in_memory(
            setting,
            EmulatedModel(dim=DIM),
            pool,
            lambda trainer: pad(trainer, seconds_per_token=seconds),
            name=name,
            **options,
        )
        for name, (setting, options) in declared.items()
    ]
    rounds: dict[str, list[Figures]] = {contestant.name: [] for contestant in contestants}
    for turn in range(size.rounds):
        for contestant in [*contestants[turn % 3 :], *contestants[: turn % 3]]:
            if dist.get_rank() == 0:
                tell(f"two_d: {replicas} groups, round {turn + 1} of {size.rounds}, {contestant.name}")
            rounds[contestant.name].append(_block(contestant, size.steps, made))
    return rounds


def _block(contestant: Contestant, steps: int, made: Links) -> Figures:
    dist.barrier()
    before = made.bytes_between() if dist.get_rank() == 0 else 0
    block = contestant.block(steps)
    after = made.bytes_between() if dist.get_rank() == 0 else 0
    return {**block, "between": (after - before) / steps / contestant.trainer.world}


def sections(size: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    rows = []
    for run in runs:
        alone = run["rounds"][ALONE]
        for name, own in run["rounds"].items():
            figures = medians(own)
            faster = statistics.median(a["step"] / b["step"] for a, b in zip(alone, own, strict=True))
            rows.append(
                (
                    "{} x {}".format(*run["mesh"]),
                    name,
                    shown("{:.0f} ± {:.0f}", figures["step"], figures["iqr"]),
                    shown("{:.2f}x", faster),
                    shown("{:.2f}", figures["bytes"] / 1e6),
                    shown("{:.2f}", figures["between"] / 1e6),
                    shown("{:.0f}", figures["communication"]),
                    shown("{:.0f}", figures["exposed communication"]),
                    shown("{:.0f}", figures["compute"]),
                )
            )
    columns = (
        "replicas x shards", "tables", "step ms ± IQR", "faster than 1D", "MB sent", "MB between groups", "communication ms",
        "exposed communication ms", "compute ms",
    )  # fmt: skip
    places = "; ".join(f"{run['links']}{' (' + run['why'] + ')' if run['why'] else ''}" for run in runs)
    note = (
        f"`nested`, N = {size['micro_batches']}, {size['samples']} samples of {size['length']} keys a worker, on an "
        f"{emulated.LABEL}; links: {places}. MB are of a worker and step; those between groups are counted on the links, with "
        f"all headers, and with the sum of dense gradients."
    )
    yield Table("Replicas where links between groups are slow", columns, rows, note)

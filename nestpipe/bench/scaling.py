"""`nestpipe bench scaling`: weak scaling. Every worker keeps its batch while there are more and more workers.

emulated    the paper's mix (see mix.py) on 1 to 8 workers. Per worker the lookups last the same whatever the count, so does
            compute per token, and a byte on the emulated link takes what it takes on the largest count, where
            communication has the paper's share of a serial step. What a worker really sends decides how long it sends: one
            worker nothing, two half of their rows and gradients, eight 7/8. (At the paper's scale lookups grow with the count
            as well; here they do not, so that serial loses less than it did there.)
CPU         a model that really computes, on as many workers as there are cores, one thread each, over loopback. Memory
            bandwidth and caches are shared.

Efficiency is the step of one worker divided by the step of W workers under the same schedule.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from nestpipe.bench import emulated
from nestpipe.bench.computing import Layers
from nestpipe.bench.contestants import Law, alternate, compile_kernels, in_memory, load_everything, pool_of
from nestpipe.bench.figures import COLUMNS, EXPLAINED, bars, cells, verdict
from nestpipe.bench.mix import Mix, mix_contestants
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Curves, Section, Table, shown

# Efficiency from 128 to 1,536 workers that the paper reports. (serial: TorchRec.)
PAPER = {"serial": 0.4434, "nested": 0.9407}


def settings(micro_batches: int) -> list[Setting]:
    cut = [Setting(name, micro_batches, clustering="taper") for name in ("fwp", "nested")]
    return [Setting("serial"), Setting("dbp"), *cut]


@dataclasses.dataclass(frozen=True)
class Emulated:
    counts: Sequence[int] = (1, 2, 4, 8)
    mix: Mix = Mix(
        workers=8, step=5.0, rounds=1, steps=10, short=4
    )  # long, since few cores run many workers' exchanges
    micro_batches: int = 16


@dataclasses.dataclass(frozen=True)
class Cpu:
    counts: Sequence[int] = (1, 2)  # those for which there are cores
    law: Law = Law(1.05)
    samples: int = 512
    length: int = 20
    layers: int = 8
    micro_batches: int = 4
    rounds: int = 3
    steps: int = 16


QUICK_EMULATED = Emulated(
    counts=(1, 2), mix=Mix(workers=2, samples=32, length=10, step=0.3, rounds=1, steps=8, short=4), micro_batches=4
)
QUICK_CPU = Cpu(samples=64, length=10, layers=2, rounds=1, steps=8)


def run(*, quick: bool) -> dict[str, Any]:
    return {
        "emulated": run_emulated(QUICK_EMULATED if quick else Emulated()),
        "cpu": run_cpu(QUICK_CPU if quick else Cpu()),
    }


def run_emulated(size: Emulated) -> dict[str, Any]:
    """The largest count first: it decides what a byte takes."""
    if max(size.counts) > 2:
        compile_kernels()
    seconds_per_byte, by_count = None, {}
    for workers in sorted(size.counts, reverse=True):
        tell(f"scaling: {workers} workers, {emulated.LABEL}")
        measured = run_workers(_measure_emulated, size, seconds_per_byte, workers=workers, threads=1)
        seconds_per_byte, by_count[workers] = measured["seconds_per_byte"], measured
    return _told(size, by_count, size.mix.samples)


def _measure_emulated(size: Emulated, seconds_per_byte: float | None) -> dict[str, Any]:
    contestants, rate = mix_contestants(size.mix, settings(size.micro_batches), seconds_per_byte=seconds_per_byte)
    what = f"scaling: {contestants[0].trainer.world} workers"
    rounds = alternate(contestants, rounds=size.mix.rounds, steps=size.mix.steps_of, what=what)
    return {"seconds_per_byte": rate, "ms": verdict(rounds), "rounds": rounds}


def run_cpu(size: Cpu) -> dict[str, Any]:
    by_count = {}
    for workers in size.counts:
        if workers == 1 or workers <= (os.cpu_count() or 1):
            tell(f"scaling: {workers} workers, CPU")
            by_count[workers] = run_workers(_measure_cpu, size, workers=workers, threads=1)
    return _told(size, by_count, size.samples)


def _measure_cpu(size: Cpu) -> dict[str, Any]:
    load_everything()
    pool = pool_of(size.law, size.samples, size.length)
    contestants = [in_memory(setting, Layers(size.layers), pool) for setting in settings(size.micro_batches)]
    what = f"scaling: {contestants[0].trainer.world} workers, CPU"
    rounds = alternate(contestants, rounds=size.rounds, steps=size.steps, what=what)
    return {"ms": verdict(rounds), "rounds": rounds}


def _told(size: Any, by_count: dict[int, dict[str, Any]], samples: int) -> dict[str, Any]:
    """By count, the smallest first, with what only several counts together can tell."""
    smallest = by_count[min(by_count)]["ms"]
    runs = []
    for workers in sorted(by_count):
        ms = by_count[workers]["ms"]
        for name, figures in ms.items():
            figures["efficiency"] = smallest[name]["step"] / figures["step"]
            figures["samples per second"] = workers * samples * 1e3 / figures["step"]
        runs.append({"workers": workers, **by_count[workers]})
    return {"size": dataclasses.asdict(size), "runs": runs}


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    size = results["emulated"]["size"]
    mix = Mix(**{**size["mix"], "law": Law(**size["mix"]["law"])})
    emulated_note = (
        f"{max(size['counts'])} workers have the paper's mix ({mix.lookup:.1%} lookup, {mix.communication:.1%} communication, "
        f"{mix.compute:.1%} compute of a serial step of {mix.step:g} s); lookups per worker, compute per token and seconds per "
        f"byte are the same for every count. All of it on an {emulated.LABEL}, with emulated lookups and emulated links. "
        f"The paper, from 128 to 1,536 workers: TorchRec {PAPER['serial']:.1%}, nested {PAPER['nested']:.1%}. "
    )
    cpu = results["cpu"]["size"]
    cpu_note = (
        f"Real compute on the CPU: {cpu['layers']} layers over {cpu['samples']} sequences of {cpu['length']} keys a worker, one "
        "thread each, loopback. "
    )
    return [
        *_sections(results["emulated"], f"Weak scaling on an {emulated.LABEL}", emulated_note),
        *_sections(results["cpu"], "Weak scaling with real compute (CPU)", cpu_note),
    ]


def _sections(results: dict[str, Any], title: str, note: str) -> Iterator[Section]:
    runs = results["runs"]
    rows = [
        (
            name,
            shown("{}", run["workers"]),
            shown("{:.1%}", run["ms"][name]["efficiency"]),
            shown("{:,.0f}", run["ms"][name]["samples per second"]),
            *cells(run["ms"][name]),
        )
        for name in runs[0]["ms"]
        for run in runs
    ]
    columns = ("schedule", "workers", "efficiency", "samples/s of all", *COLUMNS)
    yield Table(title, columns, rows, note + EXPLAINED)
    counts = [run["workers"] for run in runs]
    for key, axis in (("efficiency", "step of 1 worker / step"), ("samples per second", "samples/s of all workers")):
        lines = {name: [run["ms"][name][key] for run in runs] for name in runs[0]["ms"]}
        yield Curves(f"{title}: {key}", "workers", axis, counts, lines, note)
    yield bars(f"{title}: a step on {counts[-1]} workers", runs[-1]["ms"], note)

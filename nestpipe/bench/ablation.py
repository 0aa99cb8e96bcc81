"""`nestpipe bench ablation`: what each part of the nested schedule gains, in bytes, in exposed time and at the paper's scale.

bytes   sent per step, counted, when the batch is cut into N micro-batches: with and without the window cache (a row that
        has come serves all later micro-batches), and with samples that share keys put together (clustering).
links   two workers on links of a limited rate: how much of the communication each schedule leaves exposed. The compute is
        an emulated accelerator, longer than the communication; beside it, for sessions, a model that really computes.
mix     the shares of a step that the paper measured with 1,536 workers, emulated: lookup 49.6%, communication 20.8%,
        compute 29.6%; what each schedule makes of them.

`stale` is there for comparison: asynchronous prefetchers work so, it is NOT exact. Contestants take turns in the same
processes; what their figures mean stands in figures.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from nestpipe.bench import emulated
from nestpipe.bench.computing import Layers, layers_for
from nestpipe.bench.contestants import DIM, Law, alternate, compile_kernels, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import COLUMNS, EXPLAINED, bars, cells, verdict
from nestpipe.bench.links import links, throughput
from nestpipe.bench.mix import PAPER, Mix, mix_contestants
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown, shown_list
from nestpipe.trainer import Trainer

# -- what is measured, as data -----------------------------------------------------------------------------------------


CLUSTERINGS = ("none", "shared", "window")


@dataclasses.dataclass(frozen=True)
class Bytes:
    workers: Sequence[int] = (2,)
    laws: Sequence[Law] = (Law(1.05), Law(1.2), Law(1.05, per_user=8))
    cuts: Sequence[int] = (8, 32)
    samples: int = 512  # of a worker
    length: int = 50
    steps: int = 3

    @property
    def settings(self) -> list[Setting]:
        cut = itertools.product(self.cuts, (True, False), CLUSTERINGS)
        return [Setting("fwp", 1, clustering="none"), *(Setting("fwp", *options) for options in cut)]


@dataclasses.dataclass(frozen=True)
class Limited:
    """compute: FWD and BWD, as a multiple of the communication of a serial step without compute."""

    laws: Sequence[tuple[Law, int]] = ((Law(1.05), 512), (Law(1.05, per_user=4), 1536))  # and samples of a worker
    real: Sequence[bool] = (False, True)  # for each of them: also a model that really computes
    rate: str = "150mbit"
    length: int = 50
    compute: float = 1.4
    micro_batches: int = 8
    rounds: int = 3
    steps: int = 14

    @property
    def settings(self) -> list[Setting]:
        n = self.micro_batches
        return [
            Setting("serial"),
            Setting("dbp"),
            Setting("fwp", n, True, "window"),
            Setting("nested", n, True, "window"),
            Setting("nested", n, True, "taper"),
            Setting("nested", n, True, "none"),
            Setting("nested", n, False, "shared"),
            Setting("stale"),
        ]


QUICK_BYTES = Bytes(workers=(2,), laws=(Law(1.05), Law(1.05, per_user=8)), cuts=(8,), samples=64, steps=1)
QUICK_LIMITED = Limited(
    laws=((Law(1.05, per_user=4), 256),), real=(False,), rate="100mbit", micro_batches=4, rounds=1, steps=8
)
QUICK_MIX = Mix(workers=2, samples=32, length=10, step=0.3, cuts=(4,), rounds=1, steps=10, short=4)


def run(*, quick: bool) -> dict[str, Any]:
    return {
        "bytes": run_bytes(QUICK_BYTES if quick else Bytes()),
        "links": run_links(QUICK_LIMITED if quick else Limited()),
        "mix": run_mix(QUICK_MIX if quick else Mix()),
    }


# -- bytes -------------------------------------------------------------------------------------------------------------


def run_bytes(size: Bytes) -> list[dict[str, Any]]:
    results = []
    for workers in size.workers:
        tell(f"ablation: bytes, {workers} workers")
        results += run_workers(_count_bytes, size, workers=workers, threads=1)
    return results


def _count_bytes(size: Bytes) -> list[dict[str, Any]]:
    """Bytes per step that all workers together sent, for each setting; all train on the same batches."""
    results = []
    for law in size.laws:
        batches = pool_of(law, size.samples, size.length, count=size.steps)
        whole = 0.0
        for setting in size.settings:
            contestant = in_memory(setting, EmulatedModel(dim=DIM), batches, warm_up=len(batches))
            sent = contestant.trainer.bytes_sent() / len(batches)
            whole = whole or sent  # of the first setting, which does not cut the batch
            told = {"workers": contestant.trainer.world, "keys": law.name, **dataclasses.asdict(setting)}
            results.append({**told, "bytes": sent, "ratio": sent / whole})
    return results


# -- links -------------------------------------------------------------------------------------------------------------


def run_links(size: Limited) -> dict[str, Any]:
    with links(2, rate=size.rate) as made:
        measured = run_workers(_measure_links, size, workers=2, threads=1, links=made)
        return {"links": made.label, "why": made.why, "asked": size.rate, **measured}


def _measure_links(size: Limited) -> dict[str, Any]:
    load_everything()
    achieved = statistics.median(throughput() for _ in range(3))
    runs: list[dict[str, Any]] = []
    for (law, samples), real in zip(size.laws, size.real, strict=True):
        pool = pool_of(law, samples, size.length)
        alone = in_memory(Setting("serial"), EmulatedModel(dim=DIM), pool).block(size.steps)
        wanted = size.compute * alone["communication"] / 1e3
        emulate = partial(pad, seconds_per_token=wanted / (samples * size.length))
        models: list[tuple[str, Callable[[], nn.Module], Callable[[Trainer], None] | None]]
        models = [(emulated.LABEL, partial(EmulatedModel, dim=DIM), emulate)]
        if real:
            layers = layers_for(wanted * 1e3, pool, steps=size.steps // 2)
            models.append((f"CPU, {layers} layers", partial(Layers, layers), None))
        for compute, model, prepare in models:
            contestants = [in_memory(setting, model(), pool, prepare) for setting in size.settings]
            what = f"ablation: links, {law.name}, {compute}"
            rounds = alternate(contestants, rounds=size.rounds, steps=size.steps, what=what)
            told = {"keys": law.name, "samples": samples, "compute": compute}
            runs.append({**told, "ms": verdict(rounds), "rounds": rounds})
    return {"achieved_mbit": achieved, "runs": runs}


# -- mix ---------------------------------------------------------------------------------------------------------------


def run_mix(size: Mix) -> dict[str, Any]:
    tell(f"ablation: mix, {size.workers} workers")
    if size.workers > 2:
        compile_kernels()
    return {"size": dataclasses.asdict(size), **run_workers(_measure_mix, size, workers=size.workers, threads=1)}


def _measure_mix(size: Mix) -> dict[str, Any]:
    contestants, _ = mix_contestants(size, size.settings)
    rounds = alternate(contestants, rounds=size.rounds, steps=size.steps_of, what="ablation: mix")
    return {"ms": verdict(rounds), "rounds": rounds}


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    return [
        *bytes_sections(results["bytes"]),
        *links_sections(results["links"]),
        *mix_sections(results["mix"]),
    ]


def bytes_sections(results: list[dict[str, Any]]) -> Iterator[Section]:
    lines: dict[tuple[Any, ...], dict[bool, list[float]]] = {}
    megabytes: dict[tuple[Any, ...], float] = {}
    for sent in results:
        where = sent["workers"], sent["keys"]
        if sent["micro_batches"] == 1:
            megabytes[where] = sent["bytes"] / 1e6
        else:
            ratios = lines.setdefault((*where, sent["micro_batches"]), {True: [], False: []})
            ratios[sent["window_cache"]].append(sent["ratio"])
    rows = [
        (
            shown("{}", workers),
            keys,
            shown("{:.2f}", megabytes[workers, keys]),
            shown("{}", cut),
            *(shown_list("{:.3f}", ratios[cached]) for cached in (True, False)),
        )
        for (workers, keys, cut), ratios in lines.items()
    ]
    yield Table(
        "Bytes sent per step when the batch is cut into N micro-batches",
        ("workers", "keys", "one piece, MB", "N", "window cache", "no window cache"),
        rows,
        "Counted: keys, rows and gradients of all workers together, as a multiple of those of the batch in one piece, by "
        f"clustering ({' / '.join(CLUSTERINGS)}).",
    )


def links_sections(results: dict[str, Any]) -> Iterator[Section]:
    columns = (
        "keys", "compute", "schedule", *COLUMNS, "compute ms", "communication ms", "exposed, of the serial run's",
        "exposed, of its own", "step / longest lane",
    )  # fmt: skip
    rows = [
        (
            run["keys"],
            run["compute"],
            name,
            *cells(figures),
            shown("{:.0f}", figures["compute"]),
            shown("{:.0f}", figures["communication"]),
            shown("{:.1%}", figures["exposed of serial"]),
            shown("{:.1%}", figures["exposed of own"]),
            shown("{:.3f}", figures["step over longest lane"]),
        )
        for run in results["runs"]
        for name, figures in run["ms"].items()
    ]
    note = (
        f"2 workers on {results['links']}{' (' + results['why'] + ')' if results['why'] else ''}; when all send to all each "
        f"reaches {results['achieved_mbit']:.0f} Mbit/s. Compute is an {emulated.LABEL} or really computed (CPU), as the "
        "column says. Communication is EMB, GRAD, AGREE and REDUCE; of it the paper's fwp left 13.2% exposed, its nested "
        "12.8%, at 1,536 workers. "
    )
    yield Table("What is exposed on links of a limited rate", columns, rows, note + EXPLAINED)
    for run in results["runs"]:
        title = f"A step on {results['links']}: {run['keys']}, {run['compute']}"
        yield bars(title, run["ms"], f"Compute: {run['compute']}.")


def mix_sections(results: dict[str, Any]) -> Iterator[Section]:
    size = Mix(**{**results["size"], "law": Law(**results["size"]["law"])})
    whole = results["ms"]["serial"]["step"]
    schedules = {setting.name: setting.schedule for setting in size.settings}
    rows = []
    for name, figures in results["ms"].items():
        paper = PAPER[schedules[name]]
        rows.append(
            (
                name,
                *cells(figures),
                shown("({:.2f}x)", paper["speedup"]),
                shown("{:.1%} ({:.1%})", figures["exposed lookup"] / whole, paper["lookup"]),
                shown("{:.1%} ({:.1%})", figures["exposed communication"] / whole, paper["communication"]),
                shown("{:.3f}", figures["step over longest lane"]),
                shown("{:.3f}", figures["step over compute lane"]),
            )
        )
    columns = (
        "schedule", *COLUMNS, "(paper's speed-up)", "lookup exposed (paper)", "communication exposed (paper)",
        "step / longest lane", "step / compute lane",
    )  # fmt: skip
    note = (
        f"{size.lookup:.1%} lookup, {size.communication:.1%} communication, {size.compute:.1%} compute of a serial step, on "
        f"{size.workers} workers with an {emulated.LABEL}, emulated lookups and emulated links; at most "
        f"{1 / size.compute:.2f}x is possible. Shares are of the serial step; in brackets the paper's, from 1,536 real "
        "accelerators (its asynchronous prefetcher beside stale). "
    )
    yield Table("The paper's mix at 1,536 workers", columns, rows, note + EXPLAINED)
    yield bars("A step of the paper's mix", results["ms"], f"All of it on an {emulated.LABEL}.")

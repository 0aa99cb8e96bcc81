"""`nestpipe bench ablation`: what each part of the nested schedule gains, in bytes, in exposed time and at the paper's scale.

bytes   sent per step, counted, when the batch is cut into N micro-batches: with and without the window cache (a row that
        has come serves all later micro-batches), and with samples that share keys put together (clustering).
links   two workers on links of a limited rate: how much of the communication each schedule leaves exposed. The compute is
        an emulated accelerator, longer than the communication; beside it, for sessions, a model that really computes.
mix     the shares of a step that the paper measured with 1,536 workers, emulated: lookup 49.6%, communication 20.8%,
        compute 29.6%; what each schedule makes of them.

*Communication* is EMB, GRAD and AGREE. It is exposed while it runs and the compute lane runs nothing; on the compute lane
(serial, dbp) all of it is. Contestants take turns in the same processes; figures are from the trace of the steady state, the
largest over ranks, medians over rounds; ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nestpipe.batch import Batch, Output
from nestpipe.bench import emulated
from nestpipe.bench.contestants import DIM, POOL, Contestant, Law, Way, alternate, largest, pool, verdict
from nestpipe.bench.emulated import EmulatedModel, pad, samples_of
from nestpipe.bench.links import links, throughput
from nestpipe.bench.workers import run_workers
from nestpipe.engine.engine import Engine

# -- what is measured, as data -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes:
    workers: Sequence[int] = (2,)
    laws: Sequence[Law] = (Law(1.05), Law(1.2), Law(1.05, per_user=8))
    cuts: Sequence[int] = (8, 32)
    samples: int = 512  # of a worker
    length: int = 50
    steps: int = 3

    @property
    def ways(self) -> list[Way]:
        cut = itertools.product(("fwp",), self.cuts, (True, False), ("none", "shared", "window"))
        return [Way("fwp", 1), *(Way(*one) for one in cut)]


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
    def ways(self) -> list[Way]:
        n = self.micro_batches
        return [
            Way("serial"),
            Way("dbp"),
            Way("fwp", n, True, "window"),
            Way("nested", n, True, "window"),
            Way("nested", n, True, "taper"),
            Way("nested", n, True, "none"),
            Way("nested", n, False, "shared"),
        ]


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of the serial step. RETRIEVE and WRITEBACK together are the retrieval."""

    workers: int = 8
    law: Law = Law(1.05)
    samples: int = 128
    length: int = 20
    step: float = 3.0  # seconds, of the serial step; what is real in it is a few ms an operation
    prefetch: float = 0.146
    route: float = 0.10
    retrieve: float = 0.20
    writeback: float = 0.05
    communication: float = 0.208
    compute: float = 0.296
    cuts: Sequence[int] = (8, 16)
    rounds: int = 2
    steps: int = 12

    @property
    def ways(self) -> list[Way]:
        cut = itertools.product(("fwp", "nested"), self.cuts, (True,), ("window",))
        taper = [Way("nested", self.cuts[0], True, "taper")]
        return [Way("serial"), Way("dbp"), *(Way(*one) for one in cut), *taper]


# Shares of the serial step that are exposed, and speed-up, at 1,536 workers; the rest of the step is 1,713 ms of compute.
PAPER = {
    "serial": {"lookup": 0.496, "communication": 0.208, "speedup": 1.0},
    "dbp": {"lookup": 36 / 5794, "communication": 1169 / 5794, "speedup": 5794 / (1713 + 36 + 1169)},
    "fwp": {"lookup": 0.496, "communication": 160 / 5794, "speedup": 5794 / (1713 + 2871 + 160)},
    "nested": {"lookup": 30.19 / 5794, "communication": 154.23 / 5794, "speedup": 3.06},
}

QUICK_BYTES = Bytes(workers=(2,), laws=(Law(1.05), Law(1.05, per_user=8)), cuts=(8,), samples=64, steps=1)
QUICK_LIMITED = Limited(
    laws=((Law(1.05, per_user=4), 256),), real=(False,), rate="100mbit", micro_batches=4, rounds=1, steps=8
)
QUICK_MIX = Mix(workers=2, samples=32, length=10, step=0.3, cuts=(4,), rounds=1, steps=10)


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
        for law in size.laws:
            sent = run_workers(_count_bytes, size, law, workers=workers, threads=1)
            results += [
                {
                    "workers": workers,
                    "keys": law.name,
                    **dataclasses.asdict(way),
                    "bytes": count,
                    "ratio": count / sent[0],
                }
                for way, count in zip(size.ways, sent, strict=True)
            ]
    return results


def _count_bytes(size: Bytes, law: Law) -> list[float]:
    """Bytes per step that all workers together sent, for each way; all train on the same batches."""
    batches = pool(law, size.samples, size.length)[: size.steps]
    sent = []
    for way in size.ways:
        contestant = Contestant(way, EmulatedModel(dim=DIM), batches)
        contestant.train(len(batches))
        sent.append(contestant.trainer.bytes_sent() / len(batches))
    return sent


# -- links -------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Really computes: a stack of layers over every token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        x = rows["history"].values
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.1
        return Output(x.new_zeros(batch.size).index_add(0, samples_of(rows["history"].offsets), (x * x).mean(1)))


def run_links(size: Limited) -> dict[str, Any]:
    with links(2, rate=size.rate) as made:
        measured = run_workers(_measure_links, size, workers=2, threads=1, links=made)
        return {"links": made.label, "why": made.why, "asked": size.rate, **measured}


def _measure_links(size: Limited) -> dict[str, Any]:
    achieved = statistics.median(throughput() for _ in range(3))
    runs: list[dict[str, Any]] = []
    for (law, samples), real in zip(size.laws, size.real, strict=True):
        batches = pool(law, samples, size.length)
        probe = Contestant(Way("serial"), EmulatedModel(dim=DIM), batches)
        probe.train(POOL)
        alone = probe.block(size.steps)
        wanted = size.compute * alone["communication"] / 1e3
        emulate = partial(pad, seconds_per_token=wanted / (samples * size.length))
        models: list[tuple[str, Callable[[], nn.Module], Callable[[Engine], None] | None]]
        models = [(emulated.LABEL, partial(EmulatedModel, dim=DIM), emulate)]
        if real:
            layers = _layers(wanted * 1e3, batches, size.steps)
            models.append((f"CPU, {layers} layers", partial(Layers, layers), None))
        for compute, model, prepare in models:
            contestants = [Contestant(way, model(), batches, prepare) for way in size.ways]
            for one in contestants:
                one.block(POOL)  # rows born, kernels compiled, connections open
            rounds = alternate(contestants, rounds=size.rounds, steps=size.steps)
            told = {"keys": law.name, "samples": samples, "compute": compute}
            runs.append({**told, "ms": verdict(rounds), "rounds": rounds})
    return {"achieved_mbit": achieved, "runs": runs}


def _layers(wanted_ms: float, batches: list[Batch], steps: int) -> int:
    """How many layers compute that long; from figures of all ranks, so it is the same on all."""
    few, many = (Contestant(Way("serial"), Layers(layers), batches) for layers in (1, 5))
    for one in (few, many):
        one.block(2)
    a, b = (one.block(steps // 2)["compute"] for one in (few, many))
    return max(1, 1 + round((wanted_ms - a) / max(1e-3, (b - a) / 4)))


# -- mix ---------------------------------------------------------------------------------------------------------------


def run_mix(size: Mix) -> dict[str, Any]:
    return {"size": dataclasses.asdict(size), **run_workers(_measure_mix, size, workers=size.workers, threads=1)}


def _measure_mix(size: Mix) -> dict[str, Any]:
    rounds = alternate(mix_contestants(size, size.ways), rounds=size.rounds, steps=size.steps)
    return {"ms": verdict(rounds), "rounds": rounds}


def mix_contestants(size: Mix, ways: Sequence[Way]) -> list[Contestant]:
    """Trainers whose operations last as the mix says, warmed up. The first way is serial: its bytes give the links' rate."""
    batches = pool(size.law, size.samples, size.length)
    contestants = [Contestant(way, EmulatedModel(dim=DIM), batches) for way in ways]
    for one in contestants:
        one.train(POOL)  # rows born, kernels compiled, connections open
    seconds = {
        "PREFETCH": size.step * size.prefetch,
        "ROUTE": size.step * size.route,
        "RETRIEVE": size.step * size.retrieve,
        "WRITEBACK": size.step * size.writeback,
    }
    per_token = size.step * size.compute / (size.samples * size.length)
    per_byte = size.step * size.communication / _bytes_sent(contestants[0])
    for one in contestants:
        pad(one.trainer._engine, seconds, seconds_per_token=per_token, seconds_per_byte=per_byte)
        one.block(2)
    return contestants


def _bytes_sent(contestant: Contestant) -> float:
    """Of rows and gradients per step by the worker that sends most, for whom all others wait."""
    transport = contestant.trainer._ops.rows
    before = transport.bytes_sent
    contestant.train(POOL)
    return largest({"sent": (transport.bytes_sent - before) / POOL})["sent"]


# -- the result as text ------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    parts: list[str] = []
    for name, lines in (("bytes", bytes_table), ("links", links_table), ("mix", mix_table)):
        if name in results:
            parts += [*lines(results[name]), ""]
    return "\n".join(parts).rstrip()


def bytes_table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "Bytes sent per step by all workers (counted; keys, rows and gradients), as a multiple of those of the batch in one "
        "piece, by clustering (none / shared / window):"
    )
    yield ""
    yield "| workers | keys | one piece, MB | N | window cache | no window cache |"
    yield "| --- | --- | --- | --- | --- | --- |"
    lines: dict[tuple[Any, ...], dict[bool, list[str]]] = {}
    megabytes: dict[tuple[Any, ...], float] = {}
    for one in results:
        where = one["workers"], one["keys"]
        if one["micro_batches"] == 1:
            megabytes[where] = one["bytes"] / 1e6
        else:
            ratios = lines.setdefault((*where, one["micro_batches"]), {True: [], False: []})
            ratios[one["window_cache"]].append(f"{one['ratio']:.3f}")
    for (workers, keys, cut), ratios in lines.items():
        cached, again = (" / ".join(ratios[cache]) for cache in (True, False))
        yield f"| {workers} | {keys} | {megabytes[workers, keys]:.2f} | {cut} | {cached} | {again} |"


def links_table(results: dict[str, Any]) -> Iterator[str]:
    yield (
        f"2 workers on {results['links']}{' (' + results['why'] + ')' if results['why'] else ''}; when all send to all "
        f"each reaches {results['achieved_mbit']:.0f} Mbit/s. Communication (EMB, GRAD, AGREE) that is exposed:"
    )
    yield ""
    yield (
        "| keys | compute | schedule | step ms | speed-up | compute ms | communication ms | exposed ms | of the serial run's "
        "| of its own | step / longest lane |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for run in results["runs"]:
        for name, one in run["ms"].items():
            yield (
                f"| {run['keys']} | {run['compute']} | {name} | {one['step']:.0f} | {one['speedup']:.2f}x "
                f"| {one['compute']:.0f} | {one['communication']:.0f} | {one['exposed communication']:.1f} "
                f"| {one['exposed of serial']:.1%} | {one['exposed of own']:.1%} | {one['step over longest lane']:.3f} |"
            )


def mix_table(results: dict[str, Any]) -> Iterator[str]:
    size = results["size"]
    lookup = size["prefetch"] + size["route"] + size["retrieve"] + size["writeback"]
    yield (
        f"The paper's mix at 1,536 workers ({lookup:.1%} lookup, {size['communication']:.1%} communication, "
        f"{size['compute']:.1%} compute) on {size['workers']} workers with an {emulated.LABEL}, emulated lookups and emulated "
        f"links; at most {1 / size['compute']:.2f}x is possible. Exposed in % of the serial step; in brackets, the paper:"
    )
    yield ""
    yield (
        "| schedule | step ms | speed-up | step / longest lane | step / compute lane | exposed lookup "
        "| exposed communication |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    whole = results["ms"]["serial"]["step"]
    for name, one in results["ms"].items():
        paper = PAPER[name.split(",")[0]]
        yield (
            f"| {name} | {one['step']:.0f} | {one['speedup']:.2f}x ({paper['speedup']:.2f}x) "
            f"| {one['step over longest lane']:.3f} | {one['step over compute lane']:.3f} "
            f"| {one['exposed lookup'] / whole:.1%} ({paper['lookup']:.1%}) "
            f"| {one['exposed communication'] / whole:.1%} ({paper['communication']:.1%}) |"
        )

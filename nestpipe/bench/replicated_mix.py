"""The paper's mix (see mix.py) with replicas of the tables: what 2D sparse parallelism adds to `nested`, emulated.

What operations last follows from the published mix and from the profile fitted to it (simulate/fit.py): inside a group of 384
of 1,536 workers an all-to-all takes less, for fewer flows meet; what keeps replicas together takes its own time; and an owner
looks up the rows of its group, or, where replicas are kept exactly together, those of all groups. On a few workers here,
operations sleep that long, in proportion to the bytes that they really send.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nestpipe.bench import emulated
from nestpipe.bench.contestants import DIM, POOL, Contestant, alternate, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import largest, medians
from nestpipe.bench.mix import Mix
from nestpipe.bench.workers import run_workers
from nestpipe.config import read
from nestpipe.schedule.ops import AVERAGE, EMB, GRAD, MERGE, PREFETCH, RETRIEVE, ROUTE, WRITEBACK, Op
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown
from nestpipe.simulate import profile
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.fit import LARGE, MODEL, REPLICAS
from nestpipe.simulate.workload import Workload, of_config

ALONE = "1D"
PAPER = {ALONE: 1895.98, "2D averaged every step": 1822.0}  # milliseconds at 1,536 workers; it averages in every step


@dataclasses.dataclass(frozen=True)
class ReplicatedMix:
    mix: Mix = Mix(cuts=(8,))
    every: int = 8  # steps between averages, of one contestant


QUICK = ReplicatedMix(Mix(workers=4, samples=32, length=10, step=0.3, cuts=(4,), rounds=1, steps=10, short=4), every=2)


@dataclasses.dataclass(frozen=True)
class Lasts:
    """What a step's operations last on 1,536 workers, as parts of the published serial step: exchange inside a group, exchange
    between replicas; and how many times as many rows an owner looks up."""

    inside: float
    between: float
    rows: float


def measure(size: ReplicatedMix) -> dict[str, Any]:
    load, fitted = of_config(read(MODEL, ())), profile.read("npu-1536")
    lasts = {name: dataclasses.asdict(_lasts(size.mix, load, fitted, name, size.every)) for name in _names(size)}
    rounds = run_workers(_measure, size, lasts, workers=size.mix.workers, threads=1)
    return {"lasts": lasts, "rounds": rounds}


def _names(size: ReplicatedMix) -> list[str]:
    return [ALONE, "2D averaged every step", f"2D averaged every {size.every} steps", "2D exact"]


def _declared(name: str, every: int) -> dict[str, Any]:
    if name in (ALONE, "2D exact"):
        return {}
    return {"sync": "average", "sync_every": 1 if name.endswith("every step") else every}


def _lasts(mix: Mix, load: Workload, fitted: profile.Profile, name: str, every: int) -> Lasts:
    setting = Setting("serial") if name == ALONE else Setting("serial", replicas=REPLICAS, near="replicas")
    declared = _declared(name, every)
    averaged = load.averaged(declared["sync_every"]) if declared else load
    costs, alone = Costs(averaged, fitted, setting, LARGE), Costs(load, fitted, Setting("serial"), LARGE)

    def together(costs: Costs, *names: str) -> float:
        seconds = (costs(Op(name, 0)).together for name in names if costs.schedule.has(name))
        return sum(float(value) for value in seconds if value is not None)

    scale = mix.communication / together(alone, EMB, GRAD)
    return Lasts(
        scale * together(costs, EMB, GRAD), scale * together(costs, MERGE, AVERAGE), costs.held_rows / alone.held_rows
    )


def _measure(size: ReplicatedMix, lasts: Mapping[str, Mapping[str, float]]) -> dict[str, list[dict[str, float]]]:
    load_everything()
    mix = size.mix
    pool = pool_of(mix.law, mix.samples, mix.length)
    contestants = []
    for name, of_name in lasts.items():
        one = Setting("nested", mix.cuts[0], True, "window")
        # Half as many groups here where there are few workers; what operations last does not depend on it.
        replicas = min(REPLICAS, mix.workers // 2)
        setting = one if name == ALONE else dataclasses.replace(one, replicas=replicas)
        contestant = in_memory(setting, EmulatedModel(dim=DIM), pool, name=name, **_declared(name, size.every))
        _pad(contestant, mix, Lasts(**of_name))
        contestants.append(contestant)
    return alternate(contestants, rounds=mix.rounds, steps=mix.steps, what="two_d: mix")


def _pad(contestant: Contestant, mix: Mix, lasts: Lasts) -> None:
    sent = _bytes_by_operation(contestant)
    inside, between = sent.get(EMB, 0.0) + sent.get(GRAD, 0.0), sent.get(MERGE, 0.0) + sent.get(AVERAGE, 0.0)
    seconds = {
        PREFETCH: mix.prefetch,
        ROUTE: mix.route,
        RETRIEVE: mix.retrieve * lasts.rows,
        WRITEBACK: mix.writeback * lasts.rows,
    }
    pad(
        contestant.trainer,
        {name: mix.step * share for name, share in seconds.items()},
        seconds_per_token=mix.step * mix.compute / (mix.samples * mix.length),
        seconds_per_byte=mix.step * lasts.inside / inside,
        between_replicas=mix.step * lasts.between / between if between else 0.0,
    )
    contestant.recorded()  # forgets what ran before that


def _bytes_by_operation(contestant: Contestant) -> dict[str, float]:
    """Of rows and gradients per step by the worker that sends most."""
    trainer, counts = contestant.trainer, collections.Counter[str]()

    def around(task: Any, work: Any) -> None:
        before = trainer.sent.rows
        work()
        counts[task.op.name] += trainer.sent.rows - before

    trainer.around = around
    contestant.train(POOL)
    return largest({name: counts[name] / POOL for name in (EMB, GRAD, MERGE, AVERAGE)})


def sections(size: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Section]:
    rounds, lasts = results["rounds"], results["lasts"]
    rows = []
    for name, own in rounds.items():
        figures = medians(own)
        pairs = zip(rounds[ALONE], own, strict=True)
        ratio = sorted(a["step"] / b["step"] for a, b in pairs)[len(own) // 2]
        paper = PAPER[ALONE] / PAPER[name] if name in PAPER else None
        rows.append(
            (
                name,
                shown("{:.0f} ± {:.0f}", figures["step"], figures["iqr"]),
                shown("{:.3f}x", ratio),
                "" if paper is None else shown("({:.3f}x)", paper),
                shown("{:.0f}", figures["exposed communication"]),
                shown("{:.0f}", figures["exposed lookup"]),
                shown("{:.2f}", lasts[name]["inside"] / lasts[ALONE]["inside"]),
                shown("{:.2f}", lasts[name]["rows"]),
            )
        )
    columns = (
        "tables", "step ms ± IQR", "faster than 1D", "(paper)", "exposed communication ms", "exposed lookup ms",
        "all-to-all, of 1D's", "rows looked up, of 1D's",
    )  # fmt: skip
    mix = size["mix"]
    note = (
        f"`nested`, N = {mix['cuts'][0]}, on {mix['workers']} workers with an {emulated.LABEL}, emulated lookups and emulated "
        f"links: the published mix at 1,536 workers with {REPLICAS} replicas; what operations last with replicas is the "
        "simulator's (npu-1536). Exact replicas look up and update the rows of all groups: where lookups are half of a step, as "
        "here, that is more than they save."
    )
    yield Table("Replicas in the paper's mix", columns, rows, note)

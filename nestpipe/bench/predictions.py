"""`nestpipe bench simulator`: what the simulator predicts, against what is measured and against what was published.

published   a profile fitted to the peer's step on 128 and 1,536 workers predicts the other systems (simulate/fit.py).
beyond      our nested schedule on the same cluster, on more workers than anybody has tried.
ourselves   lab runs on 2, 4 and 8 workers (real exchanges over links of a set rate, emulated accelerator and lookups) under
            serial, dbp, fwp and nested. The profile knows operations from one worker and links from two.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from nestpipe import config
from nestpipe.bench import emulated, profiling
from nestpipe.bench.contestants import DIM, Law, alternate, compile_kernels, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import medians
from nestpipe.bench.links import Links, links
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.exchange.plan import ExchangePlan, Holders
from nestpipe.optim import RowwiseAdagrad
from nestpipe.schedule import ops as op
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown, shown_list
from nestpipe.simulate import fit, sweep
from nestpipe.simulate.keys import count
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import Profile, Work
from nestpipe.simulate.sweep import Prediction
from nestpipe.simulate.workload import PLACED, TableLoad, Workload, of_config
from nestpipe.tables import Feature
from nestpipe.tables import Table as Rows


@dataclasses.dataclass(frozen=True)
class Lab:
    """Seconds are of one worker's operations; rows and gradients really travel over links of each rate."""

    counts: Sequence[int] = (2, 4, 8)
    rates: Sequence[str] = ("50mbit", "200mbit")
    law: Law = Law(1.05)
    samples: int = 256
    length: int = 40
    prefetch: float = 0.15
    route: float = 0.12
    retrieve: float = 0.22
    writeback: float = 0.06
    compute: float = 0.5
    micro_batches: int = 8
    rounds: int = 1
    steps: int = 12
    short: int = 6  # of a schedule that hides no lookups

    @property
    def settings(self) -> list[Setting]:
        cut = [Setting(name, self.micro_batches, True, "window") for name in ("fwp", "nested")]
        return [Setting("serial"), Setting("dbp"), *cut]

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    def steps_of(self, setting: Setting) -> int:
        return self.steps if setting.hides_lookups else self.short


QUICK = Lab(
    counts=(2,), rates=("100mbit",), samples=64, length=10, prefetch=0.01, route=0.01, retrieve=0.02, writeback=0.01,
    compute=0.05, micro_batches=4, steps=8, short=4,
)  # fmt: skip


OURS = Setting("nested", 8, True, "window"), Setting("nested", 16, True, "taper")
BEYOND = (1536, 4096, 8192)


@dataclasses.dataclass(frozen=True)
class Compared(Prediction):
    """A prediction beside what was published. fitted: the profile was made from it. efficiency: of the prediction."""

    system: str
    fitted: bool
    published: float
    published_efficiency: float | None
    efficiency: float


def run(*, quick: bool) -> dict[str, Any]:
    return {**run_published(), "ourselves": run_lab(QUICK if quick else Lab())}


# -- against what was published ----------------------------------------------------------------------------------------


def run_published() -> dict[str, Any]:
    tell("simulator: the published cluster")
    load = of_config(config.read(fit.MODEL))
    npu = fit.npu_1536(load)
    compared = [
        Compared(
            **dataclasses.asdict(prediction),
            system=published.system,
            fitted=published.fitted,
            published=published.step,
            published_efficiency=published.efficiency,
            efficiency=efficiency,
        )
        for published, prediction, efficiency in fit.against_published(load, npu)
    ]
    beyond = [
        {"line": dataclasses.asdict(line), "power": dataclasses.asdict(power)}
        for setting in OURS
        for line, power in fit.beyond(load, npu, setting, (fit.SMALL, *BEYOND))
    ]
    begin = time.perf_counter()
    sweep.predict(load, dataclasses.replace(npu, jitter=0.05), OURS[0], 8192, steps=20)
    seconds = time.perf_counter() - begin
    return {"published": list(map(dataclasses.asdict, compared)), "beyond": beyond, "seconds_for_8192": seconds}


# -- against ourselves -------------------------------------------------------------------------------------------------


def run_lab(size: Lab) -> dict[str, Any]:
    if max(size.counts) > 2:
        compile_kernels()
    tell("simulator: operations of one worker")
    operations = run_workers(_measure_operations, size, workers=1, threads=1)
    tell("simulator: links between two workers")
    with links(2, rate=size.rates[0]) as made:
        levels = run_workers(_measure_links, size, made, workers=2, threads=1, links=made)
    measured: list[dict[str, Any]] = []
    for workers in size.counts:
        with links(workers, rate=size.rates[0]) as made:
            measured += run_workers(_measure_steps, size, made, workers=workers, threads=1, links=made)
    works = {name: Work(**work) for name, work in operations.items()}
    profiles = {rate: lab_profile(works, Level(**level)) for rate, level in levels.items()}
    return {
        "size": dataclasses.asdict(size),
        "links": made.label if not made.namespaces else "links of a set rate",
        "why": made.why,
        "operations": operations,
        "levels": levels,
        "measured": measured,
        "predicted": predict_lab(size, profiles, measured),
    }


def _padded(size: Lab) -> Any:
    seconds = {
        op.PREFETCH: size.prefetch,
        op.ROUTE: size.route,
        op.RETRIEVE: size.retrieve,
        op.WRITEBACK: size.writeback,
    }
    return partial(pad, seconds=seconds, seconds_per_token=size.compute / size.tokens)


def _measure_operations(size: Lab) -> dict[str, dict[str, float]]:
    """Of a batch in one piece and of one cut into micro-batches: {operation: {fixed, each}}."""
    load_everything()
    pool = pool_of(size.law, size.samples, size.length)
    seconds = []
    for setting in (Setting("fwp", size.micro_batches, True, "window"), Setting("serial")):
        contestant = in_memory(setting, EmulatedModel(dim=DIM), pool)
        _padded(size)(contestant.trainer)
        contestant.recorded()
        contestant.train(size.steps)
        seconds.append(profiling.operations(contestant.recorded()))
    cut = (op.EMB, op.FWD, op.BWD, op.GRAD)
    load = workload(size)
    whole = {op.EMB: _row_bytes(load), op.GRAD: _row_bytes(load), op.FWD: size.tokens, op.BWD: size.tokens}
    units = [
        {name: whole[name] / parts if name in cut else 1.0 for name in op.OPERATIONS}
        for parts in (size.micro_batches, 1)
    ]
    works = profiling.lines(list(zip(seconds, units, strict=True)))
    return {name: dataclasses.asdict(work) for name, work in works.items()}


def _row_bytes(load: Workload) -> float:
    return sum(table.travelling(1) for table in load.tables)


def _measure_links(size: Lab, made: Links) -> dict[str, dict[str, float]]:
    levels = {}
    for rate in size.rates:
        _set_rate(made, rate)
        levels[rate] = dataclasses.asdict(profiling.link())
    return levels


def _set_rate(made: Links, rate: str) -> None:
    dist.barrier()
    if made.namespaces and dist.get_rank() == 0:
        made.change_rate(rate)
    dist.barrier()


def _measure_steps(size: Lab, made: Links) -> list[dict[str, Any]]:
    load_everything()
    pool = pool_of(size.law, size.samples, size.length)
    contestants = [in_memory(setting, EmulatedModel(dim=DIM), pool) for setting in size.settings]
    for contestant in contestants:
        _padded(size)(contestant.trainer)
        contestant.recorded()
    measured = []
    for rate in size.rates:
        _set_rate(made, rate)
        what = f"simulator: {dist.get_world_size()} workers, {rate}"
        rounds = alternate(contestants, rounds=size.rounds, steps=size.steps_of, what=what)
        for name, own in rounds.items():
            measured.append({"workers": dist.get_world_size(), "rate": rate, "setting": name, **medians(own)})
    return measured


def workload(size: Lab) -> Workload:
    """As a worker of the lab has it; an operation of the model is a token."""
    seeds = np.random.SeedSequence(0).generate_state(8)
    batches = [size.law.batch(size.samples, size.length, seed=int(seed)) for seed in seeds]
    table, feature = Rows("item", DIM, optimizer=RowwiseAdagrad(lr=0.01)), Feature("history", "item")
    growth = count([batch.keys["history"].values.numpy() for batch in batches])
    return Workload(
        name="lab",
        samples=size.samples,
        input_bytes=0.0,
        tables=[TableLoad("item", DIM, size.tokens, growth, record=4 * (DIM + 1), key_bytes=4)],
        dense_bytes=4.0 * DIM,
        forward_flops=size.tokens,
        backward_flops=size.tokens,
        batches=batches,
        plan=ExchangePlan([table], [feature], [Holders(np.arange(PLACED))]),
    )


def lab_profile(works: Mapping[str, Work], level: Level) -> Profile:
    """All workers share this machine's cores; what sleeps until its time is over needs none of them."""
    per_unit = {op.EMB, op.GRAD, op.FWD, op.BWD}
    return Profile(
        name="lab",
        network=Network(1, level, level),
        operations={name: work if name in per_unit else Work(work.fixed + work.each) for name, work in works.items()},
        cores=os.cpu_count() or 1,
        hosted=(op.H2D, op.SYNC, op.EMB, op.REDUCE, op.AGREE, op.GRAD, op.UPDATE, op.DENSE),
    )


def predict_lab(
    size: Lab, profiles: Mapping[str, Profile], measured: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What was measured, each as it is predicted. profiles: by rate of the links."""
    load = workload(size)
    settings = {setting.name: setting for setting in size.settings}
    predicted = []
    for run in measured:
        setting, profile = settings[run["setting"]], profiles[run["rate"]]
        prediction = sweep.predict(load, profile, setting, run["workers"], steps=max(size.steps, 12))
        predicted.append({**dataclasses.asdict(prediction), "error": prediction.step / run["step"] - 1})
    return predicted


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    return [*published_sections(results), *lab_sections(results["ourselves"])]


def published_sections(results: dict[str, Any]) -> Iterator[Section]:
    rows = []
    for compared in (Compared(**values) for values in results["published"]):
        known = compared.published_efficiency
        rows.append(
            (
                compared.system + (" (fitted)" if compared.fitted else ""),
                compared.setting,
                shown("{:,.0f}", compared.published),
                shown("{:,.0f}", compared.step),
                shown("{:+.1%}", compared.step / compared.published - 1),
                "" if known is None else shown("{:.1%}", known),
                shown("{:.1%}", compared.efficiency),
                "" if known is None else shown("{:+.1f}", 100 * (compared.efficiency - known)),
                shown("{:,.0f} / {:,.0f}", compared.exposed_lookup, compared.exposed_communication),
            )
        )
    columns = ("system", "simulated as", "published ms", "predicted ms", "difference", "published efficiency", "predicted",
               "points", "exposed lookup / communication, predicted ms")  # fmt: skip
    note = (
        "A step on 1,536 workers, and its scaling efficiency against 128. Profile npu-1536, fitted to TorchRec's lookup and "
        "communication on 128 and 1,536 workers and to NestPipe's dense time; all else is predicted."
    )
    yield Table("Predicted and published steps", columns, rows, note)
    yield beyond_table(results)


def beyond_table(results: dict[str, Any]) -> Table:
    grown = [(Prediction(**values["line"]), Prediction(**values["power"])) for values in results["beyond"]]
    smallest = {line.setting: (line, power) for line, power in grown if line.workers == fit.SMALL}
    rows = []
    for line, power in grown:
        if line.workers == fit.SMALL:
            continue
        pairs = list(zip((line, power), smallest[line.setting], strict=True))
        rows.append(
            (
                line.setting,
                shown("{:,}", line.workers),
                shown_list("{:,.0f}", [now.step for now, _ in pairs]),
                shown_list("{:.1%}", [now.utilization for now, _ in pairs]),
                shown_list("{:.1%}", [then.step / now.step for now, then in pairs]),
                " / ".join(f"{now.limit}: {now.limit_op}" for now, _ in pairs),
            )
        )
    columns = ("setting", "workers", "step ms", "utilization", "efficiency against 128", "limited by")
    note = (
        "Ours, on npu-1536. Two values each: lookups and time per byte grow along the line, or along the power of the number of "
        "workers, that goes through what was published on 128 and 1,536. Nobody has measured beyond. 8,192 workers with jitter, "
        f"each for itself, 20 steps: simulated in {results['seconds_for_8192']:.1f} s."
    )
    return Table("Beyond 1,536 workers", columns, rows, note)


def lab_sections(results: dict[str, Any]) -> Iterator[Section]:
    rows = []
    for measured, predicted in zip(results["measured"], results["predicted"], strict=True):
        rows.append(
            (
                measured["setting"],
                shown("{}", measured["workers"]),
                measured["rate"],
                shown("{:.0f}", measured["step"]),
                shown("{:.0f}", predicted["step"]),
                shown("{:+.1%}", predicted["error"]),
                shown("{:.0f}", measured["exposed communication"]),
                shown("{:.0f}", predicted["exposed_communication"]),
                shown("{:.2f}", measured["bytes"] / 1e6),
                shown("{:.2f}", predicted["sent"] / 1e6),
            )
        )
    errors = [abs(predicted["error"]) for predicted in results["predicted"]]
    columns = ("schedule", "workers", "links", "measured ms", "predicted ms", "error", "exposed communication measured",
               "predicted", "MB sent measured", "predicted")  # fmt: skip
    note = (
        f"Median error {statistics.median(errors):.1%}, largest {max(errors):.1%}. Measured on {results['links']}"
        f"{' (' + results['why'] + ')' if results['why'] else ''} with an {emulated.LABEL} and emulated lookups; rows and "
        "gradients really travel. Predicted from operations of one worker and links between two."
    )
    yield Table("Predicted and measured steps", columns, rows, note)

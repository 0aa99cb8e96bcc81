"""Schedules on counts of workers: what a step takes, what of it is exposed, and what limits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nestpipe.schedule.ops import BWD, COMMUNICATION, FWD, LOOKUP, of_kind
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Bars, Curves, Section, Table, shown
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.events import Simulated, simulate
from nestpipe.simulate.profile import Profile
from nestpipe.simulate.workload import Workload
from nestpipe.trace import summary
from nestpipe.trace.figures import figures

STEPS = 20
LOOKED_AT = 4  # workers whose figures are averaged: all are held together by what they do together


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one setting on one count of workers; milliseconds per step, means over the workers looked at.

    lookup, communication: what they take, exposed or not. limit: the busiest lane; limit_op: what it does most of the time.
    sent: bytes of rows and gradients that a worker sends to others per step.
    """

    setting: str
    schedule: str
    workers: int
    step: float
    compute: float
    lookup: float
    communication: float
    exposed_lookup: float
    exposed_communication: float
    longest_lane: float
    limit: str
    limit_op: str
    samples_per_second: float
    sent: float

    @property
    def utilization(self) -> float:
        return self.compute / self.step


def run(
    workload: Workload, profile: Profile, setting: Setting, workers: int, *, steps: int = STEPS, seed: int = 0
) -> tuple[Simulated, Costs]:
    costs = Costs(workload, profile, setting, workers, seed=seed)
    return simulate(costs.schedule, costs, steps=steps, counts=costs.counts), costs


def predict(
    workload: Workload, profile: Profile, setting: Setting, workers: int, *, steps: int = STEPS, seed: int = 0
) -> Prediction:
    simulated, costs = run(workload, profile, setting, workers, steps=steps, seed=seed)
    traces = [simulated.trace(w) for w in range(min(len(costs.counts), LOOKED_AT))]
    ranks = [figures(trace) for trace in traces]
    mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
    first = summary(traces[:1])[0]
    busiest = first.busiest.lane
    most = max((time for time in first.ops if time.lane == busiest), key=lambda time: time.ms).op
    sent = costs.moved_bytes * (sum(costs.split.rows) + sum(costs.split.grads)) * (costs.group - 1) / costs.group
    return Prediction(
        setting=setting.name,
        schedule=setting.schedule,
        workers=workers,
        step=mean["step"],
        compute=mean["compute"],
        lookup=mean["lookup"],
        communication=mean["communication"],
        exposed_lookup=mean["exposed lookup"],
        exposed_communication=mean["exposed communication"],
        longest_lane=mean["longest lane"],
        limit=busiest,
        limit_op="the model" if most in (FWD, BWD) else most,
        samples_per_second=workers * workload.samples * 1e3 / mean["step"],
        sent=sent,
    )


def sweep(
    workload: Workload,
    profile: Profile,
    settings: Sequence[Setting],
    counts: Sequence[int],
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> list[Prediction]:
    return [
        predict(workload, profile, setting, workers, steps=steps, seed=seed)
        for setting in settings
        for workers in counts
    ]


# -- the result --------------------------------------------------------------------------------------------------------


def efficiencies(predictions: Sequence[Prediction]) -> list[float]:
    """Step on the fewest workers of the same setting / step: every worker keeps its batch."""
    fewest = {
        prediction.setting: prediction for prediction in sorted(predictions, key=lambda prediction: -prediction.workers)
    }
    return [fewest[prediction.setting].step / prediction.step for prediction in predictions]


def _serial(predictions: Sequence[Prediction]) -> dict[int, float]:
    """The step where nothing is hidden, by the number of workers."""
    return {
        prediction.workers: prediction.step for prediction in predictions if Setting(prediction.schedule).hides_nothing
    }


def results(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    serial = _serial(predictions)
    return [
        {
            **dataclasses.asdict(prediction),
            "utilization": prediction.utilization,
            "efficiency": efficiency,
            "speedup": serial[prediction.workers] / prediction.step if prediction.workers in serial else None,
        }
        for prediction, efficiency in zip(predictions, efficiencies(predictions), strict=True)
    ]


def sections(predictions: Sequence[Prediction], note: str) -> Iterator[Section]:
    """note: what was simulated."""
    serial = _serial(predictions)
    scaling = efficiencies(predictions)
    rows = [
        (
            prediction.setting,
            shown("{:,}", prediction.workers),
            shown("{:,.1f}", prediction.step),
            shown("{:.2f}x", serial[prediction.workers] / prediction.step) if prediction.workers in serial else "",
            shown("{:.1%}", efficiency),
            shown("{:.1%}", prediction.utilization),
            shown("{:,.0f}", prediction.samples_per_second),
            shown("{:,.1f} of {:,.1f}", prediction.exposed_lookup, prediction.lookup),
            shown("{:,.1f} of {:,.1f}", prediction.exposed_communication, prediction.communication),
            f"{prediction.limit}: {prediction.limit_op}",
        )
        for prediction, efficiency in zip(predictions, scaling, strict=True)
    ]
    columns = ("setting", "workers", "step ms", "speed-up", "efficiency", "utilization", "samples/s of all",
               "exposed lookup ms", "exposed communication ms", "busiest lane")  # fmt: skip
    told = (
        f"{note} Predicted, not measured. Speed-up over serial on as many workers; efficiency is the step on the fewest workers "
        f"/ the step, every worker keeping its batch; utilization is forward and backward / step. Lookup is "
        f"{', '.join(of_kind(LOOKUP))}; communication {', '.join(of_kind(COMMUNICATION))}."
    )
    yield Table("Simulated steps", columns, rows, told)
    counts = sorted({prediction.workers for prediction in predictions})
    settings = list(dict.fromkeys(prediction.setting for prediction in predictions))
    by = {
        (prediction.setting, prediction.workers): (prediction, efficiency)
        for prediction, efficiency in zip(predictions, scaling, strict=True)
    }
    if len(counts) > 1:
        lines = {name: [by[name, count][1] for count in counts] for name in settings}
        yield Curves(
            "Scaling efficiency (simulated)", "workers", "step on the fewest workers / step", counts, lines, note
        )
        lines = {name: [by[name, count][0].samples_per_second for count in counts] for name in settings}
        yield Curves("Throughput (simulated)", "workers", "samples/s of all workers", counts, lines, note)
    largest = [by[name, counts[-1]][0] for name in settings]
    parts = {
        "compute": [prediction.compute for prediction in largest],
        "exposed lookup": [prediction.exposed_lookup for prediction in largest],
        "exposed communication": [prediction.exposed_communication for prediction in largest],
    }
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["rest"] = [max(0.0, prediction.step - sum_) for prediction, sum_ in zip(largest, sums, strict=True)]
    bounds = {"longest lane": [prediction.longest_lane for prediction in largest]}
    yield Bars(f"A step on {counts[-1]:,} workers (simulated)", "ms", settings, parts, bounds, note)

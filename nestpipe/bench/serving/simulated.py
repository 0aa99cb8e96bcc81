"""A fleet that is not here: the same router, trigger, cache and policy, with costs as measured on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.capacity import STEP, expected
from nestpipe.bench.serving.lab import FULL, WAYS, Lab, Way
from nestpipe.sections import Curves, Section, Table, shown
from nestpipe.serve.costs import Costs, Law
from nestpipe.serve.fleet import Fleet, Report, simulate
from nestpipe.serve.requests import Settings
from nestpipe.serve.server import WAIT
from nestpipe.serve.trigger import Bounds
from nestpipe.sizes import num_bytes


@dataclasses.dataclass(frozen=True)
class Size:
    """requests: of a point, for each instance; at least `seconds` of them."""

    instances: int = 200
    requests: int = 60
    warm_up: float = 0.4
    steps: int = 8


QUICK = Size(instances=20, requests=30, steps=3)


def measure(lab: Lab, size: Size) -> dict[str, Any]:
    """Each contestant goes up a ladder of rates until it misses the SLO at two steps."""
    conditions = lab.conditions
    costs = Costs(*(_fixed(law) for law in (lab.costs.ranking, lab.costs.prefix, lab.costs.copy)))
    per_instance = expected(lab, conditions.load) / conditions.instances
    rates = [per_instance * STEP**step for step in range(-1, size.steps - 1)]
    found: dict[str, Any] = {}
    for way in WAYS:
        tell(f"serving: {size.instances} simulated instances, {way.name}")
        fleet = Fleet(size.instances, _settings(lab, way), costs, affinity=way.affinity, warm_up=size.warm_up)
        points: list[dict[str, Any]] = []
        for rate in rates:
            load = dataclasses.replace(
                conditions.load,
                rate=rate * size.instances,
                users=conditions.load.users * size.instances // conditions.instances,
            )
            points.append(_point(rate, simulate(fleet, load, requests=size.requests * size.instances)))
            if sum(not point["keeps"] for point in points) == 2:
                break
        found[way.name] = {
            "points": points,
            "highest": max((point["rate"] for point in points if point["keeps"]), default=0.0),
        }
    return {"slo": lab.slo, "instances": size.instances, "rates": rates, "ways": found}


def _fixed(law: Law) -> Law:
    return Law(law.coefficients, learns=False)


def _settings(lab: Lab, way: Way) -> Settings:
    conditions = lab.conditions
    return Settings(
        slo=lab.slo,
        wait=WAIT * lab.slo,
        device_bytes=num_bytes(conditions.device_memory),
        host_bytes=num_bytes(conditions.host_memory) if way.host else 0,
        bytes_per_token=lab.scorer.bytes_per_token,
        relay=way.relay,
        trigger=way.trigger,
        bounds=Bounds(reuse=True),
    )


def _point(rate: float, report: Report) -> dict[str, Any]:
    return {
        "rate": rate,
        "keeps": report.kept >= 0.99,
        "kept": report.kept,
        "goodput": report.goodput,
        "p99": 1e3 * report.latency(0.99),
        "relayed": report.relayed,
        "busy": float(report.busy.mean()),
        "rejected": report.rejected,
    }


def sections(results: Mapping[str, Any]) -> list[Section]:
    ways, count = results["ways"], results["instances"]
    reference = ways[FULL.name]["highest"]
    rows = []
    for name, found in ways.items():
        there = next((point for point in found["points"] if point["rate"] == found["highest"]), None)
        rows.append(
            (
                name,
                shown("{:,.0f}", found["highest"] * count),
                shown("{:.2f}x", found["highest"] / reference) if reference else "",
                *(
                    (shown("{:.0f}", there["p99"]), shown("{:.0%}", there["relayed"]), shown("{:.0%}", there["busy"]))
                    if there
                    else ("", "", "")
                ),
            )
        )
    rates = results["rates"]
    lines = {
        name: [next((point["goodput"] for point in found["points"] if point["rate"] == rate), None) for rate in rates]
        for name, found in ways.items()
    }
    note = (
        f"Simulated: {count} instances, the code that decides in a server, costs as measured here, the same load for "
        f"each instance. "
        f"Steps of {STEP:g}x; {1e3 * results['slo']:.0f} ms at P99."
    )
    return [
        Table(
            f"A simulated fleet of {count} instances",
            ("contestant", "highest rate /s", "over full pass", "P99 ms there", "relayed", "busy"),
            rows,
            note,
        ),
        Curves(
            "Goodput of the simulated fleet",
            "offered, /s",
            "answered within the SLO, /s",
            [rate * count for rate in rates],
            lines,  # type: ignore[arg-type]
            note,
        ),
    ]

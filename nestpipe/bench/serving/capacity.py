"""The highest rate that is kept within the SLO, and what is beyond it.

Rates are steps of one ladder, for all contestants the same, so that goodput can be drawn over them. A contestant climbs
until two steps, more than twice the rate, above the last one that it keeps; then the place between that one and the next
is halved.

Contestants take turns, a point each, so that a machine that is slow for some minutes is slow for all of them. A rate that is
missed narrowly is measured twice more, and the median of the three counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from nestpipe.bench.serving.figures import KEPT, Figures
from nestpipe.bench.serving.lab import FULL, Lab, Way
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Curves, Section, Table, shown
from nestpipe.serve.load import Load, lengths

STEP = 1.5
NARROWLY = 0.95  # share in time from which on a miss may be the machine's


@dataclasses.dataclass(frozen=True)
class Ladder:
    """base: rate of step 0; what is expected of the full pass if left out. lowest, highest: steps. halvings: of the last
    one."""

    base: float | None = None
    halvings: int = 2
    lowest: int = -4
    highest: int = 7


@dataclasses.dataclass
class Climb:
    """points: by rate."""

    points: dict[float, Figures]

    @property
    def highest(self) -> float:
        """Rate that was kept within the SLO; 0: none was."""
        return max((rate for rate, found in self.points.items() if found.keeps), default=0.0)

    @property
    def peak(self) -> float:
        return max(found.goodput for found in self.points.values())

    @property
    def overload(self) -> float | None:
        """Goodput at twice the highest rate that it keeps, or a little more, over its peak."""
        beyond = [rate for rate in self.points if rate >= 2 * self.highest > 0]
        return self.points[min(beyond)].goodput / self.peak if beyond else None


def climb(measures: Mapping[str, Callable[[float], Figures]], base: float, ladder: Ladder) -> dict[str, Climb]:
    """Of each contestant. base: the rate of step 0, where everyone begins."""
    climbers = {name: _climb(base, ladder) for name in measures}
    rates = {name: next(climber) for name, climber in climbers.items()}
    found: dict[str, Climb] = {}
    while rates:
        for name, rate in list(rates.items()):
            try:
                rates[name] = climbers[name].send(_settled(measures[name], rate))
            except StopIteration as end:
                found[name] = end.value
                del rates[name]
    return found


def _climb(base: float, ladder: Ladder) -> Generator[float, Figures, Climb]:
    """Yields rates, and is sent what was found at each."""
    points: dict[float, Figures] = {}

    def keeps(rate: float) -> Generator[float, Figures, bool]:
        points[rate] = yield rate
        return points[rate].keeps

    steps = [base * STEP**number for number in range(ladder.lowest, ladder.highest + 1)]
    at = last = -ladder.lowest
    if not (yield from keeps(steps[at])):
        while last > 0 and not points[steps[last]].keeps:
            last -= 1
            yield from keeps(steps[last])
    while at + 1 < len(steps) and at < last + 2:
        at += 1
        if (yield from keeps(steps[at])):
            last = at
    low, high = steps[last], steps[min(last + 1, len(steps) - 1)]
    for _ in range(ladder.halvings if low < high and points[low].keeps else 0):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (yield from keeps(middle)) else (low, middle)
    return Climb(points)


def _settled(measure: Callable[[float], Figures], rate: float) -> Figures:
    found = [measure(rate)]
    if NARROWLY <= found[0].kept < KEPT:
        found += [measure(rate), measure(rate)]
    return sorted(found, key=lambda figures: figures.kept)[len(found) // 2]


def measure(lab: Lab, services: Mapping[Way, Service], ladder: Ladder, load: Load) -> dict[str, Any]:
    """Contestants, each on its server."""

    def of(way: Way, service: Service) -> Callable[[float], Figures]:
        return lambda rate: lab.measure(service, way, dataclasses.replace(load, rate=rate))

    measures = {way.name: of(way, service) for way, service in services.items()}
    return {
        name: {
            "highest": found.highest,
            "peak": found.peak,
            "overload": found.overload,
            "points": [{"rate": rate, **found.points[rate].to_json()} for rate in sorted(found.points)],
        }
        for name, found in climb(measures, base_rate(lab, ladder, load), ladder).items()
    }


def results(lab: Lab, ladder: Ladder, load: Load, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of several contestants together, for `sections`."""
    return {"slo": lab.slo, "base": base_rate(lab, ladder, load), "load": dataclasses.asdict(load), "ways": dict(ways)}


def base_rate(lab: Lab, ladder: Ladder, load: Load) -> float:
    return ladder.base or expected(lab, load)


def expected(lab: Lab, load: Load) -> float:
    """A rate that full passes should keep: a third of the instances' time."""
    mean = sum(lab.costs.full_pass(int(length), load.candidates) for length in lengths(load)) / load.users
    return lab.conditions.instances / mean / 3


# -- the result --------------------------------------------------------------------------------------------------------

COLUMNS = ("contestant", "highest rate /s", "over full pass", "P50 / P95 / P99 ms there", "relayed", "peak goodput /s",
           "goodput kept at 2x", "generator late ms")  # fmt: skip


def sections(results: Mapping[str, Any], *, title: str = "Highest rate within the SLO") -> list[Section]:
    ways, slo = results["ways"], results["slo"]
    reference = ways.get(FULL.name, {}).get("highest", 0.0)
    table = Table(
        title,
        COLUMNS,
        [_row(name, found, reference) for name, found in ways.items()],
        f"{KEPT:.0%} of all requests answered within {1e3 * slo:.0f} ms from when they were due; those turned away "
        f"count as late. "
        f"{in_words(results['load'])}",
    )
    rates = sorted({rate for found in ways.values() for rate in on_ladder(found, results["base"])})
    lines = {name: on_ladder(found, results["base"]) for name, found in ways.items()}
    note = f"Requests per second; SLO {1e3 * slo:.0f} ms."
    return [
        table,
        _curves("Goodput", "answered within the SLO, /s", rates, lines, "goodput", note),
        _curves("Latency at P99", "ms", rates, lines, "p99", note + " Of those that were answered."),
    ]


def on_ladder(found: Mapping[str, Any], base: float) -> dict[float, Mapping[str, Any]]:
    """The points that all contestants may have; rates rounded, so that they are the same numbers."""
    steps = {round(base * STEP**number, 6) for number in range(-20, 20)}
    return {round(point["rate"], 6): point for point in found["points"] if round(point["rate"], 6) in steps}


def _curves(
    title: str, axis: str, rates: Sequence[float], lines: Mapping[str, Mapping[float, Any]], figure: str, note: str
) -> Curves:
    values = {
        name: [points[rate][figure] if rate in points else None for rate in rates] for name, points in lines.items()
    }
    return Curves(title, "offered, /s", axis, rates, values, note)  # type: ignore[arg-type]


def _row(name: str, found: Mapping[str, Any], reference: float) -> tuple[str, ...]:
    there = next((point for point in found["points"] if point["rate"] == found["highest"]), None)
    late = max(point["lag"] for point in found["points"])
    overload = found["overload"]
    return (
        name,
        shown("{:.1f}", found["highest"]),
        shown("{:.2f}x", found["highest"] / reference) if reference else "",
        shown("{:.0f} / {:.0f} / {:.0f}", there["p50"], there["p95"], there["p99"]) if there else "",
        shown("{:.0%}", there["relayed"]) if there else "",
        shown("{:.1f}", found["peak"]),
        shown("{:.0%}", overload) if overload is not None else "",
        shown("{:.1f}", late) + (" (too late)" if any(point["behind"] for point in found["points"]) else ""),
    )


def in_words(load: Mapping[str, Any]) -> str:
    """The law, in a sentence or two."""
    return (
        f"{load['users']:,} users, the k-th most active in proportion to k^-{load['popularity']:g}; sessions of "
        f"{load['session']:g} "
        f"requests in the mean, {load['pause']:g} s apart in the median; histories of {load['length']:,.0f} items in "
        f"the median (sigma "
        f"of the log {load['length_spread']:g}), up to {load['longest']:,}, {load['growth']:g} more at each visit; "
        f"{load['candidates']} "
        f"candidates; {1e3 * (load['retrieval'] + load['preprocessing']):.0f} ms from signal to request in the mean."
    )

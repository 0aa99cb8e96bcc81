"""Each of the three techniques left out, at the rate that all of them together keep; what prefixes cost, and what was in
vain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nestpipe.bench.serving.lab import ANYWHERE, HOST, RELAY, UNTRIGGERED, Lab, Way
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Bars, Section, Table, shown
from nestpipe.serve.requests import Source
from nestpipe.serve.trigger import Reason

NAMES = {
    HOST: "all three",
    UNTRIGGERED: "no trigger",
    ANYWHERE: "no router (no affinity)",
    RELAY: "no expander (no host tier)",
}
FULL_PASSES = (Source.FULL, Source.GAVE_UP, Source.UNUSABLE)


def measure(lab: Lab, service: Service, way: Way, rate: float) -> dict[str, Any]:
    """One contestant, on its server."""
    return lab.measure(service, way, dataclasses.replace(lab.conditions.load, rate=rate)).to_json()


def sections(results: Mapping[str, Any]) -> list[Section]:
    ways = {name: results["ways"][way.name] for way, name in NAMES.items()}
    rows = [
        (
            name,
            shown("{:.1%}", found["kept"]),
            shown("{:.0f} / {:.0f}", found["p50"], found["p99"]),
            shown("{:.1f}", found["goodput"]),
            shown("{:.0%}", found["relayed"]),
            *(
                shown("{:.1%}", found["sources"].get(source.name.lower(), 0) / max(1, found["answered"]))
                for source in FULL_PASSES
            ),
            shown("{:.0f}", _of(found, "computations")),
            shown("{:.0%}", _of(found, "wasted") / max(1.0, _of(found, "computations"))),
            shown("{:.0f}", found["rejected"]),
        )
        for name, found in ways.items()
    ]
    columns = ("techniques", "in time", "P50 / P99 ms", "goodput /s", "relayed", "no prefix", "prefix late", "prefix unusable",
               "prefixes computed", "of these wasted", "turned away")  # fmt: skip
    signals = Table(
        "What became of signals",
        ("techniques", *(reason.name.lower().replace("_", " ") for reason in Reason)),
        [
            (name, *(shown("{:,}", found["signals"].get(reason.name.lower(), 0)) for reason in Reason))
            for name, found in ways.items()
        ],
        "; ".join(f"*{reason.name.lower().replace('_', ' ')}*: {reason.value}" for reason in Reason) + ".",
    )
    note = (
        f"All at {results['rate']:.1f} requests/s, SLO {1e3 * results['slo']:.0f} ms. Wasted: prefixes that were "
        f"dropped without any "
        f"ranking having used them, over those computed meanwhile (warm-up included)."
    )
    shares = {
        source.value: [
            found["sources"].get(source.name.lower(), 0) / max(1, found["answered"]) for found in ways.values()
        ]
        for source in Source
    }
    return [
        Table("Each technique left out", columns, rows, note),
        signals,
        Bars("Where answers came from", "of answers", list(ways), shares),
    ]


def _of(found: Mapping[str, Any], counter: str) -> float:
    """By how much a counter of the caches rose."""
    return sum(value for name, value in found["server"].items() if counter in name and "tokens" not in name)

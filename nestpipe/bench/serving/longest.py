"""The longest history at a fixed rate: all users have about the same number of items, and the number grows until the SLO
is missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.bench.serving.lab import FULL, Lab, Way
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Section, Table, shown


def measure(lab: Lab, services: Mapping[Way, Service], lengths: Sequence[int], rate: float) -> dict[str, Any]:
    """Contestants in turns, each on its server. lengths: rising; two that miss the SLO end a contestant's search."""
    points: dict[Way, list[dict[str, Any]]] = {way: [] for way in services}
    for length in lengths:
        law = dataclasses.replace(
            lab.conditions.load,
            rate=rate,
            length=float(length),
            length_spread=0.0,
            longest=lab.conditions.ranker.longest,
        )
        for way, service in services.items():
            if sum(not point["keeps"] for point in points[way]) < 2:
                figures = lab.measure(service, way, law)
                points[way].append({"length": length, "keeps": figures.keeps, **figures.to_json()})
    return {
        way.name: {"points": found, "longest": max((point["length"] for point in found if point["keeps"]), default=0)}
        for way, found in points.items()
    }


def sections(results: Mapping[str, Any]) -> list[Section]:
    ways, lengths = results["ways"], results["lengths"]
    reference = ways[FULL.name]["longest"]
    rows = []
    for name, found in ways.items():
        by_length = {point["length"]: point for point in found["points"]}
        ratio = shown("{:.2f}x", found["longest"] / reference) if reference else ""
        cells = [shown("{:.0f}", by_length[length]["p99"]) if length in by_length else "" for length in lengths]
        rows.append((name, shown("{:,}", found["longest"]), ratio, *cells))
    return [
        Table(
            f"Longest history at {results['rate']:.1f} requests/s",
            (
                "contestant",
                "longest within the SLO",
                "over full pass",
                *(f"P99 ms at {length:,}" for length in lengths),
            ),
            rows,
            f"All histories of about this length; SLO {1e3 * results['slo']:.0f} ms. Two lengths that miss it end the search.",
        )
    ]

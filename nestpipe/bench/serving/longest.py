"""The longest history at a fixed rate: all users have about the same number of items, and the number grows until the SLO is missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.bench.serving.lab import FULL, HOST, Lab
from nestpipe.sections import Section, Table, shown


def measure(lab: Lab, lengths: Sequence[int], rate: float) -> dict[str, Any]:
    """lengths: rising. Each contestant goes up them until it misses two of them."""
    longest = lab.conditions.ranker.longest
    found: dict[str, Any] = {}
    for way in (FULL, HOST):
        points = []
        with lab.serving(way) as service:
            for length in lengths:
                law = dataclasses.replace(
                    lab.conditions.load, rate=rate, length=float(length), length_spread=0.0, longest=longest
                )
                figures = lab.measure(service, way, law)
                points.append({"length": length, "keeps": figures.keeps, **figures.to_json()})
                if sum(not point["keeps"] for point in points) == 2:
                    break
        found[way.name] = {
            "points": points,
            "longest": max((point["length"] for point in points if point["keeps"]), default=0),
        }
    return {"slo": lab.slo, "rate": rate, "lengths": list(lengths), "ways": found}


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
            ("contestant", "longest within the SLO", "over full pass", *(f"P99 ms at {length:,}" for length in lengths)),
            rows,
            f"All histories of about this length; SLO {1e3 * results['slo']:.0f} ms. Two lengths that miss it end the search.",
        )
    ]

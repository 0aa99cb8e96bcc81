"""Scores of every source against the full pass, and random operations on the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.checking import CLOSE
from nestpipe.bench.serving.lab import Lab
from nestpipe.sections import Section, Table, shown
from nestpipe.serve.fuzz import fuzz


def measure(lab: Lab, operations: int) -> dict[str, Any]:
    """Of all points that the lab has measured so far. A violation is an AssertionError that names it."""
    tell(f"serving: {operations:,} random operations on the cache")
    begin = time.perf_counter()
    happened = fuzz(operations)
    return {
        "checked": lab.checked,
        "wrong": lab.wrong,
        "worst": lab.worst,
        "operations": operations,
        "seconds": time.perf_counter() - begin,
        "happened": happened,
    }


def sections(results: Mapping[str, Any]) -> list[Section]:
    kinds = ", ".join(
        f"{name} {count:,}" for name, count in sorted(results["happened"].items(), key=lambda item: -item[1])
    )
    row = (
        shown("{:,}", results["checked"]),
        shown("{}", results["wrong"]),
        shown("{:.1e}", results["worst"]),
        shown("{:,}", results["operations"]),
        "0",
        shown("{:.0f}", results["seconds"]),
    )
    columns = ("answers checked", "wrong", "largest difference", "operations on the cache", "violations", "s")
    note = (
        f"Answers of all measurements against the bundle's full pass, relative to the largest score of the request; "
        f"wrong above {CLOSE:g}. "
        f"Operations: {kinds}."
    )
    return [Table("Equal scores, and no violation", columns, [row], note)]

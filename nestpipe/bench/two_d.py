"""`nestpipe bench two_d`: tables of which every group of workers holds a replica (2D sparse parallelism).

moment scaling  what replicas that average their rows do to the steps of AdaGrad, and what the scales of
                `ScaledRowwiseAdagrad` make of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.bench import moments
from nestpipe.sections import Section


def run(*, quick: bool) -> dict[str, Any]:
    size = moments.QUICK if quick else moments.FULL
    return {
        "moments": {
            "size": dataclasses.asdict(size),
            "ratios": moments.measure(size),
            "cost": moments.measure_cost(size),
        }
    }


def sections(results: dict[str, Any]) -> list[Section]:
    return moments.sections(**results["moments"])

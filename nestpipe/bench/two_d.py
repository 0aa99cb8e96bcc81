"""`nestpipe bench two_d`: tables of which every group of workers holds a replica (2D sparse parallelism).

moment scaling  what replicas that average their rows do to the steps of AdaGrad, and what the scales of
                `ScaledRowwiseAdagrad` make of it.
mix             the paper's mix at 1,536 workers, emulated, with replicas.
groups          workers in groups with slow links between them: one group of all, and replicas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.bench import groups, moments, replicated_mix
from nestpipe.sections import Section


def run(*, quick: bool) -> dict[str, Any]:
    size = moments.QUICK if quick else moments.FULL
    mix = replicated_mix.QUICK if quick else replicated_mix.ReplicatedMix()
    lab = groups.QUICK if quick else groups.Groups()
    return {
        "moments": {
            "size": dataclasses.asdict(size),
            "ratios": moments.measure(size),
            "cost": moments.measure_cost(size),
        },
        "mix": {"size": dataclasses.asdict(mix), "results": replicated_mix.measure(mix)},
        "groups": {"size": dataclasses.asdict(lab), "runs": groups.measure(lab)},
    }


def sections(results: dict[str, Any]) -> list[Section]:
    parts = {"moments": moments, "mix": replicated_mix, "groups": groups}
    return [section for name, part in parts.items() for section in part.sections(**results[name])]

"""What comes of a comparison with TorchRec: `compare` makes it in the peers' environment, `suite` tells it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from nestpipe.bench.alternate import Timing

SERIAL, DENSE = "nestpipe serial", "dense only"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One workload over one link; by contestant where it is a dict.

    mbit_per_second: that went through when all sent to all.
    difference: of rows, relative, after both trained a small copy of the workload.
    facts: bytes of tables on all workers, and what else a side says of itself.
    best, best_peer: the fastest pipelined nestpipe and the fastest TorchRec.
    speedup: of each nestpipe over the fastest TorchRec.
    over_dense_ms: what a step takes beyond the dense part alone.
    """

    workload: str
    keys: str
    link: str
    mbit_per_second: float
    difference: float
    timings: dict[str, Timing]
    facts: dict[str, dict[str, Any]]
    best: str
    best_peer: str
    speedup: dict[str, float]
    over_dense_ms: dict[str, float]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Comparison:
        timings = {name: Timing(**timing) for name, timing in values["timings"].items()}
        return cls(**{**values, "timings": timings})

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.keys} keys"


def verdict(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """The fastest pipelined nestpipe against the fastest TorchRec. Ratios and differences are taken within a round, then the
    median over rounds: what the machine does to all contestants of a round cancels out."""

    def fastest(names: list[str]) -> str:
        return min(names, key=lambda name: timings[name].median_ms)

    def over_dense(name: str) -> float:
        both = zip(timings[name].rounds_ms, timings[DENSE].rounds_ms, strict=True)
        return statistics.median(mine - floor for mine, floor in both)

    def speedup(name: str, peer: str) -> float:
        both = zip(timings[name].rounds_ms, timings[peer].rounds_ms, strict=True)
        return statistics.median(theirs / mine for mine, theirs in both)

    ours = [name for name in timings if name.startswith("nestpipe")]
    best_peer = fastest([name for name in timings if name.startswith("torchrec")])
    return {
        "best": fastest([name for name in ours if name != SERIAL]),
        "best_peer": best_peer,
        "speedup": {name: speedup(name, best_peer) for name in ours},
        "over_dense_ms": {name: over_dense(name) for name in timings if name != DENSE},
    }

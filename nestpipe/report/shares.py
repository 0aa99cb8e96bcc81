"""What a step's time goes to: parts that add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestpipe.report.sources import Run
from nestpipe.schedule.ops import COMMUNICATION, LOOKUP, of_kind
from nestpipe.sections import Bars
from nestpipe.trace import COMPUTE, RankSummary, RankTrace
from nestpipe.trace.times import covered, union

PARTS = ("compute", "exposed communication", "exposed lookup", "nothing runs")
NOTE = (
    "Per step, mean over ranks, in the steady state. *Compute* is forward, backward and updates. Communication (of rows, their "
    "gradients and dense gradients) and lookup (reading, routing, finding and writing rows) count as far as they are "
    "exposed: on the compute lane, or while it runs nothing. Where both run then, it counts as communication. The "
    "mark is the run's longest lane: with the same operations on the same lanes no step can be shorter."
)


def chart(runs: Sequence[Run], labels: Sequence[str]) -> Bars:
    """Of runs that were recorded."""
    found = [shares(run) for run in runs]
    return Bars(
        title="What a step's time goes to",
        unit="ms",
        labels=labels,
        parts={name: [one[name] for one in found] for name in PARTS if any(one[name] for one in found)},
        bounds={"longest lane": [longest_lane(run) for run in runs]},
        note=NOTE,
    )


def longest_lane(run: Run) -> float:
    """Busy milliseconds per step of each rank's busiest lane, mean over ranks."""
    return float(np.mean([rank.busiest.busy_ms for rank in run.ranks]))


def shares(run: Run) -> dict[str, float]:
    """Milliseconds per step, mean over ranks."""
    ranks = [_shares_of(trace, rank) for trace, rank in zip(run.traces, run.ranks, strict=True)]
    return {name: float(np.mean([one[name] for one in ranks])) for name in PARTS}


def _shares_of(trace: RankTrace, rank: RankSummary) -> dict[str, float]:
    columns = trace.columns
    start, end = (times.clip(*rank.window_ns) for times in (columns.start, columns.end))
    mine = columns.lane == trace.lanes.index(COMPUTE)
    names = np.array(columns.names)[columns.op]
    waiting = [np.isin(names, kind) for kind in (of_kind(COMMUNICATION), of_kind(LOOKUP))]
    parts: dict[str, float] = {}
    taken = mine  # what compute does meanwhile, or what was counted already
    for name, kind in zip(PARTS, (~np.any(waiting, axis=0), *waiting), strict=False):
        elsewhere = kind & ~mine
        begins, ends = union(start[elsewhere], end[elsewhere])
        waited = (ends - begins - covered(begins, ends, union(start[taken], end[taken]))).sum()
        parts[name] = float((end - start)[kind & mine].sum() + waited) / 1e6 / rank.steps
        taken = taken | elsewhere
    parts[PARTS[-1]] = max(0.0, rank.mean_step_ms - sum(parts.values()))
    return parts

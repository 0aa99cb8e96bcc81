"""What a step's time goes to: parts that add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestpipe.bench.sections import Bars
from nestpipe.report.sources import Run
from nestpipe.schedule.ops import COMMUNICATION, LOOKUP, PREFETCH, of_kind
from nestpipe.trace import COMPUTE, RankSummary, RankTrace
from nestpipe.trace.times import covered, union

WAITING, DATA = "waiting for another rank", "waiting for data"
PARTS = ("compute", WAITING, "exposed communication", "exposed lookup", "nothing runs")
NOTE = (
    "Per step, mean over ranks, in the steady state. *Compute* is forward, backward and updates. *Communication* (rows, their "
    "gradients, sums over workers) and *lookup* (reading, routing, finding and writing rows) count as far as they are "
    "exposed: on the compute lane, or while it runs nothing. *Waiting for another rank* is the part of them until the last "
    "rank has come. The mark is the run's longest lane: with the same operations on the same lanes no step can be shorter."
)


def chart(runs: Sequence[Run], labels: Sequence[str]) -> Bars:
    """Of runs that were recorded."""
    of_runs = [shares(run) for run in runs]
    return Bars(
        title="What a step's time goes to",
        unit="ms",
        labels=labels,
        parts={name: [parts[name] for parts in of_runs] for name in PARTS if any(parts[name] for parts in of_runs)},
        bounds={"longest lane": [longest_lane(run) for run in runs]},
        note=NOTE,
    )


def longest_lane(run: Run) -> float:
    """Busy milliseconds per step of each rank's busiest lane, mean over ranks."""
    return float(np.mean([rank.busiest.busy_ms for rank in run.ranks]))


def shares(run: Run) -> dict[str, float]:
    """Milliseconds per step, mean over ranks: PARTS, and of the exposed lookup what is waiting for DATA alone."""
    ranks = rank_shares(run)
    return {name: float(np.mean([parts[name] for parts in ranks])) for name in ranks[0]}


def rank_shares(run: Run) -> list[dict[str, float]]:
    return [_shares_of(*of_rank) for of_rank in zip(run.traces, run.ranks, run.waits, strict=True)]


def _shares_of(trace: RankTrace, rank: RankSummary, waited: np.ndarray) -> dict[str, float]:
    columns = trace.columns
    start, met, end = (t.clip(*rank.window_ns) for t in (columns.start, columns.start + waited, columns.end))
    here = columns.lane == trace.lanes.index(COMPUTE)
    names = np.array(columns.names)[columns.op]
    communication, lookup = (np.isin(names, of_kind(kind)) for kind in (COMMUNICATION, LOOKUP))
    data = names == PREFETCH
    # Where several run while compute runs nothing, the time counts for the first of these.
    groups = (
        ("compute", ~communication & ~lookup, start, end),
        ("exposed communication", communication, met, end),
        (WAITING, communication, start, met),
        ("exposed lookup", lookup & ~data, met, end),
        (WAITING, lookup & ~data, start, met),
        (DATA, data, start, end),
    )
    parts = dict.fromkeys((*PARTS, DATA), 0.0)
    taken = union(start[here], end[here])
    for name, of_group, begins, ends in groups:
        elsewhere = union(begins[of_group & ~here], ends[of_group & ~here])
        exposed = (elsewhere[1] - elsewhere[0] - covered(*elsewhere, taken)).sum()
        parts[name] += float((ends - begins)[of_group & here].sum() + exposed) / 1e6 / rank.steps
        taken = union(*(np.concatenate(pair) for pair in zip(taken, elsewhere, strict=True)))
    parts["exposed lookup"] += parts[DATA]
    counted = sum(parts[name] for name in PARTS[:-1])
    return parts | {PARTS[-1]: max(0.0, rank.mean_step_ms - counted)}

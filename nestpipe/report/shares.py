"""What a step's time goes to: parts that add up to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from nestpipe.report.sources import Run
from nestpipe.schedule.ops import COMMUNICATION, LOOKUP, PREFETCH, of_kind
from nestpipe.sections import Bars
from nestpipe.trace import COMPUTE, RankSummary, RankTrace
from nestpipe.trace.times import covered, union

MAX_KEPT = 64  # runs on one page, of which each figure is computed once
WAITING, DATA, NOTHING_RUNS = "waiting for another rank", "waiting for data", "nothing runs"
PARTS = ("compute", WAITING, "exposed communication", "exposed lookup", NOTHING_RUNS)
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
    """Milliseconds per step of the busiest lane of all ranks, without what it waited for another rank."""
    waited = waiting(run)
    return max(
        lane.busy_ms - sum(ms for (name, _), ms in of_rank.items() if name == lane.lane)
        for rank, of_rank in zip(run.ranks, waited, strict=True)
        for lane in rank.lanes
    )


@functools.lru_cache(MAX_KEPT)
def waiting(run: Run) -> list[dict[tuple[str, str], float]]:
    """Of each rank, by lane and operation: milliseconds per step that it waited for the last rank to come."""
    of_ranks = []
    for trace, rank, waited in zip(run.traces, run.ranks, run.waits, strict=True):
        columns = trace.columns
        start, met = (times.clip(*rank.window_ns) for times in (columns.start, columns.start + waited))
        of_rank = {}
        for lane, op in {*zip(columns.lane[waited > 0].tolist(), columns.op[waited > 0].tolist(), strict=True)}:
            chosen = (columns.lane == lane) & (columns.op == op)
            of_rank[trace.lanes[lane], columns.names[op]] = float((met - start)[chosen].sum()) / 1e6 / rank.steps
        of_ranks.append(of_rank)
    return of_ranks


def shares(run: Run) -> dict[str, float]:
    """Milliseconds per step, mean over ranks: PARTS, and of the exposed lookup what is waiting for DATA alone."""
    ranks = rank_shares(run)
    return {name: float(np.mean([parts[name] for parts in ranks])) for name in ranks[0]}


@functools.lru_cache(MAX_KEPT)
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
    return parts | {NOTHING_RUNS: max(0.0, rank.mean_step_ms - counted)}

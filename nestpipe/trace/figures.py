"""Figures of one rank's trace, in milliseconds per step of the steady state.

step                    the mean of the measured steps, without the ends, where the pipeline fills and drains.
iqr                     of the single steps.
compute                 FWD and BWD: the model.
communication, lookup   the operations of that kind (schedule/ops.py).
exposed communication   runs while the compute lane runs nothing else. On the compute lane all of it is.
exposed lookup          the same of lookup, without the time in which communication is exposed.
longest lane            busy time of the busiest lane: no step can be shorter.
compute lane            busy time of that lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nestpipe.schedule.ops import BWD, COMMUNICATION, COMPUTE, FWD, LOOKUP, of_kind
from nestpipe.trace.record import RankTrace
from nestpipe.trace.times import OpTime, RankSummary, covered, steady_steps, summary, union

Figures = dict[str, float]


def figures(trace: RankTrace) -> Figures:
    """Milliseconds per step of this rank. Of the time in which compute runs nothing, what communication takes counts for it
    alone: lookup that happens to run then is not what compute waits for."""
    rank = summary([trace])[0]
    low, high = np.percentile(np.diff(steady_steps(trace).bounds) / 1e6, (25, 75))

    def total(names: Sequence[str], of: Callable[[OpTime], float]) -> float:
        return sum(of(op) for op in rank.ops if op.op in names)

    return {
        "step": rank.mean_step_ms,
        "iqr": float(high - low),
        "compute": total((FWD, BWD), lambda op: op.ms),
        "communication": total(of_kind(COMMUNICATION), lambda op: op.ms),
        "exposed communication": total(of_kind(COMMUNICATION), lambda op: op.exposed_ms),
        "lookup": total(of_kind(LOOKUP), lambda op: op.ms),
        "exposed lookup": _exposed_lookup(trace, rank),
        "longest lane": rank.busiest.busy_ms,
        "compute lane": rank.lane(COMPUTE).busy_ms,
    }


def _exposed_lookup(trace: RankTrace, rank: RankSummary) -> float:
    columns, compute = trace.columns, trace.lanes.index(COMPUTE)
    start, end = columns.start.clip(*rank.window_ns), columns.end.clip(*rank.window_ns)
    lookup, communication = (
        np.isin(columns.op, [columns.names.index(name) for name in names if name in columns.names])
        for names in (of_kind(LOOKUP), of_kind(COMMUNICATION))
    )
    here = lookup & (columns.lane == compute)
    hiding = (columns.lane == compute) | communication
    elsewhere = union(start[lookup & ~hiding], end[lookup & ~hiding])
    hidden = covered(*elsewhere, by=union(start[hiding], end[hiding]))
    waited = (end - start)[here].sum() + (elsewhere[1] - elsewhere[0] - hidden).sum()
    return float(waited) / 1e6 / rank.steps

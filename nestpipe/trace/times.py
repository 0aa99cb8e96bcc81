"""How long each lane and each operation took per step, and how much of it the compute lane could not hide.

*Busy*: the lane runs an operation. *Idle*: it runs none; busy + idle is the step.
*Exposed*: of a lane other than compute, the time in which it is busy while the compute lane runs nothing, that is, the
time by which it may have held training up. Of the compute lane everything is exposed, so in a serial run, which has
only that lane, every operation is.

A *step* lies between the ends of consecutive DENSEs in the compute lane (of a batch without one there: the end of its
last operation in that lane); the first begins with the first operation. All figures are of the steady state: the first
and last few steps, in which the pipeline fills and drains, are left out where there are enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nestpipe.schedule.ops import COMPUTE, DENSE
from nestpipe.trace.record import Columns, RankTrace

SKIP = 5  # steps left out at each end; the look-ahead of the deepest pipeline is below it


@dataclasses.dataclass(frozen=True)
class LaneTime:
    """Milliseconds per step of one lane of one rank."""

    lane: str
    busy_ms: float
    idle_ms: float
    exposed_ms: float


@dataclasses.dataclass(frozen=True)
class OpTime:
    """One operation in one lane of one rank: how many ended in the measured steps, and milliseconds per step."""

    op: str
    lane: str
    count: int
    ms: float
    exposed_ms: float


@dataclasses.dataclass(frozen=True)
class RankSummary:
    """One rank in the steady state.

    steps, skipped: measured, and left out at each end; first_batch, last_batch: of the measured steps.
    step_ms: median step. mean_step_ms: what busy and idle add up to; far above the median where something (an
        evaluation, a checkpoint) stood between two steps.
    exposed_ms: per step, in which compute runs nothing while at least one other lane does.
    window_ns: begin and end of the measured steps, in the rank's own time.
    """

    rank: int
    steps: int
    skipped: int
    first_batch: int
    last_batch: int
    step_ms: float
    mean_step_ms: float
    exposed_ms: float
    window_ns: tuple[int, int]
    lanes: list[LaneTime]
    ops: list[OpTime]

    def lane(self, name: str) -> LaneTime:
        return next(lane for lane in self.lanes if lane.lane == name)

    @property
    def busiest(self) -> LaneTime:
        return max(self.lanes, key=lambda lane: lane.busy_ms)

    @property
    def step_over_busiest(self) -> float:
        """Mean step / busy time of the busiest lane: 1.0 is a pipeline that its slowest lane alone holds up."""
        return self.mean_step_ms / self.busiest.busy_ms


@dataclasses.dataclass(frozen=True)
class Steps:
    """Step i is of batches[i] and lies between bounds[i] and bounds[i + 1], in nanoseconds of the rank."""

    batches: np.ndarray
    bounds: np.ndarray
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.batches)


def summary(traces: Sequence[RankTrace], *, skip: int = SKIP) -> list[RankSummary]:
    """The figures of each rank. At most `skip` steps are left out at each end, and at least half of them are kept."""
    return [_summarise(trace, skip) for trace in traces]


def steady_steps(trace: RankTrace, *, skip: int = SKIP) -> Steps:
    """The steps that count: recorded in all lanes, without pipeline fill and drain."""
    if skip < 0:
        raise ValueError(f"skip must be at least 0, got {skip}")
    steps = _all_steps(trace)
    skipped = min(skip, len(steps) // 4)
    kept = slice(skipped, len(steps) - skipped)
    return Steps(steps.batches[kept], steps.bounds[skipped : len(steps.bounds) - skipped], skipped)


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same points of time as disjoint intervals in order, without empty ones."""
    order = np.argsort(start[end > start], kind="stable")
    start, end = start[end > start][order], end[end > start][order]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    opens = np.concatenate([[True], start[1:] > reach[:-1]])
    return start[opens], reach[np.concatenate([opens[1:], [True]])]


def covered(start: np.ndarray, end: np.ndarray, by: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """How much of each interval lies in `by`, which is disjoint and in order."""
    begins, ends = by
    if not len(begins):
        return np.zeros_like(start)
    before = np.concatenate([[0], np.cumsum(ends - begins)])  # covered time before interval i of `by`

    def until(time: np.ndarray) -> np.ndarray:
        last = np.searchsorted(begins, time, side="right") - 1
        inside = np.minimum(time, ends[last]) - begins[last]
        return np.where(last < 0, 0, before[last] + inside)

    return until(end) - until(start)


def _summarise(trace: RankTrace, skip: int) -> RankSummary:
    steps = steady_steps(trace, skip=skip)
    begin, end = int(steps.bounds[0]), int(steps.bounds[-1])
    num_steps = len(steps)

    def per_step(nanoseconds: np.ndarray) -> float:
        return float(nanoseconds.sum()) / 1e6 / num_steps

    columns = trace.columns
    counted = (columns.end > begin) & (columns.end <= end)
    starts, ends = columns.start.clip(begin, end), columns.end.clip(begin, end)
    compute = trace.lanes.index(COMPUTE)
    computing = union(starts[columns.lane == compute], ends[columns.lane == compute])

    def exposed(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return end - start - covered(start, end, computing)

    mean_step_ms = (end - begin) / 1e6 / num_steps
    lanes, ops = [], []
    for index, lane in enumerate(trace.lanes):
        mine = columns.lane == index
        busy = union(starts[mine], ends[mine])
        busy_ms = per_step(busy[1] - busy[0])
        exposed_ms = busy_ms if index == compute else per_step(exposed(*busy))
        lanes.append(LaneTime(lane, busy_ms, mean_step_ms - busy_ms, exposed_ms))
        codes, first = np.unique(columns.op[mine][np.argsort(columns.start[mine], kind="stable")], return_index=True)
        for code in codes[np.argsort(first)].tolist():
            of_op = mine & (columns.op == code)
            start, stop = starts[of_op], ends[of_op]
            ms = per_step(stop - start)
            exposed_ms = ms if index == compute else per_step(exposed(start, stop))
            ops.append(OpTime(columns.names[code], lane, int(counted[of_op].sum()), ms, exposed_ms))
    others = columns.lane != compute
    return RankSummary(
        rank=trace.rank,
        steps=num_steps,
        skipped=steps.skipped,
        first_batch=int(steps.batches[0]),
        last_batch=int(steps.batches[-1]),
        step_ms=float(np.median(np.diff(steps.bounds))) / 1e6,
        mean_step_ms=mean_step_ms,
        exposed_ms=per_step(exposed(*union(starts[others], ends[others]))),
        window_ns=(begin, end),
        lanes=lanes,
        ops=ops,
    )


def _all_steps(trace: RankTrace) -> Steps:
    columns = trace.columns
    computing = columns.lane == trace.lanes.index(COMPUTE)
    if not computing.any():
        raise ValueError(
            f"the trace of rank {trace.rank} has no operation in the lane {COMPUTE!r}: no step was recorded"
        )
    batches, of = np.unique(columns.batch[computing], return_inverse=True)
    ends, ops = columns.end[computing], columns.op[computing]
    last = np.full(len(batches), np.iinfo(np.int64).min)
    np.maximum.at(last, of, ends)
    if DENSE in columns.names:
        updates = ops == columns.names.index(DENSE)
        updated = np.full(len(batches), np.iinfo(np.int64).min)
        np.maximum.at(updated, of[updates], ends[updates])
        last = np.where(updated == np.iinfo(np.int64).min, last, updated)
    order = np.argsort(last, kind="stable")
    batches, bounds = batches[order], np.concatenate([[columns.start.min()], last[order]])
    if trace.dropped:
        batches, bounds = _recorded_in_all_lanes(columns, batches, bounds)
    return Steps(batches, bounds)


def _recorded_in_all_lanes(columns: Columns, batches: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the steps before, or after, some lane's first or last kept operation: there it only looks idle."""
    lanes = [columns.lane == lane for lane in np.unique(columns.lane)]
    begin = max(columns.start[mine].min() for mine in lanes)
    end = min(columns.end[mine].max() for mine in lanes)
    whole = np.flatnonzero((bounds >= begin) & (bounds <= end))
    if len(whole) < 2:
        return batches, bounds  # no step is whole; a rough figure is better than none
    return batches[whole[0] : whole[-1]], bounds[whole[0] : whole[-1] + 1]

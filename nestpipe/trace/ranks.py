"""Ranks laid side by side: what each of them waited for another inside a collective, and the run without its pauses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nestpipe.schedule.ops import AGREE, OPERATIONS
from nestpipe.trace.record import Event, RankTrace
from nestpipe.trace.times import steady_steps, union

COLLECTIVES = tuple(name for name, operation in OPERATIONS.items() if operation.collective is not None)


def waits(traces: Sequence[RankTrace]) -> list[np.ndarray]:
    """Of each event of each rank the nanoseconds, from its start, until the last rank had begun the same operation of the same
    batch; 0 where it meets nobody. What is left of a collective is the exchange itself.

    A rank that ends before the last one begins (a sum that was already there) has waited for its whole duration.
    """
    rank_waits = [np.zeros(len(trace.events), np.int64) for trace in traces]
    if len(traces) < 2:
        return rank_waits
    clocks = _clocks(traces)
    for name in COLLECTIVES:
        places = [np.flatnonzero(_runs(trace, name)) for trace in traces]
        keys = [_keys(trace, at) for trace, at in zip(traces, places, strict=True)]
        met, group = np.unique(np.concatenate(keys), return_inverse=True)
        begun = np.concatenate([t.columns.start[at] + c for t, at, c in zip(traces, places, clocks, strict=True)])
        last = np.full(len(met), np.iinfo(np.int64).min)
        np.maximum.at(last, group, begun)
        all_came = np.bincount(group, minlength=len(met)) == len(traces)  # or it was not recorded everywhere
        waited = np.where(all_came[group], last[group] - begun, 0)
        by_rank = np.split(waited, np.cumsum([len(at) for at in places])[:-1])
        for trace, at, wait, of_rank in zip(traces, places, by_rank, rank_waits, strict=True):
            of_rank[at] = np.minimum(wait, (trace.columns.end - trace.columns.start)[at])
    return rank_waits


def without_pauses(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], float]:
    """The same events with pauses cut out, and how many seconds those were. A pause, for an evaluation or a checkpoint, is longer
    than a step, and no batch is under way in it on any rank."""
    clocks = _clocks(traces)
    starts = np.concatenate([t.columns.start + clock for t, clock in zip(traces, clocks, strict=True)])
    ends = np.concatenate([t.columns.end + clock for t, clock in zip(traces, clocks, strict=True)])
    begins, stops = union(starts, ends)
    order = np.argsort(starts, kind="stable")
    batches = np.concatenate([trace.columns.batch for trace in traces])[order]
    first_after = np.searchsorted(starts[order], begins[1:])
    empty = np.maximum.accumulate(batches)[first_after - 1] < np.minimum.accumulate(batches[::-1])[::-1][first_after]
    step = max(float(np.median(np.diff(steady_steps(trace).bounds))) for trace in traces)
    gaps = begins[1:] - stops[:-1]
    pauses = empty & (gaps > step)
    after, lengths = begins[1:][pauses], gaps[pauses]
    if not len(after):
        return list(traces), 0.0
    cut = np.concatenate([[0], np.cumsum(lengths)])
    shortened = []
    for trace, clock in zip(traces, clocks, strict=True):
        shifts = cut[np.searchsorted(after, trace.columns.start + clock, side="right")].tolist()
        events = [
            Event(*event[:4], event[4] - shift, event[5] - shift)
            for event, shift in zip(trace.events, shifts, strict=True)
        ]
        shortened.append(dataclasses.replace(trace, events=events))
    return shortened, float(cut[-1]) / 1e9


def _clocks(traces: Sequence[RankTrace]) -> list[int]:
    """Nanoseconds to add to the times of each rank so that they are of one clock. Those of the machines may differ by more than
    a step takes; but all ranks leave a small sum, AGREE, at the same moment."""
    clocks = [trace.wall_ns for trace in traces]
    ends = []
    for trace in traces:
        at = np.flatnonzero(_runs(trace, AGREE))
        ends.append(dict(zip(_keys(trace, at).tolist(), (trace.columns.end[at] + trace.wall_ns).tolist(), strict=True)))
    for rank in range(1, len(traces)):
        apart = [end - ends[0][key] for key, end in ends[rank].items() if key in ends[0]]
        clocks[rank] -= round(float(np.median(apart))) if apart else 0
    return clocks


def _runs(trace: RankTrace, name: str) -> np.ndarray:
    columns = trace.columns
    return columns.op == (columns.names.index(name) if name in columns.names else -1)


def _keys(trace: RankTrace, at: np.ndarray) -> np.ndarray:
    """One number for the batch and the micro-batch of each of these events."""
    parts = np.array([-1 if trace.events[place][3] is None else trace.events[place][3] for place in at], np.int64)
    return trace.columns.batch[at] * 2**17 + parts + 1  # a batch has fewer parts (schedule/setting.py: MOST_PARTS)

"""Traces in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestpipe.trace.record import RankTrace

# Chrome's reserved colour names; Perfetto chooses a colour by the name of the slice, numbers left out, on its own.
COLOURS = {
    "PREFETCH": "olive",
    "H2D": "yellow",
    "ROUTE": "rail_animation",
    "RETRIEVE": "rail_load",
    "WRITEBACK": "cq_build_attempt_failed",
    "SYNC": "rail_response",
    "EMB": "thread_state_runnable",
    "FWD": "thread_state_running",
    "BWD": "rail_idle",
    "AGREE": "generic_work",
    "GRAD": "good",
    "UPDATE": "terrible",
    "REDUCE": "olive",
    "DENSE": "bad",
}


def to_chrome(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One process per rank, one thread per lane, one slice per operation; microseconds since the first operation.

    Ranks are laid side by side by their wall clocks: between machines that is as exact as those clocks are.
    """
    origin = min((trace.wall_ns + event.start_ns for trace in traces for event in trace.events), default=0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        pid = trace.rank
        events.append(_metadata("process_name", pid, 0, name=f"rank {pid}"))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for index, lane in enumerate(trace.lanes):
            tid = _thread(pid, index)
            events.append(_metadata("thread_name", pid, tid, name=lane))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=index))
        shift = trace.wall_ns - origin  # in whole nanoseconds: a float of the time of day would lose them
        for event in trace.events:
            slice_ = {
                "ph": "X",
                "name": event.label,
                "cat": event.op,
                "pid": pid,
                "tid": _thread(pid, event.lane),
                "ts": (shift + event.start_ns) / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "args": {"batch": event.batch} if event.part is None else {"batch": event.batch, "part": event.part},
            }
            if event.op in COLOURS:
                slice_["cname"] = COLOURS[event.op]
            events.append(slice_)
    about = [{"schedule": trace.schedule, "rank": trace.rank, "dropped": trace.dropped} for trace in traces]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"nestpipe": about}}


def _thread(rank: int, lane: int) -> int:
    """Never 0, which some versions of Perfetto merge with another thread, nor a rank, which would be a main thread."""
    return 1_000_000 + 100 * rank + lane


def _metadata(kind: str, pid: int, tid: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}

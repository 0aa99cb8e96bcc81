"""Traces in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestpipe.trace.record import RankTrace


def to_chrome(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One process per rank, one thread per lane, one slice per operation; microseconds since the first operation. Perfetto
    chooses a colour by the name of the slice, numbers left out, on its own.

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
            args = {"batch": event.batch} | ({} if event.part is None else {"part": event.part})
            slice_ = {
                "ph": "X",
                "name": event.label,
                "cat": event.op,
                "pid": pid,
                "tid": _thread(pid, event.lane),
                "args": args,
            }
            begin, duration = shift + event.start_ns, event.end_ns - event.start_ns
            events.append(slice_ | {"ts": begin / 1e3, "dur": duration / 1e3})
    about = [{"schedule": trace.schedule, "rank": trace.rank, "dropped": trace.dropped} for trace in traces]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"nestpipe": about}}


def _thread(rank: int, lane: int) -> int:
    """Never 0, which some versions of Perfetto merge with another thread, nor a rank, which would be a main thread."""
    return 1_000_000 + 100 * rank + lane


def _metadata(kind: str, pid: int, tid: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}

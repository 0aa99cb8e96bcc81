"""A few steps of a trace as data for timeline.js, which draws them, and controls.js."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nestpipe.schedule.ops import in_order
from nestpipe.trace import COMPUTE, RankTrace
from nestpipe.trace.picture import colour_of
from nestpipe.trace.times import covered, steady_steps, union

STEPS = 20
MAX_RANKS = 8
MAX_EVENTS = 12_000  # more would make the page heavy, and the drawing of all of them at once slow
PAPER, NIGHT = "#ffffff", "#14181d"  # what colours must stand out from, as in page.css
FILL, EDGE = 1.8, 3.0  # least contrast: bars keep the colours of the picture, their edges can be seen by all


def view(traces: Sequence[RankTrace], *, title: str) -> dict[str, Any]:
    data = payload(traces)
    return {"title": title, "caption": _caption(traces, data), "data": data}


def payload(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """The middle of the steady state, in microseconds since its beginning. An event is
    [lane, op, batch, micro-batch or -1, start, duration, how much of it is exposed]."""
    shown = list(traces[:MAX_RANKS])
    measured = steady_steps(shown[0])
    per_step = sum(len(trace.events) for trace in shown) / max(len(steady_steps(shown[0], skip=0)), 1)
    num_steps = max(1, min(STEPS, len(measured), int(MAX_EVENTS / per_step)))
    first = (len(measured) - num_steps) // 2
    bounds = measured.bounds[first : first + num_steps + 1] + shown[0].wall_ns
    begin, end = int(bounds[0]), int(bounds[-1])
    ops = in_order({name for trace in shown for name in trace.columns.names})
    return {
        "span": (end - begin) / 1e3,
        "ops": ops,
        "light": [[_standing_out(colour_of(op), PAPER, "#000000", least) for least in (FILL, EDGE)] for op in ops],
        "dark": [[_standing_out(colour_of(op), NIGHT, "#ffffff", least) for least in (FILL, EDGE)] for op in ops],
        "steps": [
            [int(batch), _micro(bounds[at] - begin), _micro(bounds[at + 1] - begin)]
            for at, batch in enumerate(measured.batches[first : first + num_steps])
        ],
        "ranks": [_rank(trace, ops, begin, end) for trace in shown],
    }


def _rank(trace: RankTrace, ops: list[str], begin: int, end: int) -> dict[str, Any]:
    columns, compute = trace.columns, trace.lanes.index(COMPUTE)
    start, stop = columns.start + trace.wall_ns - begin, columns.end + trace.wall_ns - begin
    computing = union(start[columns.lane == compute], stop[columns.lane == compute])
    exposed = np.where(columns.lane == compute, stop - start, stop - start - covered(start, stop, computing))
    visible = np.flatnonzero((stop > 0) & (start < end - begin))
    codes = [ops.index(name) for name in columns.names]
    edges = np.concatenate([[0], np.stack(computing, axis=1).ravel().clip(0, end - begin), [end - begin]])
    gaps = [(left, right) for left, right in edges.reshape(-1, 2) if right > left]
    return {
        "rank": trace.rank,
        "lanes": trace.lanes,
        "compute": compute,
        "gaps": [[_micro(left), _micro(right)] for left, right in gaps],
        "events": [
            [int(columns.lane[at]), codes[columns.op[at]], int(columns.batch[at]), _part(trace, at),
             _micro(start[at]), _micro(stop[at] - start[at]), _micro(exposed[at])]
            for at in visible[np.argsort(start[visible], kind="stable")]
        ],
    }  # fmt: skip


def _part(trace: RankTrace, at: int) -> int:
    part = trace.events[at].part
    return -1 if part is None else part


def _micro(nanoseconds: float) -> float:
    return round(float(nanoseconds) / 1e3, 1)


def _caption(traces: Sequence[RankTrace], data: dict[str, Any]) -> str:
    steps = data["steps"]
    all_steps = len(steady_steps(traces[0], skip=0))
    what = (
        f"The middle {len(steps)} of {all_steps} recorded steps" if len(steps) < all_steps else f"All {all_steps} steps"
    )
    if len(steps) == 1:
        what = f"One of {all_steps} recorded steps"
    batches = f"batches {steps[0][0]} to {steps[-1][0]}" if len(steps) > 1 else f"batch {steps[0][0]}"
    who = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    if len(traces) > MAX_RANKS:
        who = f"the first {MAX_RANKS} of {len(traces)} ranks"
    return f"{what} ({batches}), {who}. Batches are told apart by full and pale bars."


def _standing_out(colour: str, ground: str, towards: str, least: float) -> str:
    """The colour, moved towards black or white until it has that contrast to its background."""
    channels = list(zip(_channels(colour), _channels(towards), strict=True))
    for share in np.linspace(0, 1, 21):
        mixed = tuple(round(own + (end - own) * share) for own, end in channels)
        if contrast(mixed, _channels(ground)) >= least:
            break
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def contrast(colour: tuple[int, ...], other: tuple[int, ...]) -> float:
    """As WCAG defines it."""
    dark, bright = sorted((_luminance(colour), _luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: tuple[int, ...]) -> float:
    linear = [
        channel / 255 / 12.92 if channel <= 10 else ((channel / 255 + 0.055) / 1.055) ** 2.4 for channel in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

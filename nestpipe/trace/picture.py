"""A picture of a few steps: one row per lane, one bar per operation, so that one sees what runs beside what."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nestpipe.files import whole
from nestpipe.schedule.ops import COMPUTE, OPERATIONS, in_order
from nestpipe.trace.record import Event, RankTrace
from nestpipe.trace.times import RankSummary, Steps, steady_steps, summary, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS = ("#d16ba5", "#6b8e23", "#5c6bc0", "#a1887f", "#00897b", "#b39ddb")  # of operations that are not in the table
STARVED = "#f7d4d0"
WIDTH, FONT = 1600, 8.5  # pixels; points
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 105, 20, 76, 88, 14  # pixels around and between the panels of the ranks
MAX_RANKS = 4


def draw(traces: Sequence[RankTrace], path: Path, *, steps: int = 3) -> None:
    """Writes a PNG of `steps` typical steps in the steady state, of the first four ranks.

    Colour is the operation; bars carry the number of their batch where it fits, and are paler for every other batch.
    Where the compute lane runs nothing its row is pink. Dashed lines are ends of steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import: only where it is used
    from matplotlib.figure import Figure

    shown = list(traces[:MAX_RANKS])
    measured = steady_steps(shown[0])
    first = _typical(measured, steps)
    last = min(first + steps, len(measured))
    begin, end = (int(measured.bounds[at]) + shown[0].wall_ns for at in (first, last))
    used = {trace.lanes[lane] for trace in shown for lane in np.unique(trace.columns.lane)}
    rows = [[lane for lane in trace.lanes if lane in used] for trace in shown]
    num_rows = sum(len(lanes) for lanes in rows)
    row = int(np.clip(640 / num_rows, 26, 72))
    height = TOP + BOTTOM + num_rows * row + (len(shown) - 1) * BETWEEN
    figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=100)
    FigureCanvasAgg(figure)

    drawn: set[str] = set()
    top = height - TOP
    axes: list[Axes] = []
    for trace, lanes in zip(shown, rows, strict=True):
        tall = len(lanes) * row
        box = (LEFT / WIDTH, (top - tall) / height, (WIDTH - LEFT - RIGHT) / WIDTH, tall / height)
        axes.append(figure.add_axes(box))
        drawn |= _draw_rank(axes[-1], trace, lanes, begin, end)
        top -= tall + BETWEEN
    for panel in axes[:-1]:
        panel.tick_params(axis="x", labelbottom=False)
    axes[-1].xaxis.set_major_formatter("{x:g} ms")
    _name_steps(axes[0], shown[0], measured, first, last, begin)
    _legend(axes[-1], drawn, height)
    figure.text(LEFT / WIDTH, 1 - 14 / height, title(traces), fontsize=12, weight="bold", va="top")
    with whole(path) as partial:
        figure.savefig(partial, format="png")


def title(traces: Sequence[RankTrace]) -> str:
    """Schedule, ranks, step, and what is exposed, over all ranks."""
    ranks = summary(traces)
    num_shown = min(len(traces), MAX_RANKS)
    who = f"{len(traces)} ranks" if len(traces) > 1 else "1 rank"
    if num_shown < len(traces):
        who += f" (0 to {num_shown - 1} shown)"
    step = float(np.mean([rank.mean_step_ms for rank in ranks]))
    share = float(np.mean([rank.lane(COMPUTE).busy_ms / rank.mean_step_ms for rank in ranks]))
    text = f"{traces[0].schedule}, {who}: step {step:.1f} ms, compute lane busy {share:.0%}, "
    return text + exposed_share(ranks)


def exposed_share(ranks: Sequence[RankSummary]) -> str:
    """What the other lanes expose together, in words."""
    if all(len(rank.lanes) == 1 for rank in ranks):
        return "everything exposed (a single lane)"
    exposed = float(np.mean([rank.exposed_ms for rank in ranks]))
    share = float(np.mean([rank.exposed_ms / rank.mean_step_ms for rank in ranks]))
    return f"other lanes exposed {exposed:.1f} ms ({share:.1%})"


def colour_of(op: str) -> str:
    return OPERATIONS[op].colour if op in OPERATIONS else OTHERS[zlib.crc32(op.encode()) % len(OTHERS)]


def _typical(measured: Steps, steps: int) -> int:
    """Where to begin: the steps in a row that together take what as many median steps would."""
    if steps < 1:
        raise ValueError(f"a picture needs at least 1 step, got {steps}")
    steps = min(steps, len(measured))
    took = measured.bounds[steps:] - measured.bounds[:-steps]
    return int(np.argmin(np.abs(took - steps * np.median(np.diff(measured.bounds)))))


def _draw_rank(panel: Axes, trace: RankTrace, lanes: list[str], begin: int, end: int) -> set[str]:
    """Bars and labels of one rank between two times of the wall clock; returns the operations that can be seen."""
    columns = trace.columns
    visible = (columns.end + trace.wall_ns > begin) & (columns.start + trace.wall_ns < end)
    events = [trace.events[number] for number in np.flatnonzero(visible)]
    rows = {trace.lanes.index(lane): row for row, lane in enumerate(lanes)}
    _draw_gaps(panel, trace, rows, begin, end)
    pixels_per_ms = (WIDTH - LEFT - RIGHT) / ((end - begin) / 1e6)
    bars: dict[tuple[str, int, bool], list[tuple[float, float, int]]] = {}
    for event in events:
        left, right = _visible_ms(event, trace, begin, end)
        narrow = (right - left) * pixels_per_ms < 4  # a white edge would hide it
        width = max(right - left, 1 / pixels_per_ms)
        bars.setdefault((event.op, event.batch % 2, narrow), []).append((left, width, rows[event.lane]))
    for (op, odd, narrow), places in bars.items():
        lefts, widths, at = zip(*places, strict=True)
        edge = 0 if narrow else 0.6
        panel.barh(at, widths, left=lefts, height=0.78, color=_shade(op, odd), edgecolor="white", linewidth=edge)
    for event in events:
        left, right = _visible_ms(event, trace, begin, end)
        label = _fitting(event, (right - left) * pixels_per_ms - 7)
        if label:
            panel.text((left + right) / 2, rows[event.lane], label, ha="center", va="center", fontsize=FONT,
                       color=_ink(_shade(event.op, event.batch % 2)), clip_on=True)  # fmt: skip
    panel.set_xlim(0, (end - begin) / 1e6)
    panel.set_ylim(len(lanes) - 0.5, -0.5)
    panel.set_yticks(range(len(lanes)), lanes, fontsize=10)
    panel.tick_params(axis="y", length=0)
    panel.set_ylabel(f"rank {trace.rank}", fontsize=10, weight="bold")
    panel.yaxis.set_label_coords(-0.052, 0.5)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for bound in steady_steps(trace, skip=0).bounds + trace.wall_ns:
        if begin < bound < end:  # behind the bars and their labels
            panel.axvline(
                (bound - begin) / 1e6, color="#404040", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.5
            )  # behind bars and their labels
    return {event.op for event in events}


def _draw_gaps(panel: Axes, trace: RankTrace, rows: dict[int, int], begin: int, end: int) -> None:
    compute = trace.lanes.index(COMPUTE)
    computes = trace.columns.lane == compute
    starts, ends = (times[computes] + trace.wall_ns for times in (trace.columns.start, trace.columns.end))
    starts, ends = union(starts.clip(begin, end), ends.clip(begin, end))
    edges = np.concatenate([[begin], np.stack([starts, ends], axis=1).ravel(), [end]]).reshape(-1, 2)
    left, width = (edges[:, 0] - begin) / 1e6, (edges[:, 1] - edges[:, 0]) / 1e6
    panel.barh(rows[compute], width, left=left, height=0.94, color=STARVED, linewidth=0, zorder=0)


def _visible_ms(event: Event, trace: RankTrace, begin: int, end: int) -> tuple[float, float]:
    start, stop = event.start_ns + trace.wall_ns, event.end_ns + trace.wall_ns
    return (max(start, begin) - begin) / 1e6, (min(stop, end) - begin) / 1e6


def _name_steps(panel: Axes, trace: RankTrace, measured: Steps, first: int, last: int, begin: int) -> None:
    """Above the first rank, where there is room."""
    pixels_per_ms = (WIDTH - LEFT - RIGHT) / ((measured.bounds[last] - measured.bounds[first]) / 1e6)
    for step in range(first, last):
        left, right = ((int(bound) + trace.wall_ns - begin) / 1e6 for bound in measured.bounds[step : step + 2])
        texts = (f"step of batch {measured.batches[step]}", f"{measured.batches[step]}")
        text = next((text for text in texts if 1.3 * _text_pixels(text) <= (right - left) * pixels_per_ms), "")
        panel.annotate(text, ((left + right) / 2, 1.0), xycoords=panel.get_xaxis_transform(), xytext=(0, 5),
                       textcoords="offset points", ha="center", fontsize=9.5, color="#404040")  # fmt: skip


def _legend(panel: Axes, ops: set[str], height: int) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour_of(op), label=op) for op in in_order(ops)]
    patches.append(Patch(color=STARVED, label="compute runs nothing"))
    assert panel.figure is not None
    panel.figure.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 6 / height), ncols=min(len(patches), 14),
                        frameon=False, fontsize=9.5, handlelength=1.2, columnspacing=1.4)  # fmt: skip


def _fitting(event: Event, pixels: float) -> str:
    """The longest label that fits: `FWD 7.1`, `7.1`, or none."""
    return next((text for text in (event.label, event.label.split(" ")[-1]) if _text_pixels(text) <= pixels), "")


@functools.cache
def _text_pixels(text: str) -> float:
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=FONT).get_extents().width) * 100 / 72


def _shade(op: str, odd: int) -> tuple[float, float, float]:
    red, green, blue = (int(colour_of(op)[at : at + 2], 16) / 255 for at in (1, 3, 5))
    pale = 0.42 * odd
    return red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale


def _ink(colour: tuple[float, float, float]) -> str:
    return "black" if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 0.5 else "white"

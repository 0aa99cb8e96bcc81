"""Sections as values for the template: which class a cell has, how wide a bar is, where a line goes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nestpipe.report.axes import Axis
from nestpipe.report.markup import NOTHING, figure, with_unit
from nestpipe.sections import Bars, Curves, Section, Table

# What a part is called gives it its colour, the same on the whole page; other parts take the next free of SERIES.
MEANINGS = (
    ("idle", ("idle", "nothing")),
    ("hidden", ("hidden",)),
    ("waiting", ("waiting",)),
    ("communication", ("commun", "exchange", "all-to-all")),
    ("lookup", ("lookup", "retriev", "reading")),
    ("exposed", ("exposed",)),
    ("compute", ("compute",)),
)
SERIES = tuple(f"s{number}" for number in range(8))
INSIDE = 15  # percent of the width from which on a part has room for its figure
MAX_POINTS, MAX_DOTS = 400, 40  # of a line

View = dict[str, Any]


def views(sections: Iterable[Section]) -> list[View]:
    return [view(section) for section in sections]


def view(section: Section, numbers: Table | None = None) -> View:
    """numbers: a table that says more than the values of bars, to fold out in their place."""
    match section:
        case Table():
            values = {"kind": "table", **_table(section)}
        case Bars():
            values = {"kind": "bars", **_bars(section), "numbers": _table(numbers or _values(section))}
        case Curves():
            values = {"kind": "curves", **_curves(section)}
    return {"title": section.title, "note": section.note, **values}


def _table(table: Table) -> View:
    columns = [
        (str(name), _column_class([str(row[at]) for row in table.rows])) for at, name in enumerate(table.columns)
    ]
    rows = [[str(cell) for cell in row] for row in table.rows]
    return {"title": table.title, "columns": columns, "rows": rows, "headed": any(table.columns)}


def _column_class(cells: Sequence[str]) -> str:
    """Figures, with a unit or without, go to the right; long text has some room even where the table must scroll for it."""
    filled = [cell.strip("* ") for cell in cells if cell.strip(f"*- {NOTHING}")]
    if filled and all(re.match(r"[<>~±+-]?\d", cell) and len(cell) < 24 for cell in filled):
        return "n"
    return "w" if max((len(cell) for cell in cells), default=0) > 24 else ""


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _bars(section: Bars) -> View:
    totals = [sum(_finite(values[at]) for values in section.parts.values()) for at in range(len(section.labels))]
    longest = max([*totals, *(_finite(value) for values in section.bounds.values() for value in values)], default=0.0)
    scale = 100 / longest if longest > 0 else 0.0
    colours = part_colours(section.parts)
    marks = {name: f"mark m{number % 2}" for number, name in enumerate(section.bounds)}
    rows = []
    for at, label in enumerate(section.labels):
        told = [(name, values[at]) for name, values in (*section.parts.items(), *section.bounds.items())]
        widths = [(colours[name], _finite(values[at])) for name, values in section.parts.items()]
        rows.append(
            {
                "label": str(label),
                "tip": "\n".join([str(label), *(f"{name}: {with_unit(value, section.unit)}" for name, value in told)]),
                "parts": [_part(css, value, totals[at], scale) for css, value in widths if value * scale > 0],
                "marks": [
                    (marks[name], f"{_finite(values[at]) * scale:.2f}")
                    for name, values in section.bounds.items()
                    if values[at] is not None
                ],
                "total": with_unit(totals[at], section.unit),
            }
        )
    return {"bars": rows, "legend": [*colours.items(), *((name, css) for name, css in marks.items())]}


def _part(css: str, value: float, total: float, scale: float) -> tuple[str, str, str]:
    """With its figure inside, where there is room and the figure beside the bar does not say it already."""
    inside = figure(value) if value * scale >= INSIDE and value < 0.995 * total else ""
    return css, f"{value * scale:.2f}", inside


def _values(section: Bars) -> Table:
    shown = {**section.parts, **section.bounds}
    rows = [[str(label), *(figure(values[at]) for values in shown.values())] for at, label in enumerate(section.labels)]
    return Table(section.title, ["", *(f"{name}, {section.unit}".strip(", ") for name in shown)], rows)


def part_colours(names: Mapping[str, object]) -> dict[str, str]:
    """A CSS class for each part; never one twice."""
    colours: dict[str, str] = {}
    known = any(word in name.lower() for name in names for _, words in MEANINGS for word in words)
    series = SERIES[3:] if known else SERIES  # the first three look like compute, lookup and communication
    for name in names:
        meant = (kind for kind, words in MEANINGS if any(word in name.lower() for word in words))
        fitting = next((kind for kind in meant if kind not in colours.values()), None)
        free = itertools.chain((css for css in series if css not in colours.values()), itertools.cycle(series))
        colours[name] = fitting or next(free)
    return colours


def _curves(section: Curves) -> View:
    x, lines = _thinned(section)
    known = [value for values in lines.values() for value in values if value is not None and math.isfinite(value)]
    if not x or not known:
        return {"lines": []}
    across, up = Axis.of(x, zero=False), Axis.of(known, zero=True)
    places = [round(100 * across.place(value), 2) for value in x]
    heights = {
        name: [None if _missing(value, up) else round(100 - 100 * up.place(float(value or 0)), 2) for value in values]
        for name, values in lines.items()
    }
    data = {
        "x": [f"{section.x_axis} {figure(value)}" for value in x],
        "at": places,
        "lines": [[name, [figure(value) for value in values], heights[name]] for name, values in lines.items()],
    }
    rows = [[figure(at), *(figure(values[number]) for values in lines.values())] for number, at in enumerate(x)]
    return {
        "x_axis": section.x_axis,
        "y_axis": section.y_axis,
        "across": across,
        "up": up,
        "wide": max(len(text) for _, text in up.ticks),
        "lines": [
            {"name": name, "css": f"line s{number % 8}{' dashed' * (number >= 4)}", **_line(places, heights[name])}
            for number, name in enumerate(lines)
        ],
        "data": data,
        "numbers": _table(Table(section.title, [section.x_axis, *lines], rows)),
    }


def _missing(value: float | None, axis: Axis) -> bool:
    return value is None or not math.isfinite(value) or (axis.log and value <= 0)


def _line(places: Sequence[float], heights: Sequence[float | None]) -> View:
    """One path for what hangs together; dots where there are few points. (A dot is a line of no length with a round cap: a
    circle would be stretched with the drawing.)"""
    path, dots, joined = "", "", False
    for at, height in zip(places, heights, strict=True):
        if height is not None:
            path += f"{'L' if joined else 'M'}{at} {height}"
            dots += f"M{at} {height}h0"
        joined = height is not None
    return {"path": path, "dots": dots if len(places) <= MAX_DOTS else ""}


def _thinned(section: Curves) -> tuple[list[float], dict[str, list[float | None]]]:
    """In order of x, and every k-th point only where there are very many."""
    order = sorted(range(len(section.x)), key=lambda at: section.x[at])
    kept = order[:: math.ceil(len(order) / MAX_POINTS) or 1]
    if order and kept[-1] != order[-1]:
        kept.append(order[-1])
    return [section.x[at] for at in kept], {name: [ys[at] for at in kept] for name, ys in section.lines.items()}

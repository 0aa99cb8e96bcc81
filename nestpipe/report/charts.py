"""Sections as HTML: tables that scroll sideways, bars, curves. Readable without scripts; page.js adds what shows on hover."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from nestpipe.report.axes import Axis
from nestpipe.report.markup import NOTHING, escape, figure, inline, paragraphs, script_json, with_unit
from nestpipe.sections import Bars, Curves, Section, Table

# What a part is called gives it its colour, the same on the whole page; other parts take the next free of SERIES.
MEANINGS = (
    ("idle", ("idle", "nothing")),
    ("hidden", ("hidden",)),
    ("communication", ("commun", "exchange", "all-to-all")),
    ("lookup", ("lookup", "retriev", "reading")),
    ("exposed", ("exposed",)),
    ("compute", ("compute",)),
)
SERIES = tuple(f"s{number}" for number in range(8))
INSIDE = 15  # percent of the width from which on a part has room for its figure
MAX_POINTS, MAX_DOTS = 400, 40  # of a line


def render(sections: Iterable[Section]) -> str:
    return "".join(_render(section) for section in sections)


def _render(section: Section) -> str:
    match section:
        case Table():
            return _block(section, "table", _table(section))
        case Bars():
            return bars(section)
        case Curves():
            return _block(section, "curves", _curves(section))


def bars(section: Bars, numbers: Table | None = None) -> str:
    """numbers: a table that says more than the values of the bars, to fold out in their place."""
    return _block(section, "bars", _bars(section) + _folded(numbers or _values(section)))


def _block(section: Section, kind: str, content: str) -> str:
    note = f'<div class="note">{paragraphs(section.note)}</div>' if section.note else ""
    return f'<section class="block {kind}"><h3>{inline(section.title)}</h3>{note}{content}</section>'


def _table(table: Table) -> str:
    columns, rows = table.columns, table.rows
    classes = [_column_class([str(row[at]) for row in rows]) for at in range(len(columns))]
    head = "".join(
        f'<th scope="col"{kind}>{inline(str(name))}</th>' for name, kind in zip(columns, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{inline(str(cell))}</td>" for cell, kind in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table>{f'<thead><tr>{head}</tr></thead>' if any(columns) else ''}<tbody>{body}</tbody></table></div>"
    )


def _column_class(cells: Sequence[str]) -> str:
    """Figures, with a unit or without, go to the right; long text has some room even where the table must scroll for it."""
    filled = [cell.strip("* ") for cell in cells if cell.strip(f"*- {NOTHING}")]
    if filled and all(re.match(r"[<>~±+-]?\d", cell) and len(cell) < 24 for cell in filled):
        return ' class="n"'
    return ' class="w"' if max((len(cell) for cell in cells), default=0) > 24 else ""


def _folded(numbers: Table) -> str:
    return f'<details class="numbers"><summary>The numbers</summary>{_table(numbers)}</details>'


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _bars(section: Bars) -> str:
    totals = [sum(_finite(values[at]) for values in section.parts.values()) for at in range(len(section.labels))]
    longest = max([*totals, *(_finite(value) for values in section.bounds.values() for value in values)], default=0.0)
    scale = 100 / longest if longest > 0 else 0.0
    colours = part_colours(section.parts)
    rows = []
    for at, label in enumerate(section.labels):
        told = [(name, values[at]) for name, values in (*section.parts.items(), *section.bounds.items())]
        tip = "\n".join([str(label), *(f"{name}: {with_unit(value, section.unit)}" for name, value in told)])
        parts = "".join(
            _part(_finite(values[at]), totals[at], scale, colours[name]) for name, values in section.parts.items()
        )
        marks = "".join(
            f'<i class="mark m{number % 2}" style="left:{_finite(values[at]) * scale:.2f}%"></i>'
            for number, values in enumerate(section.bounds.values())
            if values[at] is not None
        )
        rows.append(
            f'<div class="bar" data-tip="{escape(tip)}"><div class="label">{inline(str(label))}</div>'
            f'<div class="track" aria-hidden="true">{parts}{marks}</div>'
            f'<div class="total">{escape(with_unit(totals[at], section.unit))}</div></div>'
        )
    keys = [f'<li><i class="key {colours[name]}"></i>{inline(name)}</li>' for name in section.parts]
    keys += [
        f'<li><i class="key mark m{number % 2}"></i>{inline(name)}</li>' for number, name in enumerate(section.bounds)
    ]
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if len(keys) > 1 else ""
    return f'{legend}<div class="bar-rows">{"".join(rows)}</div>'


def _values(section: Bars) -> Table:
    shown = {**section.parts, **section.bounds}
    rows = [[str(label), *(figure(values[at]) for values in shown.values())] for at, label in enumerate(section.labels)]
    return Table(section.title, ["", *(f"{name}, {section.unit}".strip(", ") for name in shown)], rows)


def _part(value: float, total: float, scale: float, colour: str) -> str:
    """With its figure inside, where there is room and the figure beside the bar does not say it already."""
    width = value * scale
    inside = figure(value) if width >= INSIDE and value < 0.995 * total else ""
    return f'<b class="{colour}" style="width:{width:.2f}%">{inside}</b>' if width > 0 else ""


def part_colours(names: Mapping[str, object]) -> dict[str, str]:
    """A CSS class for each part; never one twice."""
    colours: dict[str, str] = {}
    known = any(word in name.lower() for name in names for _, words in MEANINGS for word in words)
    series = SERIES[3:] if known else SERIES  # the first three look like compute, lookup and communication
    for name in names:
        meant = (kind for kind, words in MEANINGS if any(word in name.lower() for word in words))
        fitting = next((kind for kind in meant if kind not in colours.values()), None)
        free = itertools.chain((one for one in series if one not in colours.values()), itertools.cycle(series))
        colours[name] = fitting or next(free)
    return colours


def _curves(section: Curves) -> str:
    x, lines = _thinned(section)
    known = [value for values in lines.values() for value in values if value is not None and math.isfinite(value)]
    if not x or not known:
        return f'<p class="empty">{NOTHING} no values</p>'
    across, up = Axis.of(x, zero=False), Axis.of(known, zero=True)
    places = [round(100 * across.place(value), 2) for value in x]
    heights = {
        name: [None if _missing(value, up) else round(100 - 100 * up.place(float(value or 0)), 2) for value in values]
        for name, values in lines.items()
    }
    drawn = "".join(_line(number, places, heights[name]) for number, name in enumerate(lines))
    grid = "".join(
        f'<line x1="0" x2="100" y1="{100 - 100 * place:.2f}" y2="{100 - 100 * place:.2f}"/>' for place, _ in up.ticks
    )
    rows = "".join(f'<span style="bottom:{100 * place:.2f}%">{escape(text)}</span>' for place, text in up.ticks)
    columns = "".join(f'<span style="left:{100 * place:.2f}%">{escape(text)}</span>' for place, text in across.ticks)
    wide = max(len(text) for _, text in up.ticks)
    data = {
        "x": [f"{section.x_axis} {figure(value)}" for value in x],
        "at": places,
        "lines": [[name, [figure(value) for value in values], heights[name]] for name, values in lines.items()],
    }
    keys = "".join(
        f'<li><svg class="key line s{number % 8}{" dashed" * (number >= 4)}" viewBox="0 0 24 8" aria-hidden="true">'
        f'<path d="M0 4H24"/></svg>{inline(name)}</li>'
        for number, name in enumerate(lines)
    )
    legend = f'<ul class="legend">{keys}</ul>' if len(lines) > 1 else ""
    table = [[figure(at), *(figure(values[number]) for values in lines.values())] for number, at in enumerate(x)]
    return (
        f'{legend}<div class="plot" tabindex="0" role="group" '
        f'aria-label="{escape(section.title)}: a chart; left and right show the values">'
        f'<div class="y-name">{inline(section.y_axis)}{up.remark}</div>'
        f'<div class="y-ticks" aria-hidden="true" style="width:{wide}ch">{rows}</div>'
        f'<div class="area"><svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<g class="grid">{grid}</g>{drawn}</svg><i class="cursor" hidden></i></div>'
        f'<div class="x-ticks" aria-hidden="true">{columns}</div>'
        f'<div class="x-name">{inline(section.x_axis)}{across.remark}</div>'
        f'<script type="application/json">{script_json(data)}</script></div>'
        + _folded(Table(section.title, [section.x_axis, *lines], table))
    )


def _missing(value: float | None, axis: Axis) -> bool:
    return value is None or not math.isfinite(value) or (axis.log and value <= 0)


def _line(number: int, places: Sequence[float], heights: Sequence[float | None]) -> str:
    """One path for what hangs together; dots where there are few points. (A dot is a line of no length with a round cap: a
    circle would be stretched with the drawing.)"""
    path, dots, joined = "", "", False
    for at, height in zip(places, heights, strict=True):
        if height is not None:
            path += f"{'L' if joined else 'M'}{at} {height}"
            dots += f"M{at} {height}h0"
        joined = height is not None
    shown = f'<path class="dots" d="{dots}"/>' if len(places) <= MAX_DOTS else ""
    return f'<g class="line s{number % 8}{" dashed" * (number >= 4)}"><path d="{path}"/>{shown}</g>'


def _thinned(section: Curves) -> tuple[list[float], dict[str, list[float | None]]]:
    """In order of x, and every k-th point only where there are very many."""
    order = sorted(range(len(section.x)), key=lambda at: section.x[at])
    kept = order[:: math.ceil(len(order) / MAX_POINTS) or 1]
    if order and kept[-1] != order[-1]:
        kept.append(order[-1])
    return [section.x[at] for at in kept], {name: [ys[at] for at in kept] for name, ys in section.lines.items()}

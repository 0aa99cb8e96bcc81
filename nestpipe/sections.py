"""What a suite found, as data: tables and charts. The same sections are printed as Markdown, kept in the JSON of a bench and
drawn on the report page, none of which knows any suite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Shown(str):
    """A cell: text made for the eye, and the numbers that it shows, for programs."""

    values: tuple[float, ...] = ()


def shown(form: str, *values: float) -> Shown:
    """`shown("{:.1f} ± {:.1f}", median, iqr)`; the text as str.format makes it. Or `shown("1.2 GB", 1.2e9)`."""
    cell = Shown(form.format(*values))
    cell.values = values
    return cell


def shown_list(form: str, values: Sequence[float]) -> Shown:
    """`1.2 / 3.4`: the same form for each."""
    return shown(" / ".join([form] * len(values)), *values)


@dataclasses.dataclass(frozen=True)
class Table:
    """title: what was measured, in a line. note: how, and what is emulated; Markdown. Cells are text, made for the eye; those
    that show numbers are made with `shown`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Bars:
    """One bar for each label, made of parts that are put end to end.

    parts: {"compute": [one value for each label], "exposed communication": [...]}
    bounds: {"longest lane": [one value for each label]}: drawn as marks on the bars; nothing can be shorter.
    """

    title: str
    unit: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    bounds: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Curves:
    """Lines over one axis; `lines` has a value for each x."""

    title: str
    x_axis: str
    y_axis: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    note: str = ""


Section = Table | Bars | Curves
_KINDS = {"table": Table, "bars": Bars, "curves": Curves}


def to_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """A table has its cells twice: `rows` as they are printed, `values` as numbers."""
    names = {kind: name for name, kind in _KINDS.items()}
    return [
        {"kind": names[type(section)], **{f.name: getattr(section, f.name) for f in dataclasses.fields(section)}}
        | ({"values": [[_value(cell) for cell in row] for row in section.rows]} if isinstance(section, Table) else {})
        for section in sections
    ]


def _cell(text: str, value: Any) -> str:
    """What `_value` gave the value of."""
    if isinstance(value, str) or value is None:
        return text
    cell = Shown(text)
    cell.values = tuple(value) if isinstance(value, list) else (value,)
    return cell


def _value(cell: str) -> float | list[float] | str | None:
    """The number that a cell shows, or several; text that shows none as it is, and nothing where it is empty."""
    numbers = cell.values if isinstance(cell, Shown) else ()
    return (numbers[0] if len(numbers) == 1 else list(numbers)) if numbers else cell or None


def from_json(values: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Raises ValueError for what is not a list of sections."""
    sections: list[Section] = []
    for value in values:
        try:
            fields = dict(value)
            numbers = fields.pop("values", None)
            if numbers is not None:
                pairs = zip(fields["rows"], numbers, strict=True)
                fields["rows"] = [[_cell(*cell) for cell in zip(*row, strict=True)] for row in pairs]
            sections.append(_KINDS[fields.pop("kind")](**fields))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a section of a bench: {str(value)[:80]} ({error})") from None
    return sections


def markdown(sections: Sequence[Section]) -> str:
    """Tables only: charts show again what a table says."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections if isinstance(section, Table))


def _lines(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    if table.note:
        yield ""
        yield table.note
    yield ""
    yield f"| {' | '.join(table.columns)} |"
    yield f"| {' | '.join('---' for _ in table.columns)} |"
    for row in table.rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"

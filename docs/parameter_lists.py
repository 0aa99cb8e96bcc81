"""For mkdocstrings: our docstrings explain arguments in lines `name: meaning`; on the API page they are a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+(?:, \w+)*): ")


def as_lists(text: str) -> str:
    """A block of `name: meaning` lines begins a paragraph; what continues an entry is indented."""
    lines: list[str] = []
    in_list, before = False, ""
    for line in text.splitlines():
        entry = ENTRY.match(line) if in_list or not before.strip() else None
        if entry:
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            if not in_list:
                lines.append("")
            line = f"- {names}: {line[entry.end() :]}"
        in_list = bool(entry) or (in_list and line.startswith("    "))
        lines.append(line)
        before = line
    return "\n".join(lines)


class ParameterLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)

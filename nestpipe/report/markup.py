"""Text from files as HTML, for the templates: everything is escaped, a little Markdown is understood; figures as text."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from markupsafe import Markup

_SPANS = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|\*\*(?P<bold>.+?)\*\*"
    r"|(?<![\w*])\*(?=\S)(?P<italic>[^*]+?)(?<=\S)\*(?![\w*])"
    r"|\[(?P<link>[^\]]+)\]\((?P<to>[^()\s]+)\)"
)
NOTHING = "\N{EN DASH}"


def inline(markdown: str) -> Markup:
    """Code, bold, italics and links of a line. A link that is not of the web keeps its words only: the page may lie anywhere."""
    parts, at = [], 0
    for span in _SPANS.finditer(markdown):
        parts.append(html.escape(markdown[at : span.start()]))
        at = span.end()
        if span["code"] is not None:
            parts.append(f"<code>{html.escape(span['code'])}</code>")
        elif span["bold"] is not None:
            parts.append(f"<strong>{inline(span['bold'])}</strong>")
        elif span["italic"] is not None:
            parts.append(f"<em>{inline(span['italic'])}</em>")
        elif span["to"].startswith(("https://", "http://")):
            parts.append(f'<a href="{html.escape(span["to"])}" rel="noreferrer">{inline(span["link"])}</a>')
        else:
            parts.append(inline(span["link"]))
    return Markup("".join([*parts, html.escape(markdown[at:])]))


def paragraphs(markdown: str) -> Markup:
    """Paragraphs, and lists of lines that begin with a dash."""
    blocks = []
    for block in re.split(r"\n\s*\n", markdown.strip()):
        lines = block.strip().splitlines()
        first = next((number for number, line in enumerate(lines) if line.lstrip().startswith("- ")), len(lines))
        if first:
            blocks.append(f"<p>{inline(' '.join(line.strip() for line in lines[:first]))}</p>")
        items: list[str] = []
        for line in (line.strip() for line in lines[first:]):
            if line.startswith("- "):
                items.append(line[2:])
            else:
                items[-1] += f" {line}"
        if items:
            blocks.append(f"<ul>{''.join(f'<li>{inline(item)}</li>' for item in items)}</ul>")
    return Markup("".join(blocks) if markdown.strip() else "")


def script_json(value: Any) -> Markup:
    """JSON that can stand inside <script>: no text in it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: no line separators that JavaScript minds
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def figure(value: float | None) -> str:
    """Three digits that count; whole numbers as they are."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if 0 < size < 1e-4:
        return f"{value:.2e}"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:,.{decimals}f}"


def with_unit(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.2f}x" if unit == "x" else f"{figure(value)}{'' if unit == '%' else ' '}{unit}".strip()


def size(num_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{figure(num_bytes / scale)} {unit}"
    return f"{figure(num_bytes)} bytes"

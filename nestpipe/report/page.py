"""The page as a whole."""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import nestpipe
from nestpipe.files import write_text
from nestpipe.report import charts, comparison, run
from nestpipe.report.markup import escape
from nestpipe.report.sources import Bench, Run, read_all

QUICK = "Quick: small sizes, which show that it runs, not how fast."


def write(paths: Sequence[Path], *, out: Path | None = None, title: str | None = None) -> Path:
    """Writes one HTML file that needs no other, complete or not at all; returns where it is."""
    out = out or default_path(paths)
    if out.is_dir():
        raise ValueError(f"cannot write {out}: it is a folder; give --out a file name, e.g. {out / 'report.html'}")
    text = render(read_all(paths), title=title)
    try:
        write_text(out, text)
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror}): choose another --out") from error
    return out


def default_path(paths: Sequence[Path]) -> Path:
    """In the run folder, beside the JSON; of several sources: here."""
    if len(paths) != 1:
        return Path("report.html")
    return paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")


def render(sources: Sequence[Run | Bench], *, title: str | None = None) -> str:
    runs = [source for source in sources if isinstance(source, Run)]
    articles: list[tuple[str, str, str, str]] = []  # id, heading, what it is, content
    if len(runs) > 1:
        content = charts.render(comparison.sections(runs))
        articles.append(("comparison", "Comparison", f"{len(runs)} runs", content))
    for number, source in enumerate(sources, 1):
        heading = f"bench {source.suite}" if isinstance(source, Bench) else source.name
        articles.append((f"source-{number}", heading, _kind(source), _content(source)))
    if title is None:
        title = articles[0][1] if len(articles) == 1 else _counted(len(runs), len(sources) - len(runs))
    template = string.Template(_file("page.html"))
    return template.substitute(
        title=escape(title),
        version=escape(nestpipe.__version__),
        css=_file("page.css"),
        js="\n".join(_file(name) for name in ("page.js", "timeline.js", "controls.js")),
        kind=f'<p class="kind">{escape(articles[0][2])}</p>' if len(articles) == 1 else "",
        made=escape(f"nestpipe {nestpipe.__version__}, {time.strftime('%Y-%m-%d %H:%M')}"),
        contents=_contents(articles) if len(articles) > 1 else "",
        main="\n".join(_article(*one, alone=len(articles) == 1) for one in articles),
    )


def _counted(runs: int, benches: int) -> str:
    """`2 runs and 1 bench`."""
    counts = ((runs, "run", "runs"), (benches, "bench", "benches"))
    return " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)


def _content(source: Run | Bench) -> str:
    if isinstance(source, Run):
        return run.render(source)
    machine = ", ".join(f"{str(name).replace('_', ' ')} {value}" for name, value in source.machine.items())
    quick = f'<p class="warning">{QUICK}</p>' if source.quick else ""
    facts = f"<p><code>{escape(source.command)}</code></p>" + (f"<p>{escape(machine)}</p>" if machine else "")
    return f'{quick}<div class="origin">{facts}</div>{charts.render(source.sections)}'


def _kind(source: Run | Bench) -> str:
    if isinstance(source, Bench):
        return source.name
    workers = source.result["workers"]
    return f"{source.way}, {workers} worker{'s' * (workers != 1)}"


def _article(anchor: str, heading: str, kind: str, content: str, *, alone: bool) -> str:
    """alone: the heading of the page is its heading too."""
    header = f'<header><h2>{escape(heading)}</h2><p class="kind">{escape(kind)}</p></header>'
    return f'<article id="{anchor}">{"" if alone else header}{content}</article>'


def _contents(articles: Sequence[tuple[str, str, str, str]]) -> str:
    items = "".join(
        f'<li><a href="#{anchor}">{escape(heading)}</a> <span>{escape(kind)}</span></li>'
        for anchor, heading, kind, _ in articles
    )
    return f'<nav aria-label="contents"><ol>{items}</ol></nav>'


def _file(name: str) -> str:
    return (resources.files("nestpipe.report") / name).read_text(encoding="utf-8")

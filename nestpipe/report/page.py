"""The page as a whole."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import nestpipe
from nestpipe.files import write_text
from nestpipe.report import charts, comparison, markup, run
from nestpipe.report.sources import Bench, Run, read_all

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Article:
    """kind: which macro of blocks.html shows the view: "run", "bench", or "sections"."""

    anchor: str
    heading: str
    about: str
    kind: str
    view: Any


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
    articles = [_article(number, source) for number, source in enumerate(sources, 1)]
    if len(runs) > 1:
        view = charts.views(comparison.sections(runs))
        articles.insert(0, Article("comparison", "Comparison", f"{len(runs)} runs", "sections", view))
    if title is None:
        title = articles[0].heading if len(articles) == 1 else _counted(len(runs), len(sources) - len(runs))
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            version=nestpipe.__version__,
            made=time.strftime("%Y-%m-%d %H:%M"),
            css=_file("page.css"),
            js=Markup("\n").join(_file(name) for name in ("page.js", "timeline.js", "controls.js")),
            articles=articles,
            alone=len(articles) == 1,
            nothing=markup.NOTHING,
        )
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "inline": markup.inline,
        "paragraphs": markup.paragraphs,
        "script_json": markup.script_json,
        "percent": lambda share: f"{100 * share:.2f}",
    }
    return environment


def _file(name: str) -> Markup:
    """A file of this package, which is no text to be escaped."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _article(number: int, source: Run | Bench) -> Article:
    anchor = f"source-{number}"
    if isinstance(source, Bench):
        machine = ", ".join(f"{str(name).replace('_', ' ')} {value}" for name, value in source.machine.items())
        view = {"quick": source.quick, "command": source.command, "machine": machine}
        view["sections"] = charts.views(source.sections)
        return Article(anchor, f"bench {source.suite}", source.name, "bench", view)
    workers = source.workers
    about = source.way + (f", {workers} worker{'s' * (workers != 1)}" if workers else "")
    return Article(anchor, source.name, about, "run", run.view(source))


def _counted(runs: int, benches: int) -> str:
    """`2 runs and 1 bench`."""
    counts = ((runs, "run", "runs"), (benches, "bench", "benches"))
    return " and ".join(f"{count} {singular if count == 1 else plural}" for count, singular, plural in counts if count)

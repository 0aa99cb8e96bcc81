"""Suites on the workers that other tests use too, since most of their time would go into starting some; what is sane."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from nestpipe.bench import emulated
from nestpipe.bench.links import Links
from nestpipe.files import write_json
from nestpipe.sections import Bars, Curves, Section, Shown, Table, from_json, markdown, to_json
from tests.cluster import Cluster, in_a_group


@pytest.fixture
def here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """here(suite): its workers are those of the cluster, over loopback."""

    def run_workers(work: Callable[..., Any], *args: Any, workers: int = 2, **_: Any) -> Any:
        return json.loads(json.dumps(cluster.run(workers, in_a_group, work, *args)[0]))

    @contextlib.contextmanager
    def links(workers: int, **_: Any) -> Iterator[Links]:
        yield Links(why="a test")

    def patch(suite: ModuleType) -> None:
        monkeypatch.setattr(suite, "run_workers", run_workers)
        if hasattr(suite, "links"):
            monkeypatch.setattr(suite, "links", links)

    return patch


@pytest.fixture
def sane(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """sane(sections): that they hang together and come back from JSON the same; their Markdown.

    is_emulated: every one of them must say so.
    """

    def check(sections: Sequence[Section], *, is_emulated: bool = False) -> str:
        assert sections and isinstance(sections[0], Table)
        for one in sections:
            assert one.title and (emulated.LABEL in one.note or emulated.LABEL in one.title or not is_emulated)
            if isinstance(one, Table):
                assert one.rows and all(len(row) == len(one.columns) for row in one.rows)
                assert all(isinstance(cell, str) for row in one.rows for cell in row)
                numbers = [
                    cell for row in one.rows for cell in row if re.match(r"[+(-]?\d[\d.,]*(x|%|$| [/±(o])", cell)
                ]
                assert all(isinstance(cell, Shown) and cell.values for cell in numbers), "programs want numbers"
            elif isinstance(one, Bars):
                values = [*one.parts.values(), *one.bounds.values()]
                assert values and all(len(part) == len(one.labels) for part in values)
                assert all(value >= 0 for part in values for value in part)
            else:
                assert isinstance(one, Curves) and one.lines
                assert all(len(line) == len(one.x) for line in one.lines.values())
        file = tmp_path_factory.mktemp("sections") / "sections.json"
        write_json(file, to_json(sections))
        back = from_json(json.loads(file.read_text()))
        assert to_json(back) == json.loads(file.read_text())
        assert markdown(back) == markdown(sections)
        return markdown(sections)

    return check

"""`nestpipe bench`: what it writes, in which order, and what it does when a suite fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nestpipe import cli
from nestpipe.bench import suites
from nestpipe.sections import Curves, Table, from_json, markdown


def suite(name: str, ran: list[str], *, fails: bool = False) -> ModuleType:
    def run(*, quick: bool) -> dict[str, Any]:
        ran.append(name)
        if fails:
            raise RuntimeError(f"many lines\nthe last one of {name}")
        return {"quick": quick, "value": 1.5, "undefined": float("nan")}

    def sections(results: dict[str, Any]) -> list[Any]:
        table = Table(f"what {name} found", ("a", "b"), [("x", str(results["value"]))], "how")
        return [table, Curves("c", "x", "y", [1, 2], {"line": [0.5, 1.0]})]

    module = ModuleType(f"a_suite_called_{name}")
    module.__dict__.update(run=run, sections=sections)
    return module


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the suites that ran, in order; "ablation" fails."""
    names: list[str] = []
    for name in suites.SUITES:
        module = suite(name, names, fails=name == "ablation")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(suites.SUITES, name, module.__name__)
    return names


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_a_suite_is_printed_and_written(ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "new" / "k.json", tmp_path / "new" / "k.md"
    assert bench("kernels", "--quick", "--json", str(files[0]), "--markdown", str(files[1])) == 0
    document = json.loads(files[0].read_text())
    assert list(document) == ["suite", "quick", "command", "machine", "seconds", "sections", "results"]
    assert document["suite"] == "kernels" and document["quick"] is True and document["seconds"] >= 0
    assert document["command"] == "nestpipe bench kernels --quick" and document["machine"]["cores"] >= 1
    assert document["results"] == {"quick": True, "value": 1.5, "undefined": None}
    text = markdown(from_json(document["sections"]))
    assert text == "**what kernels found**\n\nhow\n\n| a | b |\n| --- | --- |\n| x | 1.5 |"
    printed = capsys.readouterr()
    assert printed.out == files[1].read_text() == f"{text}\n"
    assert "kernels: begins" in printed.err and ran == ["kernels"]


def test_all_goes_on_after_a_suite_that_fails(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("all", "--quick", "--out", str(tmp_path / "out")) == 1
    assert ran == ["kernels", "overlap", "peers", "ablation", "scaling", "sensitivity"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {f"{name}.{kind}" for name in ran if name != "ablation" for kind in ("json", "md")}
    printed = capsys.readouterr()
    assert "nestpipe: error: bench ablation failed: the last one of ablation" in printed.err
    assert "what sensitivity found" in printed.out and "## scaling" in printed.out


def test_several_suites_run_in_the_order_given_once_each(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("reading", "kernels", "reading") == 0
    assert ran == ["reading", "kernels"]
    assert (tmp_path / suites.FOLDER / "reading.json").exists() and (tmp_path / suites.FOLDER / "kernels.md").exists()


def test_one_file_for_several_suites_is_refused_before_any_runs(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("kernels", "overlap", "--json", str(tmp_path / "both.json")) == 1
    assert "--out FOLDER" in capsys.readouterr().err and not ran


def test_a_suite_that_is_none_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("kernel") == 2
    said = capsys.readouterr().err
    assert "'kernel'" in said and all(name in said for name in ("all", *suites.SUITES))


def test_the_command_line_knows_every_suite() -> None:
    assert list(cli.SUITES) == list(suites.SUITES) and tuple(cli.SUITES[: len(suites.ALL)]) == suites.ALL

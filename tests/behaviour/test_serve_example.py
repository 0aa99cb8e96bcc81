"""examples/serve.py, as its reader runs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.serve.rankers import export_two

EXAMPLE = Path(__file__).parents[2] / "examples/serve.py"


def test_it_ranks_with_a_prefix_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = export_two(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(bundle)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "signal: admitted" in printed and "prefix: full pass" not in printed
    (difference,) = (line for line in printed.splitlines() if line.startswith("largest difference"))
    assert float(difference.split()[-1]) < 1e-4


def test_it_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    with pytest.raises(SystemExit, match=r"usage: python examples/serve\.py BUNDLE"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")

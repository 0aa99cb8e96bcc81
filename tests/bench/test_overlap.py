"""`nestpipe bench overlap` runs, and its figures hang together; how fast it is nobody asks here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nestpipe.bench import overlap


def test_both_workloads_are_measured_under_both_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Callable[[ModuleType], None], sane: Callable[..., str]
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    # Only there: multiprocessing asks the same function for a folder that it keeps.
    monkeypatch.setattr(overlap, "tempfile", SimpleNamespace(mkdtemp=lambda **_: str(folder)))
    monkeypatch.setattr(overlap, "QUICK", dataclasses.replace(overlap.QUICK, rounds=1, steps=8))
    here(overlap)
    results = overlap.run(quick=True)
    assert list(results) == ["compute longer than lookup", "lookup longer than compute"]
    for one in results.values():
        serial, dbp = one["ms"]["serial"], one["ms"]["dbp"]
        assert serial["exposed lookup"] == pytest.approx(serial["lookup"])  # a serial run hides nothing
        assert serial["compute lane"] == pytest.approx(serial["longest lane"]) and serial["store lane"] == 0
        assert 0 < dbp["sync"] <= dbp["exposed lookup"] and dbp["longest lane"] <= dbp["step"] * 1.001
        assert one["file_mb"] > 0 and dbp["bytes"] == pytest.approx(serial["bytes"], rel=0.1) and dbp["memory"] > 0
    text = sane(overlap.sections(results))
    assert "| lookup longer than compute | dbp |" in text
    assert not folder.exists()

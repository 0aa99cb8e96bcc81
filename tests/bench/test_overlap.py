"""`nestpipe bench overlap` runs, and its figures hang together; how fast it is nobody asks here."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.bench import overlap


def test_both_workloads_are_measured_under_both_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = overlap.run(quick=True)
    assert list(results) == ["compute longer than lookup", "lookup longer than compute"]
    for one in results.values():
        serial, dbp = one["ms"]["serial"], one["ms"]["dbp"]
        assert serial["exposed"] == pytest.approx(serial["lookup"])  # a serial run hides nothing
        assert serial["lane compute"] == pytest.approx(serial["busiest"]) and "lane store" not in serial
        assert 0 < dbp["sync"] <= dbp["exposed"] and dbp["busiest"] <= dbp["step"] * 1.001
        assert one["file_mb"] > 0
    assert "dbp / serial" in overlap.table(results)
    assert not list(tmp_path.iterdir())

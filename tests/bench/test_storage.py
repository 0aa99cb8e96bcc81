from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe.bench import storage


def test_stores_return_what_was_written_and_a_table_larger_than_its_memory_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sane: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where no other store is installed
    results = storage.run(quick=True)
    (one,) = results["key_value"]["stores"].values()
    assert one["read"] > 0 and one["write"] > 0 and one["cpu_ms"] > 0 and one["compute"] > 0
    for large, workers in zip(results["large"], (1, 2), strict=True):
        assert large["workers"] == workers and large["rows"] == storage.QUICK.rows
        assert large["file_bytes"] > 1.5 * 64e6
        assert large["training"]["read_from_disk"] > 0.3
        # Nearer to 1 for a real budget: at this size what every process takes whatever its tables counts too.
        assert large["peak_over_budget"] < 2
    assert f"| 2 | {storage.QUICK.rows:,} |" in sane(storage.sections(results))
    assert not list(tmp_path.iterdir())  # working files are gone

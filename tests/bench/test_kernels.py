from __future__ import annotations

import json
from pathlib import Path

from nestpipe.bench import kernels, suites


def test_every_kernel_is_timed_against_something(tmp_path: Path, capsys) -> None:
    suites.run("kernels", json_file=tmp_path / "kernels.json", quick=True)
    results = json.loads((tmp_path / "kernels.json").read_text())["results"]
    for part in ("deduplicate", "index lookup + gather", "bucket", "pool", "scatter-add", "update adam", "update sgd"):
        assert any(name.startswith(part) for name in results), part
    assert all(one["ms"] > 0 and one["against_ms"] > 0 and one["speedup"] > 0 for one in results.values())
    assert kernels.table(results) in capsys.readouterr().out

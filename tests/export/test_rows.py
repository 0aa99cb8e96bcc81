"""Rows for other programs. (tests/checkpoint/test_commands.py has more of Parquet.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe import load_bundle
from nestpipe.export import export_rows
from tests.serve.trained import Exported, Ranker
from tests.test_cli import run


@pytest.mark.parametrize("table", ["plain", "half/odd name", "rare"])
def test_npy_has_the_rows_and_their_keys_beside_them(exported: Exported, tmp_path: Path, table: str) -> None:
    assert run("export", exported.checkpoints[2], tmp_path / "rows.npy", "--format", "npy", "--table", table) == 0
    keys, values = np.load(tmp_path / "rows.keys.npy"), np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert len(np.unique(keys)) == len(keys) == len(values) == exported.said[2]["num_keys"][table]
    assert values.dtype == np.float32 and keys.dtype == np.int64
    bundle = load_bundle(exported.bundles[2], model=Ranker())
    assert torch.equal(bundle.rows(table, keys), torch.from_numpy(values.copy()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.keys.npy", "rows.npy"]


def test_parquet_and_npy_have_the_same(exported: Exported, tmp_path: Path) -> None:
    assert export_rows(exported.checkpoints[1], tmp_path / "rows.npy", table="short", kind="npy") == export_rows(
        exported.checkpoints[1], tmp_path / "rows.parquet", table="short"
    )
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert rows["key"].to_pylist() == np.load(tmp_path / "rows.keys.npy").tolist()
    assert rows["values"].to_pylist() == np.load(tmp_path / "rows.npy").tolist()


def test_an_unknown_kind_is_told(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows as 'parket', which is not known; did you mean 'parquet'"):
        export_rows(exported.checkpoints[0], tmp_path / "rows", table="plain", kind="parket")

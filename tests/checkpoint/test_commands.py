"""`nestpipe checkpoint inspect | verify | export`, as a user meets them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe import Trainer
from nestpipe.checkpoint.manifest import folder_of
from tests.checkpoint.test_saving import contents, make_trainer, train
from tests.cluster import Cluster
from tests.test_cli import run

FULL, CHANGES = folder_of(3), folder_of(4)
TABLES = ["plain", "half/odd name", "short", "rare"]


def save_both(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each table: keys and their rows, as the trainer gives them."""
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(folder, full_every=2)
    rows_by_step = {}
    for first, last in ((0, 3), (3, 4)):
        train(trainer, first, last)
        trainer.checkpoint(checkpoints)
        held = contents(trainer)["tables"]
        rows_by_step[folder_of(trainer.steps)] = {
            name: rows_of(trainer, name, sorted(held[name]["rows"])) for name in TABLES
        }
    checkpoints.wait()
    return rows_by_step


def rows_of(trainer: Trainer, name: str, keys: list[int]) -> dict[int, list[float]]:
    return dict(zip(keys, trainer.rows(name, torch.tensor(keys)).float().tolist(), strict=True))


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("commands")
    return folder, cluster.run(2, save_both, folder)[0]


@pytest.fixture
def copy(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def test_inspect_says_what_is_in_it(saved: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, held = saved
    assert run("checkpoint", "inspect", folder / FULL) == 0
    said = capsys.readouterr().out.splitlines()
    assert "step 3, saved by 2 worker(s)" in said[0] and said[0].endswith("all rows")
    assert f"table plain: {len(held[FULL]['plain'])} keys, dim 4, float32, Adam, 3 updates" in said
    assert f"table half/odd name: {len(held[FULL]['half/odd name'])} keys, dim 5, bfloat16, Adagrad, 3 updates" in said
    assert run("checkpoint", "inspect", folder / CHANGES) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(f"rows changed since {FULL}, which it needs")
    (line,) = [text for text in said if text.startswith("table plain:")]
    keys, records = (int(number) for number in re.findall(r"(\d+) (?:keys|records)", line))
    assert keys == len(held[CHANGES]["plain"]) and 0 < records < keys


def test_inspect_and_verify_of_a_folder_are_of_all_in_it(
    saved: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("checkpoint", "inspect", saved[0]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [CHANGES, FULL]
    assert said[0].endswith(f"changes since {FULL}") and said[1].endswith("full")
    assert run("checkpoint", "verify", saved[0]) == 0
    assert capsys.readouterr().out == f"{saved[0]}: sound\n"


def test_verify_tells_every_flaw_in_a_line_and_leaves_with_1(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "verify", copy / CHANGES) == 0
    assert capsys.readouterr().out == f"{copy / CHANGES}: sound\n"
    cut, gone, changed = "state.0-of-2.json", "dense.safetensors", "table-plain.1-of-2.safetensors"
    (copy / CHANGES / cut).write_bytes(b"{")
    (copy / CHANGES / gone).unlink()
    content = bytearray((copy / FULL / changed).read_bytes())
    content[-1] ^= 8
    (copy / FULL / changed).write_bytes(content)
    assert run("checkpoint", "verify", copy / CHANGES) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    for name, fragment in ((cut, "has 1 bytes instead of"), (gone, "cannot be read"), (changed, "is damaged")):
        assert sum(name in line and fragment in line for line in said) == 1, said
    assert run("checkpoint", "verify", copy / FULL) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    nowhere = tmp_path / "nowhere"
    for path, message in ((tmp_path, "is not a checkpoint: it has no manifest.json"), (nowhere, "does not exist")):
        assert run("checkpoint", action, path) == 1
        out, err = capsys.readouterr()
        assert f"{path} {message}" in out + err


def test_inspect_of_one_with_a_file_missing_names_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / FULL / "table-plain.1-of-2.safetensors").unlink()
    assert run("checkpoint", "inspect", copy / FULL) == 1
    assert "table-plain.1-of-2.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("step", [FULL, CHANGES])
@pytest.mark.parametrize("table", TABLES)
def test_export_gives_the_rows_of_the_trainer(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, step: str
) -> None:
    expected, out = saved[1][step][table], tmp_path / "rows.parquet"
    assert expected
    assert run("checkpoint", "export", saved[0] / step, table, out) == 0
    assert capsys.readouterr().out == f"{len(expected):,} rows of {table}: {out}\n"
    rows = pq.read_table(out)
    assert rows.column_names == ["key", "values"] and str(rows.schema.field("values").type.value_type) == "float"
    assert len(rows) == len(expected)
    exported = dict(zip(rows["key"].to_pylist(), rows["values"].to_pylist(), strict=True))
    assert exported == expected
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_export_of_more_rows_than_a_group_holds(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestpipe.checkpoint.rows.ROWS", 7)
    for step in (FULL, CHANGES):
        assert run("checkpoint", "export", saved[0] / step, "plain", tmp_path / "rows.parquet") == 0
        rows = pq.read_table(tmp_path / "rows.parquet")
        assert sorted(rows["key"].to_pylist()) == sorted(saved[1][step]["plain"])
        values = {
            key: np.float32(row).tolist() for key, row in zip(*(rows[i].to_pylist() for i in (0, 1)), strict=True)
        }
        assert values == saved[1][step]["plain"]


def test_export_of_a_table_that_is_not_there_names_the_nearest(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("checkpoint", "export", saved[0] / FULL, "plein", tmp_path / "rows.parquet") == 1
    error = capsys.readouterr().err
    assert "has no table 'plein'" in error and "did you mean 'plain'" in error
    assert list(tmp_path.iterdir()) == []


def test_export_of_a_damaged_checkpoint_writes_nothing(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / FULL / "table-plain.0-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for step in (FULL, CHANGES):
        assert run("checkpoint", "export", copy / step, "plain", tmp_path / "rows.parquet") == 1
        assert file.name in capsys.readouterr().err
    assert not (tmp_path / "rows.parquet").exists()


def test_export_into_a_folder_that_is_not_there_is_an_error_and_no_traceback(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "rows.parquet"
    code = run("checkpoint", "export", saved[0] / FULL, "plain", out)
    assert (code == 0 and out.exists()) or (code == 1 and str(out.parent) in capsys.readouterr().err)

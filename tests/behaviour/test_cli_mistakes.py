"""Mistakes on the command line: each ends in one line that says what to do, before any work is done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nestpipe.cli import _guard, main
from nestpipe.errors import StorageError, TrainingError

CLICKS = """
[data]
kind = "synthetic_clicks"
num_features = 2
keys_per_table = 50
num_dense = 2
num_samples = 400
num_test_samples = 100
num_valid_samples = 100

[model]
kind = "dlrm"
bottom = [8]
top = [8]

[tables."f*"]
dim = 4
pooling = "sum"

[train]
batch_size = 32
steps = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file, a folder and a config; also the working folder."""
    (tmp_path / "clicks.toml").write_text(CLICKS)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The one line that a command which fails prints; no traceback got through."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(command.split())
    error = capsys.readouterr().err
    assert left.value.code not in (0, None) and "Traceback" not in error, error
    assert len(error.splitlines()) == 1, error
    return error


PREDICT = "clicks.toml --profile npu-1536 --workers 2"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"simulate {PREDICT} --out a-file", "cannot write a-file: it is a file"),
        (f"simulate {PREDICT} --out a-file/deeper", "cannot write a-file/deeper: {folder}/a-file is a file"),
        (f"simulate {PREDICT} --out out --json a-folder", "cannot write a-folder: it is a folder"),
        (f"plan {PREDICT} --json a-folder", "cannot write a-folder: it is a folder"),
        (f"plan {PREDICT} --json a-file/deeper", "a-file is a file"),
        ("bench kernels --quick --json a-folder", "cannot write a-folder: it is a folder"),
        ("bench kernels --quick --json a-file/x.json", "a-file is a file"),
        ("bench kernels --quick --markdown a-folder", "cannot write a-folder: it is a folder"),
        ("bench kernels --quick --out a-file", "cannot write a-file: it is a file"),
        ("profile clicks.toml --out a-folder", "cannot write a-folder: it is a folder"),
        ("report a-folder --out a-folder", "cannot write a-folder: it is a folder"),
        ("train clicks.toml --out a-file", "cannot write a-file: it is a file"),
        ("train clicks.toml --out run --json a-folder", "cannot write a-folder: it is a folder"),
        (
            "train clicks.toml --out run --set train.checkpoints=a-file/x",
            "cannot write a-file/x: {folder}/a-file is a file",
        ),
        ("train clicks.toml --out run --resume --set train.checkpoints=a-file", "cannot write a-file: it is a file"),
        ("train clicks.toml --out run --set train.storage=a-file", "cannot write a-file: it is a file"),
        ("checkpoint export nothing item a-folder", "cannot write a-folder: it is a folder"),
        ("checkpoint export nothing item out.parquet", "nothing does not exist; give the folder of a checkpoint"),
        ("checkpoint inspect nothing", "nothing does not exist; give the folder of a checkpoint"),
        ("evaluate nothing", "nothing is not a run folder"),
        ("train a-folder", "cannot read the config a-folder"),
        ("train clicks.toml --out run --set train.timeout=inf", "train.timeout must be finite float, got inf"),
        ("train clicks.toml --out run --set train.rank_at=[true]", "train.rank_at must be list of int"),
        ("train clicks.toml --out run --set model.kind=os:path", "must be a class of torch.nn.Module"),
        ("train clicks.toml --out run --set model.bottom=[-3]", "bottom[0] must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    before = sorted(folder.rglob("*"))
    assert message.format(folder=folder) in told(capsys, command)
    assert sorted(folder.rglob("*")) == before, "nothing was written"


def test_a_table_that_cannot_be_written_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise TrainingError("rank 0, tables: rows.bin: no room") from StorageError("rows.bin: no room")

    assert _guard(work, 0) == 1
    assert capsys.readouterr().err == "nestpipe: error: rank 0, tables: rows.bin: no room\n"


def finished_run(folder: Path) -> Path:
    with pytest.raises(SystemExit) as left:
        main(["train", str(folder / "clicks.toml"), "--out", str(folder / "run"), "--trace"])
    assert left.value.code == 0
    return folder / "run"


def test_a_run_folder_with_other_files_than_nestpipe_writes_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(folder)
    assert "cannot write a-folder: it is a folder" in told(capsys, "evaluate run --json a-folder")
    good = json.loads((run / "config.json").read_text())
    broken: list[Any] = [[], 3, None, "text", {**good, "schedule": []}, {**good, "data": None}, {**good, "model": {}}]
    for value in broken:
        (run / "config.json").write_text(json.dumps(value))
        assert "config" in told(capsys, "evaluate run")
    (run / "config.json").write_text("[")
    assert "run/config.json is not valid JSON" in told(capsys, "evaluate run")
    assert "run/config.json cannot be read as JSON" in told(capsys, "report run")
    for value in ([], 3, None, "text"):
        (run / "config.json").write_text(json.dumps(value))
        assert "run/config.json is not what nestpipe writes" in told(capsys, "report run")
    (run / "config.json").write_text(json.dumps({**good, "schedule": []}))
    assert "config.json: 'schedule' must be a JSON object" in told(capsys, "report run")


@pytest.mark.parametrize(
    ("entry", "value"),
    [("tables", []), ("tables", {"f0": 3}), ("metrics", 3), ("steps", "many"), ("samples_per_second", None),
     ("digest", 7), ("workers", [])],
)  # fmt: skip
def test_a_result_with_entries_of_other_types_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], entry: str, value: Any
) -> None:
    run = folder / "run"
    run.mkdir()
    good = {"schedule": "serial", "micro_batches": 1, "workers": 1, "steps": 2, "samples": 64, "tables": {},
            "samples_per_second": 10.0, "digest": "00", "metrics": {}}  # fmt: skip
    (run / "result.json").write_text(json.dumps({**good, entry: value}))
    assert f"result.json: {entry!r}" in told(capsys, "report run")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_trace_of_a_run_in_a_folder_without_permission_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(folder)
    run.chmod(0o500)
    try:
        assert "Permission denied" in told(capsys, "trace run")
    finally:
        run.chmod(0o700)


def test_a_file_that_cannot_be_put_in_its_place_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(folder)
    (run / "trace.json").mkdir(exist_ok=True)
    assert "run/trace.json: Is a directory" in told(capsys, "trace run")

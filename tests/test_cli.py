"""The command line, as a user meets it. One worker runs inside the test; several are started as real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nestpipe.checkpoint import complete
from nestpipe.cli import main
from tests.waiting import PATIENCE, is_alive, until

CLICKS = """
[data]
kind = "synthetic_clicks"
num_features = 2
keys_per_table = 50
keys_per_bag = 3
num_dense = 2
num_samples = 4000
num_test_samples = 300
num_valid_samples = 100

[model]
kind = "dlrm"
bottom = [8]
top = [8]

[tables."f*"]
dim = 4
pooling = "sum"
lr = 0.1

[train]
batch_size = 32
steps = 12
"""


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(CLICKS)
    return path


def run(*arguments: str | Path) -> int:
    """In this process; the exit code."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nestpipe", *map(str, arguments)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, err


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# -- one worker --------------------------------------------------------------------------------------------------------


def test_train_writes_a_result_and_the_same_digest_twice(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for name in ("one", "two"):
        assert run("train", clicks, "--out", tmp_path / name, "--json", tmp_path / f"{name}.json") == 0
        results.append(read(tmp_path / f"{name}.json"))
    first = results[0]
    assert {"steps", "samples_per_second", "first_loss", "last_loss", "metrics", "digest"} <= first.keys()
    assert (first["steps"], first["samples"], first["workers"], first["skipped_batches"]) == (12, 12 * 32, 1, 0)
    assert first["samples_per_second"] > 0 and first["first_loss"] != first["last_loss"]
    assert 0 < first["mfu"] < 1 and first["work"]["why_not"] is None and first["work"]["memory"] > 1e6
    assert first["metrics"].keys() == {"loss", "AUC", "NE"}
    assert first["tables"]["f0"]["rows"] > 0
    assert results[1]["digest"] == first["digest"] and results[1]["metrics"] == first["metrics"]
    assert read(tmp_path / "one" / "result.json") == first
    assert first["digest"] in capsys.readouterr().out
    assert list((tmp_path / "one" / "tensorboard").iterdir())

    assert run("train", clicks, "--out", tmp_path / "three", "--set", "train.seed=1", "--set", "train.steps=3") == 0
    other = read(tmp_path / "three" / "result.json")
    assert other["digest"] != first["digest"] and other["steps"] == 3


def test_evaluate_gives_the_metrics_of_the_run(clicks: Path, tmp_path: Path) -> None:
    out, judged = tmp_path / "run", tmp_path / "judged.json"
    assert run("train", clicks, "--out", out, "--schedule", "serial") == 0
    assert run("evaluate", out, "--json", judged) == 0
    assert read(judged) == {"split": "test", "metrics": read(out / "result.json")["metrics"]}
    assert run("evaluate", out, "--split", "valid", "--json", judged) == 0
    assert read(judged)["split"] == "valid"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_folder_with_a_run_in_it_is_refused_before_anything_starts(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "result.json").write_text("{}")
    assert run("train", clicks, "--out", out, "--workers", str(workers)) == 1
    error = capsys.readouterr().err
    assert error.count("nestpipe: error: ") == 1 and f"{out} has a run in it already (result.json)" in error
    assert "--resume" in error and "--out" in error
    assert [path.name for path in out.iterdir()] == ["result.json"]


def test_another_launcher_that_starts_a_refused_run_again_does_not_make_it_go_on_in_the_folder_of_another(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", clicks, "--out", out, "--set", "train.steps=2") == 0
    before = (out / "result.json").read_text()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("train", clicks, "--out", out) == 1
    assert "has a run in it already" in capsys.readouterr().err and (out / "result.json").read_text() == before


def test_every_schedule_tier_and_reader_ends_with_the_same_digest_and_a_trace_shows_it(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under dbp, with evaluations in between, on disk, read by another process; and evaluated again from its checkpoint."""
    plain, out = tmp_path / "plain", tmp_path / "dbp"
    assert run("train", clicks, "--out", plain, "--set", "train.eval_every=5") == 0
    disk = ("--set", "tables.f*.tier=disk", "--set", "tables.f*.memory=100MB", "--set", "train.reader=process",
            "--set", f"train.storage={tmp_path}/fast")  # fmt: skip
    assert run("train", clicks, "--out", out, "--schedule", "dbp", "--trace", "--set", "train.eval_every=5", *disk) == 0
    ours, theirs = read(out / "result.json"), read(plain / "result.json")
    assert ours["digest"] == theirs["digest"] and ours["metrics"] == theirs["metrics"] and ours["schedule"] == "dbp"
    assert (tmp_path / "fast").is_dir() and not list((tmp_path / "fast").iterdir())  # working files are gone

    capsys.readouterr()
    assert run("trace", out) == 0
    told = capsys.readouterr().out
    assert "RETRIEVE(t+1)" in told and "exposed" in told and "store" in told
    names = {event.get("name") for event in read(out / "trace.json")["traceEvents"]}
    assert {"PREFETCH", "RETRIEVE", "FWD", "UPDATE"} <= {str(name).split()[0] for name in names}
    assert (out / "trace.png").read_bytes().startswith(b"\x89PNG")

    assert run("evaluate", out, "--json", tmp_path / "judged.json") == 0
    assert read(tmp_path / "judged.json")["metrics"] == ours["metrics"]


def test_a_trace_of_a_run_without_one_says_how_to_record_it(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("trace", tmp_path) == 1
    assert "--trace" in capsys.readouterr().err


def test_evaluate_of_what_is_no_finished_run_says_so(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evaluate", tmp_path) != 0
    assert "is not a run folder" in capsys.readouterr().err
    assert run("train", clicks, "--out", tmp_path / "run", "--set", "train.steps=1") == 0
    (tmp_path / "run" / "final").rename(tmp_path / "run" / "elsewhere")
    assert run("evaluate", tmp_path / "run") != 0
    assert "has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_a_misspelt_entry_is_told_once_with_the_near_one_before_anything_starts(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    out = tmp_path / "run"
    code = run("train", clicks, "--workers", str(workers), "--out", out, "--set", "train.batchsize=3")
    error = capsys.readouterr().err
    assert code != 0 and not out.exists()
    assert error.count("nestpipe: error: config: train.batchsize") == 1 and "did you mean 'batch_size'" in error


def test_zero_workers_are_refused(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", clicks, "--workers", "0") != 0
    assert "must be at least 1" in capsys.readouterr().err


def test_a_port_in_use_is_a_clear_error(clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("train", clicks, "--workers", "2", "--port", str(port), "--out", tmp_path / "run") != 0
    error = capsys.readouterr().err
    assert f"port in use: {port}" in error and "choose another --port" in error
    assert not (tmp_path / "run").exists()


def test_a_model_in_the_working_directory_is_found_and_its_failure_shows_where(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model_of_test_cli.py").write_text(
        "from torch import nn\n"
        "class Ranker(nn.Module):\n"
        "    def forward(self, batch, rows):\n"
        "        return rows['no such feature']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = CLICKS.replace('kind = "dlrm"\nbottom = [8]\ntop = [8]', 'kind = "own_model_of_test_cli:Ranker"')
    clicks.write_text(text)
    assert run("train", clicks, "--out", "run") == 1
    error = capsys.readouterr().err
    assert "rank 0, a first look at the evaluation on 'test': KeyError: 'no such feature'" in error
    assert "own_model_of_test_cli.py" in error and "line 4" in error
    assert not (tmp_path / "run").exists()
    assert run("train", clicks, "--out", "run", "--set", "train.eval_split=none") == 1
    error = capsys.readouterr().err
    assert "rank 0, batch 0: KeyError: 'no such feature'" in error
    assert "own_model_of_test_cli.py" in error and "line 4" in error
    assert not (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run" / "final").exists()


# -- several workers ---------------------------------------------------------------------------------------------------


def test_two_workers_train_from_one_command(clicks: Path, tmp_path: Path) -> None:
    out, judged = tmp_path / "run", tmp_path / "judged.json"
    code, text, error = finish(start("train", clicks, "--workers", "2", "--out", out))
    assert code == 0, error
    result = read(out / "result.json")
    assert (result["workers"], result["steps"], result["samples"]) == (2, 12, 12 * 64)
    assert result["bytes_sent"] > 0 and text.count(result["digest"]) == 1
    assert run("evaluate", out, "--json", judged) == 0
    assert read(judged)["metrics"] == pytest.approx(result["metrics"], rel=1e-6)


def assert_leaves_with(process: subprocess.Popen[str], out: Path, *fragments: str) -> None:
    code, _, error = finish(process)
    assert code not in (0, None)
    for fragment in fragments:
        assert fragment in error, error
    assert not (out / "result.json").exists() and not (out / "final").exists()


def test_a_sequence_file_cut_in_the_middle_of_a_row_ends_all_workers(tmp_path: Path) -> None:
    data, recipe, out = tmp_path / "sequences.txt", tmp_path / "sequences.toml", tmp_path / "run"
    data.write_text("\n".join(f"{user} {user + 1} {user + 2} {user + 3}" for user in range(40)) + "\n40 41 4")
    recipe.write_text(
        f'[data]\nkind = "sequences"\npath = "{data}"\n[model]\nkind = "hstu"\n'
        '[tables.item]\ndim = 8\nfeatures = ["history", "negatives"]\n[train]\nbatch_size = 8\nsteps = 5\n'
    )
    # Every worker has the same error: it is told once.
    process = start("train", recipe, "--workers", "2", "--out", out)
    assert_leaves_with(process, out, "nestpipe: error: ", f"{data} ends in the middle of line 41")


def criteo_line(rng: random.Random) -> str:
    integers = [str(rng.randrange(100)) for _ in range(13)]
    categories = [f"{rng.randrange(2**32):08x}" for _ in range(26)]
    return "\t".join([str(rng.randrange(2)), *integers, *categories])


def test_a_bad_row_that_only_one_rank_reads_ends_all_workers(tmp_path: Path) -> None:
    data, recipe, out = tmp_path / "day.tsv", tmp_path / "criteo.toml", tmp_path / "run"
    rng = random.Random(0)
    lines = [criteo_line(rng) for _ in range(1800)]
    cut = 1500  # in the second block of the file: rank 1 reads it, rank 0 does not
    lines[cut - 1] = lines[cut - 1][:40]
    data.write_text("\n".join(lines) + "\n")
    assert sum(len(line) + 1 for line in lines[: cut - 1]) > 1 << 18
    recipe.write_text(
        f'[data]\nkind = "criteo"\npath = "{data}"\n[model]\nkind = "dlrm"\nbottom = [8]\ntop = [8]\n'
        '[tables."C*"]\ndim = 4\npooling = "sum"\n[train]\nbatch_size = 16\n'
    )
    process = start("train", recipe, "--workers", "2", "--out", out)
    assert_leaves_with(process, out, "nestpipe: error: rank 1, batch ", f"{data}, line {cut}")


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == parent and b"nestpipe" in command:
            found.append(int(entry.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
@pytest.mark.parametrize("schedule", ["serial", "dbp"])
def test_all_workers_leave_when_one_is_killed(clicks: Path, tmp_path: Path, schedule: str) -> None:
    out = tmp_path / "run"
    options = ("--schedule", schedule, "--out", out, "--set", "train.steps=100000000",
               "--set", "train.checkpoint_every=20")  # fmt: skip
    process = start("train", clicks, "--workers", "2", *options)
    try:
        until(
            lambda: complete(out / "checkpoints") or process.poll() is not None, "the run is in the middle of its steps"
        )
        workers = children(process.pid)
        assert len(workers) == 2, workers
        os.kill(workers[-1], signal.SIGKILL)
        code, _, error = finish(process)
    finally:
        process.kill()
    assert code not in (0, None)
    assert "all 2 workers have left" in error
    assert not any(is_alive(worker) for worker in workers)
    assert not (out / "result.json").exists() and not (out / "final").exists()


def test_results_that_cannot_be_written_are_told_before_the_training(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    assert run("train", clicks, "--json", tmp_path, "--out", tmp_path / "run") == 1
    assert "it is a folder; choose another path" in capsys.readouterr().err
    assert run("train", clicks, "--out", tmp_path / "taken" / "run") == 1
    assert "is a file; choose another path" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

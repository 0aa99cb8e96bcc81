"""Real workers that are told to leave, or are killed: the run goes on from its checkpoints and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from nestpipe import run
from nestpipe.checkpoint import complete, problems
from nestpipe.cli import STOPPED
from nestpipe.config import read as read_config
from tests.behaviour.slow import FILE
from tests.cluster import Cluster
from tests.test_cli import CLICKS, children, finish, read, start
from tests.waiting import until

STEPS = 120
OPTIONS = ("--workers", "2", "--set", f"train.steps={STEPS}", "--set", "train.checkpoint_every=20",
           "--set", "train.full_every=2", "--set", "model.kind=tests.behaviour.slow:Slow")  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "clicks.toml"
    path.write_text(CLICKS)
    return path


def train_undisturbed(recipe: Path) -> str:
    config = read_config(recipe, [f"train.steps={STEPS}"])
    return run.train(config, folder=recipe.parent / "whole", json_file=None)["digest"]


@pytest.fixture(scope="module")
def digest(cluster: Cluster, recipe: Path) -> str:
    """Of a run that nobody disturbs."""
    return cluster.run(2, train_undisturbed, recipe)[0]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are slow while it exists."""
    file = tmp_path / "slow"
    file.touch()
    monkeypatch.setenv(FILE, str(file))
    return file


def wait_for_a_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    until(lambda: complete(out / "checkpoints") or process.poll() is not None, "there is a checkpoint")
    assert process.poll() is None, finish(process)


def test_sigterm_saves_and_resume_ends_with_the_same_bits(
    recipe: Path, digest: str, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("train", recipe, *OPTIONS, "--out", out)
    try:
        wait_for_a_checkpoint(process, out)
        process.send_signal(signal.SIGTERM)
        code, _, error = finish(process)
    finally:
        process.kill()
    slow.unlink()
    assert code == STOPPED == 143, error
    newest = complete(out / "checkpoints")[0]
    step = int(newest.name.split("-")[1])
    assert f"stopped by a signal after step {step}; saved to {newest}; go on with --resume" in error, error
    assert not list(problems(newest)) and not (out / "result.json").exists()
    code, _, error = finish(start("train", recipe, *OPTIONS, "--out", out, "--resume"))
    assert code == 0, error
    assert f"resuming after step {step}, from {newest}" in error
    result = read(out / "result.json")
    assert (result["digest"], result["steps"], result["session_steps"]) == (digest, STEPS, STEPS - step)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
def test_a_worker_that_is_killed_is_started_again_and_the_run_ends_with_the_same_bits(
    recipe: Path, digest: str, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("train", recipe, *OPTIONS, "--out", out, "--restarts", "2")
    try:
        wait_for_a_checkpoint(process, out)
        workers = children(process.pid)
        assert len(workers) == 2, workers
        os.kill(workers[-1], signal.SIGKILL)
        slow.unlink()
        code, _, error = finish(process)
    finally:
        process.kill()
    assert code == 0, error
    assert "resuming after step " in error
    result = read(out / "result.json")
    assert result["digest"] == digest and result["session_steps"] < STEPS == result["steps"]
    assert not [path.name for path in (out / "checkpoints").iterdir() if path.name.endswith(".partial")]

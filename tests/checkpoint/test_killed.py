"""Real workers that are told to leave, or are killed: the run goes on from its checkpoints and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nestpipe import run
from nestpipe.checkpoint import complete, problems
from nestpipe.cli import STOPPED
from nestpipe.config import read as read_config
from tests.cluster import Cluster
from tests.test_cli import CLICKS, PATIENCE, children, finish, read, start

# Steps enough to be killed in the middle of; checkpoints often.
OPTIONS = ("--workers", "2", "--set", "train.steps=300", "--set", "train.checkpoint_every=20",
           "--set", "train.full_every=2")  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "clicks.toml"
    path.write_text(CLICKS)
    return path


def train_undisturbed(recipe: Path) -> str:
    config = read_config(recipe, ["train.steps=300"])
    return run.train(config, folder=recipe.parent / "whole", json_file=None)["digest"]


@pytest.fixture(scope="module")
def digest(cluster: Cluster, recipe: Path) -> str:
    """Of a run that nobody disturbs."""
    return cluster.run(2, train_undisturbed, recipe)[0]


def wait_for_a_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not complete(out / "checkpoints"):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)


def test_sigterm_saves_and_resume_ends_with_the_same_bits(recipe: Path, digest: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start("train", recipe, *OPTIONS, "--out", out)
    try:
        wait_for_a_checkpoint(process, out)
        process.send_signal(signal.SIGTERM)
        code, _, error = finish(process)
    finally:
        process.kill()
    assert code == STOPPED == 143, error
    newest = complete(out / "checkpoints")[0]
    step = int(newest.name.split("-")[1])
    assert f"stopped by a signal after step {step}; saved to {newest}; go on with --resume" in error, error
    assert not list(problems(newest)) and not (out / "result.json").exists()
    code, _, error = finish(start("train", recipe, *OPTIONS, "--out", out, "--resume"))
    assert code == 0, error
    assert f"resuming after step {step}, from {newest}" in error
    result = read(out / "result.json")
    assert (result["digest"], result["steps"]) == (digest, 300 - step)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
def test_a_worker_that_is_killed_is_started_again_and_the_run_ends_with_the_same_bits(
    recipe: Path, digest: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("train", recipe, *OPTIONS, "--out", out, "--restarts", "2")
    try:
        wait_for_a_checkpoint(process, out)
        workers = children(process.pid)
        assert len(workers) == 2, workers
        os.kill(workers[-1], signal.SIGKILL)
        code, _, error = finish(process)
    finally:
        process.kill()
    assert code == 0, error
    assert "resuming after step " in error
    result = read(out / "result.json")
    assert result["digest"] == digest and result["steps"] < 300
    assert not [path.name for path in (out / "checkpoints").iterdir() if path.name.endswith(".partial")]

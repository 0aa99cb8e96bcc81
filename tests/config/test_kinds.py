"""Data and models of the user's own, named MODULE:CLASS: found in the folder where the command is run, and as good as ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nestpipe import config, run
from nestpipe.cli import main
from tests.cluster import Cluster

ROOT = Path(__file__).parents[2]

# As a user writes them: no `skip`, nothing of nestpipe.data.
OWN = """
import time
from pathlib import Path

import torch
from torch import nn

from nestpipe import Batch, Jagged, Output


class Clicks:
    features = ("user", "item")

    def __init__(self, *, num_samples=64, fails_once=False):
        self.num_samples, self.fails_once = num_samples, fails_once

    def batches(self, split, *, batch_size, rank, world, seed, epoch=0):
        for number in range(self.num_samples // (batch_size * world)):
            if self.fails_once and split == "train" and (number, rank) == (3, 1) and not Path("failed").exists():
                while not list(Path("run/checkpoints").glob("step-*/manifest.sum")):
                    time.sleep(0.05)
                Path("failed").touch()
                raise RuntimeError("the cable is out")
            place = ("train", "valid", "test").index(split)
            draws = torch.Generator().manual_seed(hash((seed, epoch, place, number, rank)) % 2**31)
            user, item = torch.randint(9, (2, batch_size, 1), generator=draws)
            keys = {"user": Jagged.from_lists(user.tolist()), "item": Jagged.from_lists(item.tolist())}
            yield Batch(keys=keys, labels=(user < item).squeeze(1).float())


class Towers(nn.Module):
    def __init__(self, *, dim, width=8):
        super().__init__()
        self.out = nn.Sequential(nn.Linear(2 * dim, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch, rows):
        logits = self.out(torch.cat([rows["user"], rows["item"]], 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return Output(losses, predictions=logits.sigmoid())


class NoBatches:
    features = ("user",)


class NoEpoch:
    features = ("user",)

    def batches(self, split, *, batch_size, rank, world, seed):
        return []


class NoFeatures:
    def batches(self, split, *, batch_size, rank, world, seed, epoch=0):
        return []


class Listless(NoFeatures):
    features = "user"
"""
TOML = """
[data]
kind = "own_kinds:Clicks"

[model]
kind = "own_kinds:Towers"

[tables."*"]
dim = 4
pooling = "sum"

[train]
batch_size = 8
eval_batch_size = 8
steps = 4
checkpoint_every = 2

[schedule]
name = "nested"
micro_batches = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, and we are in it."""
    (tmp_path / "own_kinds.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_kinds", None)


def nestpipe(*arguments: str) -> str:
    """What a command says to stderr; it must end well."""
    command = [sys.executable, "-m", "nestpipe", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def here(*arguments: str) -> int:
    """In this process; the exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def in_one_go(folder: str) -> dict[str, Any]:
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        return run.train(config.read(Path("own.toml"), ["train.reader=thread"]), folder=Path("whole"), json_file=None)
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        sys.modules.pop("own_kinds", None)


def test_a_run_with_own_data_and_model_is_started_again_evaluated_reported_and_simulated(
    folder: Path, cluster: Cluster
) -> None:
    """Read in a process of its own; that fails after the first checkpoint, and the run goes on to the same bits as one that was
    never stopped and read in a thread. The data cannot skip: what was trained on is read through."""
    changes = ("--set", "data.fails_once=true", "--set", "train.reader=process")
    told = nestpipe("train", "own.toml", "--workers", "2", "--restarts", "1", "--out", "run", *changes)
    assert "the cable is out" in told and "resuming after step 2" in told
    result = json.loads(Path("run/result.json").read_text())
    whole = cluster.run(2, in_one_go, str(folder))[0]
    assert (result["digest"], result["steps"], result["session_steps"]) == (whole["digest"], 4, 2)
    assert result["metrics"] == whole["metrics"] and result["metrics"]["AUC"] > 0

    assert here("evaluate", "run", "--json", "judged.json") == 0
    assert json.loads(Path("judged.json").read_text())["metrics"].keys() == result["metrics"].keys()
    assert here("report", "run", "--out", "run.html") == 0
    assert Path("run.html").exists()
    assert (
        here("simulate", "own.toml", "--profile", "gpu-128", "--workers", "8", "--out", "simulated", "--steps", "4")
        == 0
    )
    assert Path("simulated/simulate.json").exists()


def test_the_data_set_in_the_docs_trains(folder: Path) -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    (code,) = re.findall(r"```python\n(.*?class MyData.*?)```", page, re.DOTALL)
    (folder / "own_kinds.py").write_text(code)
    toml = TOML.replace("own_kinds:Clicks", "own_kinds:MyData").replace("own_kinds:Towers", "dlrm")
    (folder / "own.toml").write_text(toml)
    assert here("train", "own.toml", "--out", "run", "--set", "data.num_samples=100") == 0
    assert json.loads(Path("run/result.json").read_text())["samples"] == 4 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.kind=own_kinds:NoBatches", "is the class NoBatches; it has no method batches.self, split, .*epoch=0"),
        ("data.kind=own_kinds:NoEpoch", "its method must be batches.*: got an unexpected keyword argument 'epoch'"),
        ("data.kind=own_kinds:Jagged", "is the class Jagged; it has no method batches"),
        ("data.kind=os:getcwd", "is a builtin_function_or_method; it must be a class with batches"),
        ("data.kind=own_kinds:Click", "cannot be imported: own_kinds has no 'Click', .*did you mean 'Clicks'"),
        (
            "data.kind=no_such:Clicks",
            "cannot be imported: No module named 'no_such'. Modules are looked for in the folder",
        ),
        ("data.kind=own_kinds:", "cannot be imported: write MODULE:CLASS, as in package.module:Data"),
        ("data.num_sample=3", ".num_sample, .*did you mean 'num_samples'"),
    ],
)
def test_data_of_ones_own_that_cannot_be_is_refused_when_the_config_is_read(
    folder: Path, change: str, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^config: data.*{message}"):
        config.read(folder / "own.toml", [change])


@pytest.mark.parametrize(("kind", "got"), [("NoFeatures", "it has none"), ("Listless", "it is 'user'")])
def test_data_of_ones_own_without_features_is_refused_when_it_is_made(folder: Path, kind: str, got: str) -> None:
    read = config.read(folder / "own.toml", [f"data.kind=own_kinds:{kind}"])
    with pytest.raises(ValueError, match=rf"config: {kind}.features must be the names in `batch.keys`.*; {got}"):
        config.build(read)

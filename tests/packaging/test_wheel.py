"""The wheel: everything is in it, it runs where the sources are not, and a user's own program passes mypy --strict against it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 600  # seconds; a few are enough on a quiet machine

TYPED = """
from collections.abc import Iterator

import torch
from torch import Tensor

from nestpipe import Batch, Feature, FitResult, Jagged, Output, RowwiseAdagrad, StepResult, Table, Trainer
from nestpipe.data import Dataset, Sequences
from nestpipe.metrics import AUC
from nestpipe.models import DLRM


class Ranker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(8, 1)

    def forward(self, batch: Batch, rows: dict[str, Jagged]) -> Output:
        vectors: Tensor = rows["history"].mean()
        return Output(losses=self.out(vectors)[:, 0])


class Data:
    features: tuple[str, ...] = ("history",)

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        yield Batch({"history": Jagged.from_lists([[1, 2], [3]])}, labels=torch.zeros(2))


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def on_step(step: StepResult) -> None:
    print(step.loss)


data: Dataset = Data()
tables = [Table("item", dim=8, optimizer=RowwiseAdagrad(lr=0.05))]
with Trainer(Ranker(), tables, [Feature("history", table="item")], dense_optimizer=adam) as trainer:
    batches = data.batches("train", batch_size=2, rank=trainer.rank, world=trainer.world, seed=0)
    result: FitResult = trainer.fit(batches, steps=3, on_step=on_step)
    loss: float = trainer.evaluate(iter(()), {"AUC": AUC()})["loss"]
    rows: Tensor = trainer.rows("item", [1, 2, 3])
other: torch.nn.Module = DLRM(num_dense=0, features=["a", "b"], dim=8)
sequences: Dataset = Sequences(path="histories.txt")
"""
# A program of the same kind with mistakes: that mypy sees them shows that it knows our types.
MISTAKEN = """
from nestpipe import Jagged, Table

Table("item", dim="wide")
lists: list[int] = Jagged.from_lists([[1]])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "nestpipe", source / "nestpipe", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with nothing but the wheel in it; what nestpipe depends on is read where the tests have it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Paths that stand in a .pth file are added as they are: an editable nestpipe among them is not found through it.
    outside = dict.fromkeys(path for path in sys.path if path.endswith("-packages"))
    (packages / "dependencies.pth").write_text("\n".join(outside))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return folder


def run(environment: Path, folder: Path, program: str, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    clean |= {"OMP_NUM_THREADS": "1", "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_that_is_not_python_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nestpipe").rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert "nestpipe/py.typed" in data and "nestpipe/bench/peers/requirements.txt" in data
    assert any(name.startswith("nestpipe/simulate/profiles/") for name in data)
    assert any(name.startswith("nestpipe/report/") for name in data)
    assert data <= inside, f"missing: {sorted(data - inside)}; see package-data in pyproject.toml"
    assert not [name for name in inside if name.startswith("tests/")]


def test_installed_it_says_its_version_and_trains_far_from_its_sources(environment: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples/demo.toml", tmp_path)
    where = run(
        environment, tmp_path, "python", "-c", "import nestpipe; print(nestpipe.__file__, nestpipe.__version__)"
    )
    assert where.startswith(str(environment)) and where.split()[1] == importlib.metadata.version("nestpipe")
    assert "simulate" in run(environment, tmp_path, "nestpipe", "--help")
    smaller = ("data.num_items=500", "data.num_test_samples=20", "data.num_valid_samples=20", "train.steps=3")
    settings = [text for entry in smaller for text in ("--set", entry)]
    said = run(
        environment, tmp_path, "nestpipe", "train", "demo.toml", "--schedule", "serial", "--out", "run", *settings
    )
    assert "3 steps" in said


def test_a_users_program_passes_mypy_strict_and_mistakes_in_it_are_found(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment / "bin/python")]
    clean = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(
        [*command, "typed.py", "mistaken.py"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=PATIENCE
    )
    complaints = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition(": ")[0] for line in complaints] == ["mistaken.py:4", "mistaken.py:5"], done.stdout

"""The README's program runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> str:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def state_after(program: str) -> Any:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(program, names)
    trainer = names["trainer"]
    with torch.no_grad():
        state = trainer.rows("item", torch.arange(500)), trainer.model.out.weight.clone()
    trainer.close()
    return state


def test_the_program_of_the_readme_runs_and_learns_the_same_in_one_piece(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = program.replace("steps=100", "steps=5")
    split = state_after(short)
    whole = state_after(short.replace("micro_batches=8", "micro_batches=1").replace("run/", "whole/"))
    for in_parts, in_one_piece in zip(split, whole, strict=True):
        torch.testing.assert_close(in_parts, in_one_piece, rtol=1e-4, atol=1e-6)


def test_the_program_of_the_readme_ends_cleanly_without_being_told_to_close(program: str, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    losses = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", done.stdout)
    assert losses is not None and float(losses[2]) < float(losses[1]), done.stdout
    assert (tmp_path / "run/step-100").is_dir()
    assert not list((tmp_path / "nestpipe-storage").glob("*"))  # the working file of the table on disk is gone

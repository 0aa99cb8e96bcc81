"""The README's program runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import Batch, Jagged

README = Path(__file__).parents[2] / "README.md"


def clicks(steps: int = 3, size: int = 40) -> Iterator[Batch]:
    """Histories of very different lengths, the first eight empty."""
    draw = torch.Generator().manual_seed(0)

    def keys(lengths: torch.Tensor) -> Jagged:
        return Jagged.from_lengths(torch.randint(0, 500, (int(lengths.sum()),), generator=draw), lengths)

    single = torch.ones(size, dtype=torch.int64)
    lengths = (torch.arange(size) - 7).clamp(min=0)
    for _ in range(steps):
        labels = torch.randint(0, 2, (size,), generator=draw).float()
        yield Batch({"history": keys(lengths), "liked": keys(single), "user": keys(single)}, labels=labels)


def run(program: str) -> Any:
    torch.manual_seed(0)
    names: dict[str, Any] = {"batches": clicks()}
    exec(program, names)
    trainer = names["trainer"]
    with torch.no_grad():
        state = trainer.rows("item", torch.arange(500)), trainer.model.out.weight.clone()
    trainer.close()
    return state


def test_the_program_of_the_readme_runs_and_learns_the_same_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    program = found[1]
    split = run(program)
    assert (tmp_path / "run/step-10000").is_dir()
    whole = run(program.replace("micro_batches=8", "micro_batches=1").replace("run/", "whole/"))
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

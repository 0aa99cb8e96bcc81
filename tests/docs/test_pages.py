"""The examples of pages run as they stand: each page in an empty folder, from top to bottom.

A block with a title is a file of that name. A config is read as soon as it is written. Python without a title runs where it
stands, with the names of what has run before; `py` is the program of another framework, which is not. Commands of a shell run
too, but for those that set up an environment.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from nestpipe import config
from nestpipe.bench.suites import SUITES
from nestpipe.cli import main
from nestpipe.optim import OPTIMIZERS
from nestpipe.schedule import SCHEDULES
from nestpipe.store.table_store import UPDATES

ROOT = Path(__file__).parents[2]
SET_UP = ("python3", "source", "pip", "make")  # done by whoever runs this
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    language: str
    title: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / "docs" / page).read_text()
    assert text.count("\n```") % 2 == 0
    return [
        Block(match[1], match[2] or "", match[3], text[: match.start()].count("\n") + 2)
        for match in BLOCK.finditer(text)
    ]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, also where modules are looked for. What was imported and registered is forgotten afterwards."""
    registries: list[dict[Any, Any]] = [SCHEDULES, OPTIMIZERS, UPDATES, SUITES]
    before = [dict(registry) for registry in registries]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def run_command(command: str, names: dict[str, Any]) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program in SET_UP:
        return
    if program == "python":
        names.update(runpy.run_path(arguments[0], run_name="__main__"))
    elif program == "nestpipe" and "--workers" not in arguments:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert not left.value.code, f"{command}: exit code {left.value.code}"
    else:
        module = {"torchrun": "torch.distributed.run", "nestpipe": "nestpipe"}[program]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=300, env=os.environ
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}:\n{done.stderr}"


def left_by_torchrec(folder: Path) -> dict[str, Any]:
    """Stand-ins for its configs and batches, and the files that it has saved."""
    entry, size, dim = "model.ebc.embedding_bags.item.weight", 10_000, 64
    torch.save({entry: torch.randn(size, dim)}, folder / "torchrec.pt")
    torch.save({"state": {entry: {"item.momentum1": torch.rand(size)}}}, folder / "torchrec-optimizer.pt")
    config = SimpleNamespace(
        name="item",
        embedding_dim=dim,
        num_embeddings=size,
        feature_names=["liked"],
        pooling=SimpleNamespace(value="SUM"),
    )
    jagged = SimpleNamespace(
        values=lambda: torch.arange(32), offsets=lambda: torch.arange(17) * 2, weights_or_none=lambda: None
    )

    batch = SimpleNamespace(kjt={"liked": jagged}, labels=torch.ones(16))
    return {"configs": [config], "loader": [batch] * 3, "steps": 3}


PAGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "guide.md": lambda folder: {},
    "extending.md": lambda folder: {},
    "judging.md": lambda folder: {},
    "data.md": lambda folder: {},
    "from_torchrec.md": left_by_torchrec,
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_the_page_run_in_order_in_an_empty_folder(
    page: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = PAGES[page](empty_folder)
    blocks = blocks_of(page)
    assert len(blocks) >= 4
    for block in blocks:
        if block.title:
            (empty_folder / block.title).write_text(block.text)
        if block.language == "toml":
            config.read(empty_folder / block.title)
        elif block.language == "python" and not block.title:
            source = "\n" * block.line + block.text  # so that a traceback shows the line of the page
            exec(compile(source, page, "exec"), names)
        elif block.language == "sh":
            for command in filter(None, block.text.splitlines()):
                run_command(command, names)
    assert "loss" in capsys.readouterr().out


def test_configs_of_the_readme_and_the_examples_are_read() -> None:
    for path in sorted((ROOT / "examples").glob("*.toml")):
        config.read(path)

"""Dependencies point one way: a room (a folder or file of nestpipe/) imports from lower floors only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nestpipe

HOUSE = Path(nestpipe.__file__).parent

# From the ground up. "nestpipe" is the front door, __init__.py. A new room gets a place here: as low as it can be.
FLOORS = (
    {
        "arena",
        "directions",
        "errors",
        "files",
        "importing",
        "kernels",
        "optim",
        "rates",
        "sealed",
        "sections",
        "sizes",
        "source_state",
        "tensorfile",
        "weights",
    },
    {"strings"},
    {"batch"},
    {"fields", "inference", "metrics", "ops", "process"},
    {"models", "schedule", "tables"},
    {"data", "exchange", "kinds", "store", "trace"},
    {"engine", "serve"},
    {"callbacks", "checkpoint"},
    {"tracking"},
    {"config", "trainer"},
    {"best"},
    {"export", "launch", "migration", "nestpipe", "running", "simulate"},
    {"report", "run"},
    {"bench", "doctor", "predict"},
    {"cli"},
    {"__main__"},
)
# What else keeps rooms apart: the simulator and the report know schedules and traces, not what runs them.
RUNS = {"engine", "store", "checkpoint", "trainer", "running", "run"}
BELOW_MODELS = {room for rooms in FLOORS[:4] for room in rooms}
NEVER = {
    "ops": BELOW_MODELS - {"batch", "kernels"},
    "models": BELOW_MODELS - {"batch", "ops"},
    "simulate": RUNS,
    "report": RUNS,
}


class Arrow(NamedTuple):
    """A file imports a module of another room."""

    file: str
    line: int
    room: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.room} -> {self.target}"


def arrows(house: Path) -> Iterator[Arrow]:
    """All imports, those inside functions and those for type checkers too."""
    rooms = {path.stem if path.is_file() else path.name for path in house.iterdir()} - {"__init__"}

    def room_of(module: str) -> str:
        first = module.split(".")[1:2]
        return first[0] if first and first[0] in rooms else "nestpipe"

    for path in sorted(house.rglob("*.py")):
        parts = ("nestpipe", *path.relative_to(house).with_suffix("").parts)
        room = room_of(".".join(parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = [*parts[: len(parts) - node.level]] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                modules = [f"{module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in (room_of(module) for module in modules if module.split(".")[0] == "nestpipe"):
                if target != room:
                    yield Arrow(str(path.relative_to(house.parent)), node.lineno, room, target)


def wrong(house: Path) -> list[str]:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = list(dict.fromkeys(arrows(house)))
    homeless = sorted({room for arrow in found for room in (arrow.room, arrow.target)} - floor.keys())
    if homeless:
        return [f"{room} is on no floor: put it into FLOORS, as low as it can be" for room in homeless]
    return [
        str(arrow)
        for arrow in found
        if floor[arrow.target] >= floor[arrow.room] or arrow.target in NEVER.get(arrow.room, ())
    ]


def test_no_room_imports_one_of_its_own_floor_or_above() -> None:
    assert wrong(HOUSE) == []


def test_only_the_command_line_imports_bench() -> None:
    assert {arrow.room for arrow in arrows(HOUSE) if arrow.target == "bench"} == {"cli"}


def test_wrong_arrows_are_seen_wherever_they_are(tmp_path: Path) -> None:
    house = tmp_path / "nestpipe"
    for room, text in {
        "report": "def late():\n    from nestpipe import bench",
        "bench": "import nestpipe.report",
        "simulate": "from nestpipe.engine.step import StepOperations",
        "engine": "from ..trainer import Trainer",
        "trainer": "",
        "models": "from nestpipe.batch import Batch",
        "batch": "import torch",
    }.items():
        (house / room).mkdir(parents=True)
        (house / room / "__init__.py").write_text(text)
    assert wrong(house) == [
        "nestpipe/engine/__init__.py:1: engine -> trainer",
        "nestpipe/report/__init__.py:2: report -> bench",
        "nestpipe/simulate/__init__.py:1: simulate -> engine",
    ]
    (house / "attic.py").write_text("from nestpipe.batch import Batch")
    assert wrong(house) == ["attic is on no floor: put it into FLOORS, as low as it can be"]

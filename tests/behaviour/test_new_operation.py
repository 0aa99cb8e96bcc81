"""A new operation is one line in the table: it is then checked, costed, counted, drawn and explained everywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from nestpipe.report import write
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.check import check, require
from nestpipe.schedule.ops import COMPUTE, LOOKUP, OPERATIONS, RETRIEVE, ROUTE, Op, Operation, Schedule, Task
from nestpipe.schedule.serial import serial
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import parse, to_toml
from nestpipe.simulate.sweep import predict, run
from nestpipe.trace import report, save
from tests.simulate.tiny import profile, workload

PACK = Operation(
    "PACK",
    LOOKUP,
    "compresses the rows that were found",
    unit="row of the owner",
    colour="#123456",
    group="keys",
    collective="all_to_all",
    reads=("positions[t]",),
    writes=("packed[t]",),
)
LINKS = Network(4, Level(latency=1e-6, bandwidth=1e6), Level(latency=1e-5, bandwidth=1e5))


def packing(*, after: str = RETRIEVE, lane: str = COMPUTE, micro_batches: int = 1, look_ahead: None = None) -> Schedule:
    """serial, with PACK behind another operation."""
    plain = serial(micro_batches=micro_batches)

    def step(t: int) -> Iterator[Task]:
        for task in plain.step(t):
            yield task
            if task.op.name == after:
                yield Task(Op(PACK.name, t), lane, (task.op,))

    return dataclasses.replace(plain, name="packing", step=step)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, PACK.name, PACK)
    monkeypatch.setitem(SCHEDULES, "packing", packing)


def test_it_is_checked() -> None:
    assert require(packing()).problems == []
    problems = check(packing(after=ROUTE, lane="pack")).problems
    assert any("PACK(t)" in problem and "positions" in problem for problem in problems), problems
    assert any("PACK" in problem and "keys" in problem for problem in problems), "one lane for each group"
    assert any("PACK" in problem for problem in check(serial()).problems), "a schedule without it says so"


def test_it_is_costed_by_its_unit_its_collective_and_its_kind() -> None:
    known = profile({"PACK": (0.5, 0.01)}, network=LINKS, crowding=0.1)
    cost = Costs(workload(), known, Setting("packing"), 8)(Op("PACK", 0))
    assert cost.alone == pytest.approx(0.5 + 0.01 * 20 * 1.7)  # 20 rows of an owner; seven others crowd it
    assert cost.together == pytest.approx(LINKS.all_to_all(20 * 36, 8))  # in records of 36 bytes
    assert "PACK = { fixed = 0.5, each = 0.01 }  # row of the owner" in to_toml(known)
    operations = {"PACK": {"fixed": 0.5, "each": 0.01}}
    links = {"per_node": 1, "inside": {"latency": 0, "bandwidth": 1}, "between": {"latency": 0, "bandwidth": 1}}
    assert parse("read", {"links": links, "operations": operations}).work("PACK").each == 0.01


def test_a_unit_that_nobody_counts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, PACK.name, dataclasses.replace(PACK, unit="furlong"))
    with pytest.raises(ValueError, match=r"PACK.*furlong"):
        Costs(workload(), profile({}), Setting("packing"), 8)


def test_its_time_counts_as_lookup() -> None:
    took = predict(workload(), profile({"PACK": (0.5, 0.0), "FWD": (1.0, 0.0)}), Setting("packing"), 2)
    assert took.lookup == took.exposed_lookup == pytest.approx(500) and took.step == pytest.approx(1500)


def test_it_is_drawn_and_explained(tmp_path: Path) -> None:
    simulated, _ = run(workload(), profile({"PACK": (0.5, 0.0), "FWD": (1.0, 0.0)}), Setting("packing"), 1, steps=12)
    save(tmp_path, simulated.trace(0))
    assert "PACK" in report(tmp_path)
    pixels = (imread(tmp_path / "trace.png")[:, :, :3] * 255).round().astype(int)
    assert (pixels == np.array([0x12, 0x34, 0x56])).all(axis=2).any()
    result = {
        "schedule": "packing", "micro_batches": 1, "workers": 1, "steps": 12, "samples": 120, "seconds": 18.0,
        "samples_per_second": 6.7, "first_loss": 0.7, "last_loss": 0.25, "metrics": {}, "digest": "54fd70e8b339",
        "tables": {},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = write([tmp_path]).read_text()
    assert PACK.meaning in page and PACK.colour in page

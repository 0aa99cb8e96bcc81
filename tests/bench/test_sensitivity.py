"""`nestpipe bench sensitivity` runs, and its figures hang together; how fast it is nobody asks here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from nestpipe.bench import sensitivity
from nestpipe.bench.contestants import Law
from nestpipe.bench.sensitivity import FULL, QUICK, Point, Size
from nestpipe.sections import Bars, Curves

SMALL = Size(
    base=Point(micro_batches=2, tokens=120, length=10, dim=16),
    cuts=(1, 2),
    dims=(8, 32),
    lengths=(5, 20),
    laws=(Law(0), Law(1.05, per_user=4)),
    seconds_per_token=1e-5,
    batches=2,
    rounds=1,
    steps=4,
    short=4,
)


def test_each_kind_of_axis_is_measured(here: Callable[[ModuleType], None], sane: Callable[..., str]) -> None:
    here(sensitivity)
    results = sensitivity.measure(SMALL, ("micro-batches", "dim", "keys"))  # length differs from dim in its points only
    axes = results["axes"]
    assert {axis: list(values) for axis, values in axes.items()} == {
        "micro-batches": ["1", "2"],
        "dim": ["8", "32"],
        "keys": ["uniform", "sessions (4 samples a user, Zipf(1.05))"],
    }
    for axis, values in axes.items():
        schedules = ["serial", "dbp", "fwp", "nested"] if axis == "micro-batches" else ["serial", "nested"]
        for ms in values.values():
            assert list(ms) == schedules and ms["serial"]["speedup"] == 1
            assert ms["serial"]["compute"] >= 0.9 * 1.2  # 120 tokens of 10 us
    assert axes["micro-batches"]["1"]["serial"] == axes["micro-batches"]["2"]["serial"]
    assert axes["micro-batches"]["1"]["nested"] != axes["micro-batches"]["2"]["nested"]
    assert axes["dim"]["32"]["serial"]["bytes"] > 2.5 * axes["dim"]["8"]["serial"]["bytes"]
    uniform, sessions = axes["keys"].values()
    assert uniform["serial"]["bytes"] > sessions["serial"]["bytes"]

    sections = sensitivity.sections(results)
    text = sane(sections[:-1], is_emulated=True) + sane(sections[-1:])
    assert "loopback, unlimited (a test)" in text and "real compute on the CPU" in text
    assert text.count("| dbp |") == 1  # the same whatever N
    curves = [section for section in sections if isinstance(section, Curves)]
    assert [curve.x for curve in curves] == [[1, 2]] * 2 + [[8, 32]] * 2
    assert sum(isinstance(section, Bars) for section in sections) == 2


@pytest.mark.parametrize("size", [FULL, QUICK, SMALL])
def test_an_axis_changes_one_thing(size: Size) -> None:
    for axis, field in (("dim", "dim"), ("length", "length"), ("keys", "law")):
        points = size.points(axis).values()
        assert len({getattr(point, field) for point in points}) == len(points) > 1
        for point in points:
            changed = [name for name, value in vars(point).items() if value != getattr(size.base, name)]
            assert changed in ([], [field]) and point.samples * point.length == size.base.tokens

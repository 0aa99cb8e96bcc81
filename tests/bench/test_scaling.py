"""`nestpipe bench scaling` runs, and its figures hang together; how fast it is nobody asks here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from nestpipe.bench import scaling
from nestpipe.bench.mix import Mix
from nestpipe.bench.scaling import Cpu, Emulated
from nestpipe.sections import Curves

MIX = Mix(workers=2, samples=16, length=5, step=0.06, rounds=1, steps=4, short=4)
EMULATED = Emulated(counts=(1, 2), mix=MIX, micro_batches=2)
CPU = Cpu(counts=(1, 2), samples=16, length=5, layers=1, micro_batches=2, rounds=1, steps=4)


def test_every_schedule_is_measured_on_every_count(
    here: Callable[[ModuleType], None], sane: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(scaling)
    monkeypatch.setattr(scaling.os, "cpu_count", lambda: 1)
    results = {"emulated": scaling.run_emulated(EMULATED), "cpu": scaling.run_cpu(CPU)}
    one, two = results["emulated"]["runs"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["seconds_per_byte"] == two["seconds_per_byte"] > 0  # one link for all counts
    schedules = ["serial", "dbp", "fwp, N = 2, clustering taper", "nested, N = 2, clustering taper"]
    assert list(one["ms"]) == list(two["ms"]) == schedules
    for name in schedules:
        a, b = one["ms"][name], two["ms"][name]
        assert a["efficiency"] == 1 and b["efficiency"] == pytest.approx(a["step"] / b["step"])
        assert b["samples per second"] == pytest.approx(2 * 16 * 1e3 / b["step"])
        assert a["bytes"] == 0 < b["bytes"]  # a worker alone sends nothing
    assert one["ms"]["serial"]["communication"] < 0.5 * two["ms"]["serial"]["communication"]
    assert [run["workers"] for run in results["cpu"]["runs"]] == [1]  # as many as there are cores

    sections = scaling.sections(results)
    emulated = [section for section in sections if "(CPU)" not in section.title]
    text = sane(emulated, is_emulated=True) + sane([section for section in sections if section not in emulated])
    assert "| serial | 2 |" in text and "94.1%" in text and "Real compute on the CPU" in text
    curves = {section.title.split(": ")[1]: section for section in emulated if isinstance(section, Curves)}
    assert list(curves) == ["efficiency", "samples per second"]
    assert curves["efficiency"].x == [1, 2] and curves["efficiency"].lines["serial"][0] == 1


def test_all_sizes_go_from_one_worker_to_that_of_the_mix() -> None:
    for size in (Emulated(), scaling.QUICK_EMULATED):
        assert size.counts[0] == 1 and max(size.counts) == size.mix.workers
        assert scaling.settings(size.micro_batches)[0].name == "serial"

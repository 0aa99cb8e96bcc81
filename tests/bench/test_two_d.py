from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from nestpipe.bench import groups, moments, replicated_mix
from nestpipe.bench.groups import Groups
from nestpipe.bench.mix import Mix
from nestpipe.bench.replicated_mix import ReplicatedMix

SMALL = dataclasses.replace(moments.QUICK, rows=48, steps=64)


def test_moment_scaling_is_measured_and_its_figures_hang_together(ratios: dict, sane: Callable[..., str]) -> None:
    cost = moments.measure_cost(SMALL)
    text = sane(moments.sections(dataclasses.asdict(SMALL), ratios, cost))
    assert all(f"| {kind} | {every} |" in text for kind in moments.KINDS for every in SMALL.every)
    assert all(figures["update_ns"] > 0 and figures["average_ns"] > 0 for figures in cost.values())


@pytest.fixture(scope="module")
def ratios() -> dict:
    return moments.measure(SMALL)


@pytest.mark.parametrize("every", ["1", "4"])
@pytest.mark.parametrize("kind", moments.KINDS)
def test_a_scale_for_each_row_makes_steps_of_one_table_for_every_kind_of_row(
    ratios: dict, kind: str, every: str
) -> None:
    assert ratios[kind][every]["row"]["steady"] == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("every", ["1", "4"])
def test_one_scale_for_all_rows_is_right_for_some_of_them(ratios: dict, every: str) -> None:
    root = SMALL.replicas**0.5
    of = {kind.split(":")[0]: by_every[every] for kind, by_every in ratios.items()}
    for kind in ("rare", "noisy"):
        assert of[kind]["1"]["steady"] == pytest.approx(1 / root, rel=0.1)
        assert of[kind]["8"]["steady"] == pytest.approx(1.0, abs=0.1)
    assert of["consistent"]["1"]["steady"] == pytest.approx(1.0, rel=1e-4)
    assert of["consistent"]["8"]["steady"] == pytest.approx(root, rel=1e-4)


def test_the_first_touch_is_no_longer_than_in_one_table_when_every_step_is_averaged(ratios: dict) -> None:
    assert all(by_every["1"]["row"]["touches"][0] < 1.001 for by_every in ratios.values())


def test_groups_of_workers_are_measured_with_and_without_replicas(
    here: Callable[..., None], sane: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(groups)
    monkeypatch.setattr(groups, "compile_kernels", lambda: None)
    size = Groups(meshes=((2, 1),), samples=16, length=5, micro_batches=2, every=2, rounds=1, steps=6)
    (run,) = groups.measure(size)
    names = ["1D", "2D exact", "2D averaged every 2 steps"]
    assert list(run["rounds"]) == names and run["why"] == "a test"
    sent = {name: blocks[0]["bytes"] for name, blocks in run["rounds"].items()}
    assert all(value > 0 for value in sent.values())  # nothing but keys and what keeps replicas together
    text = sane(list(groups.sections(dataclasses.asdict(size), [run])), is_emulated=True)
    assert all(f"| 2 x 1 | {name} |" in text for name in names)


def test_the_mix_with_replicas_lasts_as_the_simulator_says(here: Callable[..., None], sane: Callable[..., str]) -> None:
    here(replicated_mix)
    size = ReplicatedMix(Mix(workers=4, samples=16, length=5, step=0.1, cuts=(2,), rounds=1, steps=6, short=4), every=2)
    results = replicated_mix.measure(size)
    lasts = results["lasts"]
    assert lasts["1D"] == {"inside": size.mix.communication, "between": 0.0, "rows": 1.0}
    assert lasts["2D exact"]["rows"] == pytest.approx(4, rel=1e-6)  # every replica looks up the rows of all groups
    assert lasts["2D averaged every step"]["rows"] < 1.2 and lasts["2D exact"]["inside"] < 0.6 * size.mix.communication
    text = sane(list(replicated_mix.sections(dataclasses.asdict(size), results)), is_emulated=True)
    assert "(1.041x)" in text

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from nestpipe.bench import moments

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

"""The search for the highest rate within the SLO."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nestpipe.bench.serving.capacity import STEP, Climb, Ladder, climb
from nestpipe.bench.serving.figures import Figures


def figures(rate: float, limit: float, beyond: float = 1.0) -> Figures:
    """Of a server that keeps all rates up to a limit; above it its goodput is `beyond` of the limit."""
    goodput = rate if rate <= limit else beyond * limit
    requests = 1_000
    return Figures(
        offered=rate, requests=requests, answered=requests, in_time=int(requests * goodput / rate), goodput=goodput, rejected=0,
        errors=0, p50=1, p95=2, p99=3, lag=0, slo=0.1, sources={}, signals={}, problems={}, connections=1,
    )  # fmt: skip


def alone(measure: Callable[[float], Figures], base: float, ladder: Ladder) -> Climb:
    return climb({"alone": measure}, base, ladder)["alone"]


@pytest.mark.parametrize("limit", [0.3, 1.0, 2.9, 10.0, 40.0])
def test_the_limit_is_found_to_within_a_quarter_of_a_step(limit: float) -> None:
    found = alone(lambda rate: figures(rate, limit), 2.0, Ladder(halvings=2, lowest=-8, highest=9))
    assert limit / STEP**0.25 <= found.highest * (1 + 1e-9) and found.highest <= limit * 1.011  # 99% in time will do


def test_it_goes_on_to_twice_the_highest_rate_and_tells_what_is_left_of_the_peak() -> None:
    found = alone(lambda rate: figures(rate, 10.0, beyond=0.6), 2.0, Ladder(halvings=0))
    assert max(found.points) >= 2 * found.highest
    assert found.overload == pytest.approx(0.6 * 10 / found.peak)
    kept = alone(lambda rate: figures(rate, 10.0), 2.0, Ladder(halvings=0))
    assert kept.overload is not None and kept.overload > 0.9


def test_one_bad_point_does_not_end_the_climb() -> None:
    tried: list[float] = []

    def unlucky(rate: float) -> Figures:
        tried.append(rate)
        return figures(rate, 0.0 if len(tried) == 2 else 20.0, beyond=0.5)

    assert alone(unlucky, 2.0, Ladder(halvings=0)).highest > 10


def test_a_server_that_keeps_nothing_has_the_highest_rate_zero() -> None:
    found = alone(lambda rate: figures(rate, 1e-9), 2.0, Ladder(lowest=-2))
    assert found.highest == 0.0 and min(found.points) == pytest.approx(2.0 / STEP**2)


def test_where_no_rate_was_twice_the_highest_no_overload_is_told() -> None:
    assert Climb({1.0: figures(1.0, 10.0), 1.5: figures(1.5, 10.0)}).overload is None


def test_contestants_take_turns_and_each_ends_where_it_would_alone() -> None:
    asked: list[tuple[str, float]] = []

    def of(name: str, limit: float) -> Callable[[float], Figures]:
        return lambda rate: asked.append((name, rate)) or figures(rate, limit)  # type: ignore[func-returns-value]

    limits = {"slow": 3.0, "fast": 12.0}
    found = climb({name: of(name, limit) for name, limit in limits.items()}, 2.0, Ladder())
    assert [name for name, _ in asked[:6]] == ["slow", "fast"] * 3
    for name, limit in limits.items():
        assert found[name].points == alone(lambda rate, limit=limit: figures(rate, limit), 2.0, Ladder()).points


@pytest.mark.parametrize(("shares", "keeps"), [([0.98, 1.0, 1.0], True), ([0.98, 1.0, 0.97], False), ([0.9], False)])
def test_a_rate_that_is_missed_narrowly_is_measured_twice_more(shares: list[float], keeps: bool) -> None:
    coming = iter(shares)

    def measure(rate: float) -> Figures:
        return figures(rate, rate * next(coming))

    found = alone(measure, 2.0, Ladder(halvings=0, lowest=0, highest=0))
    assert found.points[2.0].keeps is keeps and next(coming, None) is None

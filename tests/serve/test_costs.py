"""Costs: laws that are learned from measurements, hold with outliers, and answer before there are any."""

from __future__ import annotations

import random

import pytest

from nestpipe.serve.costs import Costs, Law, Work, copy_work, prefix_work, ranking_work, together

TRUTH = (2e-3, 3e-5, 4e-9, 2e-8)
ROUGH = (1e-3, 1e-5, 1e-8, 1e-8)


def calls(count: int, seed: int = 0) -> list[Work]:
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(6, 1)) for _ in range(count)]
    return [ranking_work(n, 16, 200) if draw.random() < 0.5 else ranking_work(0, n, 200) for n in lengths]


def learned(truth: tuple[float, ...], *, count: int = 400, noise: float = 0.1, outliers: float = 0.0) -> Law:
    law, true, draw = Law(ROUGH), Law(truth), random.Random(5)
    for work in calls(count):
        seconds = true.seconds(work) * draw.lognormvariate(0, noise)
        law.observe(work, seconds * (50 if draw.random() < outliers else 1))
    return law


@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_a_law_is_learned_from_noisy_measurements_also_if_some_are_fifty_times_too_long(outliers: float) -> None:
    law, true = learned(TRUTH, outliers=outliers), Law(TRUTH)
    for work in (ranking_work(0, 100, 200), ranking_work(0, 2000, 200), ranking_work(2000, 16, 200)):
        assert law.seconds(work) == pytest.approx(true.seconds(work), rel=0.12)


def test_a_law_that_was_guessed_a_hundred_times_too_small_is_right_after_a_dozen_calls() -> None:
    truth = tuple(100 * value for value in ROUGH)
    law = learned(truth, count=12)
    work = ranking_work(0, 1000, 200)
    assert law.seconds(work) == pytest.approx(Law(truth).seconds(work), rel=0.25)


def test_a_law_follows_when_the_machine_gets_slower() -> None:
    law, draw = learned(TRUTH), random.Random(1)
    slower = Law(tuple(3 * value for value in TRUTH))
    for work in calls(500, seed=1):
        law.observe(work, slower.seconds(work) * draw.lognormvariate(0, 0.1))
    work = ranking_work(0, 1000, 200)
    assert law.seconds(work) == pytest.approx(slower.seconds(work), rel=0.15)


def test_no_coefficient_is_ever_negative() -> None:
    law, draw = Law(ROUGH), random.Random(2)
    for work in calls(300):
        law.observe(work, draw.uniform(0, 0.1))  # nothing to do with the work
        assert min(law.coefficients) >= 0 and max(law.coefficients) > 0
        assert 0 <= law.seconds(work) <= law.high(work)


def test_calls_that_are_all_alike_leave_the_law_sensible_elsewhere() -> None:
    law, true = Law(TRUTH), Law(TRUTH)
    for _ in range(5000):
        law.observe(prefix_work(500), true.seconds(prefix_work(500)))
    assert law.seconds(prefix_work(5000)) == pytest.approx(true.seconds(prefix_work(5000)), rel=0.1)


def test_high_is_what_most_calls_stay_under() -> None:
    law, true, draw = learned(TRUTH, noise=0.3), Law(TRUTH), random.Random(3)
    below = [true.seconds(work) * draw.lognormvariate(0, 0.3) <= law.high(work) for work in calls(1000, seed=4)]
    assert 0.88 < sum(below) / len(below) < 0.99


def test_before_the_first_measurement_longer_histories_take_longer() -> None:
    costs = Costs.guess()
    assert 0 < costs.full_pass(100, 200) < costs.full_pass(1000, 200) < costs.full_pass(4000, 200)


def test_prefix_and_ranking_together_attend_to_the_same_pairs_as_the_full_pass() -> None:
    whole, prefix, rest = ranking_work(0, 1050, 200), prefix_work(1000), ranking_work(1000, 50, 200)
    assert together((prefix, rest)) == pytest.approx(whole)


def test_a_batch_pays_for_one_call() -> None:
    law, work = Law(TRUTH), ranking_work(100, 5, 20)
    assert law.seconds(together([work] * 4)) == pytest.approx(4 * law.seconds(work) - 3 * TRUTH[0])


def test_copies_are_learned_over_bytes() -> None:
    law = Law((1e-4, 1e-9, 0, 0))
    for size in [10**5, 10**6, 10**7, 10**8] * 30:
        law.observe(copy_work(size), 2e-4 + 3e-10 * size)
    assert law.seconds(copy_work(5 * 10**7)) == pytest.approx(2e-4 + 0.015, rel=0.1)


def test_a_law_that_does_not_learn_stays_as_it_is() -> None:
    law = Law(TRUTH, learns=False)
    law.observe(prefix_work(10), 5.0)
    assert law.coefficients == TRUTH and law.measured == 0


@pytest.mark.parametrize("first", [(1, 2, 3), (0, 0, 0, 0), (1, -1, 0, 0), (1, float("inf"), 0, 0)])
def test_a_law_needs_four_coefficients_of_zero_or_more(first: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="4 coefficients"):
        Law(first)
    with pytest.raises(ValueError, match="quantile"):
        Law(TRUTH, quantile=1.0)


def test_the_work_of_pieces_adds_up_to_that_of_the_whole_prefix_so_that_its_law_is_learned_from_them() -> None:
    ends = [0, 128, 640, 1000]
    pieces = [prefix_work(z - a, a) for a, z in zip(ends[:-1], ends[1:], strict=True)]
    assert together(pieces) == prefix_work(1000)
    law, true = Law(ROUGH), Law(TRUTH)
    for work in pieces * 20:
        law.observe(work, true.seconds(work))
    assert law.seconds(prefix_work(1000)) == pytest.approx(true.seconds(prefix_work(1000)), rel=0.05)

"""Distinct keys among those drawn: laws against counting, and measurements that give back what was counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.simulate.keys import Measured, count, zipf


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.05, 1.5])
@pytest.mark.parametrize(("items", "drawn"), [(50, 40), (20_000, 3_000), (5_000, 20_000)])
def test_a_power_law_has_as_many_distinct_keys_as_are_counted_in_draws_of_it(
    skew: float, items: int, drawn: int
) -> None:
    rng = np.random.default_rng(1)
    chance = np.arange(1.0, items + 1) ** -skew
    edges = np.cumsum(chance / chance.sum())
    turns = max(10, 40_000 // drawn)
    counted = [len(np.unique(np.searchsorted(edges, rng.random(drawn)))) for _ in range(turns)]
    assert zipf(skew, items)(drawn) == pytest.approx(np.mean(counted), rel=0.03)


@pytest.mark.parametrize("items", [1, 2, 1_000, 10**9])
@pytest.mark.parametrize("drawn", [1, 500, 10**6])
def test_where_all_are_as_likely_it_is_the_closed_form(items: int, drawn: int) -> None:
    exact = -items * np.expm1(drawn * np.log1p(-1 / items)) if items > 1 else 1.0
    assert zipf(0.0, items)(drawn) == pytest.approx(exact, rel=1e-6)


def test_a_trillion_items_are_not_counted_one_by_one() -> None:
    law = zipf(1.05, 1e12)
    found = [law(drawn) for drawn in (1e3, 1e6, 1e9)]
    assert all(0.1 * drawn < one < drawn for one, drawn in zip(found, (1e3, 1e6, 1e9), strict=True))
    assert zipf(0.0, 1e12)(1e6) == pytest.approx(1e6, rel=1e-5)


@given(
    skew=st.floats(0, 3),
    items=st.integers(1, 10**13),
    drawn=st.lists(st.floats(1, 1e13), min_size=2, max_size=8).map(sorted),
)
def test_a_power_law_rises_and_has_never_more_than_drawn_or_than_items(
    skew: float, items: int, drawn: list[float]
) -> None:
    law = zipf(skew, items)
    found = [law(one) for one in drawn]
    for one, distinct in zip(drawn, found, strict=True):
        assert 0 < distinct <= min(one, items) * (1 + 1e-9)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(found, found[1:], strict=False))


def test_more_skew_means_fewer_distinct_keys() -> None:
    found = [zipf(skew, 1e6)(1e5) for skew in (0.0, 0.5, 1.0, 1.5)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] / 2


@pytest.mark.parametrize(("skew", "items"), [(1.0, 0), (-0.1, 10)])
def test_a_law_that_cannot_be_is_refused(skew: float, items: float) -> None:
    with pytest.raises(ValueError, match="items >= 1 and skew >= 0"):
        zipf(skew, items)


# -- measured ----------------------------------------------------------------------------------------------------------


def test_measured_is_a_power_between_its_points_and_beyond_them() -> None:
    growth = Measured([100, 10_000], [50, 500])
    assert growth(100) == pytest.approx(50) and growth(10_000) == pytest.approx(500)
    assert growth(1_000) == pytest.approx(np.sqrt(50 * 500))
    assert growth(1e6) == pytest.approx(5_000)
    assert growth(1) == 1, "5 by the power law, but no more than were drawn"
    assert growth(0) == 0 and growth(-1) == 0


def test_measured_at_one_point_is_in_proportion() -> None:
    growth = Measured([100], [50])
    assert [growth(drawn) for drawn in (0, 10, 100, 1e4)] == pytest.approx([0, 5, 50, 5_000])


@given(
    steps=st.lists(st.tuples(st.integers(1, 1_000), st.floats(0, 1)), min_size=1, max_size=6),
    asked=st.lists(st.floats(1e-3, 1e9), min_size=2, max_size=10).map(sorted),
)
def test_measured_goes_through_its_points_rises_and_never_exceeds_what_was_drawn(
    steps: list[tuple[int, float]], asked: list[float]
) -> None:
    """Any counts that can come of data: of the next n keys, 0 to n are new."""
    drawn, distinct = [10], [1]
    for more, new in steps:
        drawn.append(drawn[-1] + more)
        distinct.append(distinct[-1] + round(more * new))
    growth = Measured(drawn, distinct)
    for x, y in zip(drawn, distinct, strict=True):
        assert growth(x) == pytest.approx(y)
    found = [growth(one) for one in asked]
    assert all(0 < one <= x * (1 + 1e-9) for x, one in zip(asked, found, strict=True))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(found, found[1:], strict=False))


def test_count_after_parts_of_the_first_batch_and_after_one_two_four_batches() -> None:
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, 400, 128) for _ in range(5)]
    growth = count(keys)
    assert list(growth.drawn) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 640]
    everything = np.concatenate(keys)
    assert list(growth.distinct) == [len(set(everything[:n].tolist())) for n in growth.drawn]
    assert growth(640) == pytest.approx(len(set(everything.tolist())))


def test_what_was_counted_comes_back_also_where_new_keys_came_late() -> None:
    """A batch whose first half is one key over and over."""
    growth = count([np.concatenate([np.zeros(32, np.int64), np.arange(1, 33)])])
    assert growth(64) == pytest.approx(33)


def test_count_takes_batches_of_different_sizes_and_empty_ones() -> None:
    growth = count([np.array([1]), np.array([], np.int64), np.array([1, 2])])
    assert list(growth.drawn) == [1, 3] and list(growth.distinct) == [1, 2]


@pytest.mark.parametrize("keys", [[], [np.array([], np.int64)]], ids=["no batch", "no key"])
def test_nothing_to_count_is_told(keys: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="no keys to count"):
        count(keys)


@pytest.mark.parametrize(
    ("drawn", "distinct", "told"),
    [
        ([], [], "as many 'drawn' as 'distinct'"),
        ([1, 2], [1], "as many 'drawn' as 'distinct'"),
        ([0, 2], [1, 2], "all above 0"),
        ([1, 2], [1, -2], "all above 0"),
        ([2, 1], [1, 1], "rising"),
        ([2, 2], [1, 1], "rising"),
    ],
)
def test_counts_that_cannot_be_are_refused(drawn: list[float], distinct: list[float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Measured(drawn, distinct)

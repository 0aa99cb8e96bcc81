"""The law of a load: what comes, how often, from whom."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from nestpipe.serve.load import Load, Visit, lengths, visits

LOAD = Load(rate=200.0, users=2000)


def column(made: list[Visit], name: str) -> np.ndarray:
    return np.array([getattr(visit, name) for visit in made])


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    assert list(visits(LOAD, requests=300, seed=1)) == list(visits(LOAD, requests=300, seed=1))
    assert list(visits(LOAD, requests=300, seed=1)) != list(visits(LOAD, requests=300, seed=2))


def test_requests_come_in_order_at_the_rate_that_was_asked_for_from_the_beginning() -> None:
    signals = column(list(visits(LOAD, requests=20_000)), "signal")
    assert len(signals) == 20_000 and (np.diff(signals) >= 0).all() and signals[0] >= 0
    for part in np.array_split(signals, 4):
        assert len(part) / (part[-1] - part[0]) == pytest.approx(200, rel=0.1)


def test_arrivals_of_single_request_sessions_are_a_poisson_process() -> None:
    load = dataclasses.replace(LOAD, session=1.0)
    gaps = np.diff(column(list(visits(load, requests=20_000)), "signal"))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)


def test_popular_users_come_more_often_by_zipfs_law() -> None:
    made = list(visits(dataclasses.replace(LOAD, popularity=1.0, session=1.0), requests=40_000))
    counts = np.sort(np.bincount(column(made, "user")))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.35)


def test_users_come_back_within_a_session() -> None:
    made = list(visits(dataclasses.replace(LOAD, rate=5.0, users=10**6, popularity=0.0), requests=8000))
    times = len(made) / len(set(column(made, "user").tolist()))
    assert times == pytest.approx(LOAD.session, rel=0.1)


def test_lengths_are_log_normal_with_the_mean_and_the_tail_of_their_law() -> None:
    load = Load(users=100_000, length=400, length_spread=1.0, shortest=1, longest=10**6)
    drawn = lengths(load)
    assert drawn.mean() == pytest.approx(400 * math.exp(0.5), rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(400 * math.exp(2.326), rel=0.05)


def test_a_ranking_follows_its_signal_by_what_retrieval_and_preprocessing_take() -> None:
    made = list(visits(LOAD, requests=5000))
    gaps = column(made, "request") - column(made, "signal")
    assert (gaps > 0).all() and gaps.mean() == pytest.approx(0.06, rel=0.05)


def test_a_history_grows_until_its_window_is_full_and_then_begins_a_new_version() -> None:
    load = Load(rate=100, users=3, length=90, longest=100, shortest=10, growth=4.0)
    last: dict[int, Visit] = {}
    versions = 0
    for visit in visits(load, requests=500):
        assert 1 <= visit.known <= visit.tokens <= 100
        if before := last.get(visit.user):
            assert visit.history >= before.history
            if visit.history == before.history:
                assert visit.tokens >= before.tokens
            versions += visit.history > before.history
        last[visit.user] = visit
    assert versions == pytest.approx(500 * 4 / 25, rel=0.15)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"users": -1}, {"session": 0.5}, {"shortest": 9000}, {"growth": -1}])
def test_a_law_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Load(**wrong)  # type: ignore[arg-type]

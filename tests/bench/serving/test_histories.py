"""What the users of a load send: the same at every run, growing from visit to visit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nestpipe.bench.serving.histories import Histories
from nestpipe.serve.load import Load, visits

LOAD = Load(rate=50.0, users=10, session=6.0, pause=0.5, length=60.0, longest=100, growth=5.0, candidates=7)
ITEMS = np.arange(1_000, 1_500)


def test_a_history_at_a_later_visit_begins_with_the_earlier_one_unless_its_version_changed() -> None:
    histories, last, grown, forgot = Histories(ITEMS, LOAD), {}, 0, 0
    for visit in visits(LOAD, requests=300):
        asked = histories.of(visit)
        assert len(asked.history) == visit.tokens <= LOAD.longest and asked.known <= visit.tokens
        assert np.isin(asked.history, ITEMS).all() and len(asked.candidates) == 7
        if visit.user in last:
            version, before = last[visit.user]
            if version == visit.history:
                assert np.array_equal(asked.history[: len(before)], before)
                grown += len(asked.history) > len(before)
            else:
                dropped = (visit.history - version) * LOAD.forgotten
                kept = before[dropped:]
                assert np.array_equal(asked.history[: len(kept)], kept)
                forgot += 1
        last[visit.user] = visit.history, asked.history
    assert grown > 100 and forgot > 3


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    (visit,) = visits(LOAD, requests=1)
    one, same, other = (Histories(ITEMS, LOAD, seed=seed).of(visit) for seed in (1, 1, 2))
    assert np.array_equal(one.history, same.history) and np.array_equal(one.candidates, same.candidates)
    assert not np.array_equal(one.history, other.history)


def test_popular_items_come_more_often() -> None:
    load = dataclasses.replace(LOAD, users=400, longest=4_000, length=1_000.0)
    seen = np.concatenate([Histories(ITEMS, load).of(visit).history for visit in visits(load, requests=50)])
    assert np.mean(seen < 1_022) > 0.4 and np.mean(seen >= 1_250) > 0.05  # log-uniform: half of all below the root


def test_times_rise_and_now_is_behind_them() -> None:
    (visit,) = visits(LOAD, requests=1)
    asked = Histories(ITEMS, LOAD, times=True).of(visit)
    assert asked.times is not None and asked.now is not None
    assert (np.diff(asked.times) > 0).all() and asked.now > asked.times[-1]
    assert Histories(ITEMS, LOAD).of(visit).times is None


def test_no_items_are_refused() -> None:
    with pytest.raises(ValueError, match="no items to draw histories from"):
        Histories(ITEMS[:0], LOAD)

from __future__ import annotations

import pytest

from nestpipe.serve import pool
from nestpipe.serve.fuzz import fuzz
from nestpipe.serve.pool import Entry, Pool
from nestpipe.serve.states import State


def test_twenty_thousand_random_operations_break_nothing_and_reach_everything() -> None:
    happened = fuzz(20_000, seed=0)
    assert sum(happened.values()) == 20_000
    done = {f"{work} {how}" for work in ("Compute", "Load", "Spill") for how in ("done", "failed")}
    assert (
        happened.keys()
        >= {"Hit", "Wait", "Miss", "Compute", "Load", "Spill", "switch", "discard", "leave", "give up"} | done
    )


def test_the_same_seed_does_the_same() -> None:
    assert fuzz(2_000, seed=1) == fuzz(2_000, seed=1) != fuzz(2_000, seed=2)


def test_a_cache_that_drops_what_is_read_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def droppable(entry: Entry) -> bool:
        return entry.state in (State.DEVICE, State.BOTH)

    monkeypatch.setattr(Pool, "_droppable", staticmethod(droppable))
    with pytest.raises(AssertionError):
        fuzz(5_000)


def test_a_cache_that_forgets_what_is_under_way_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ON_DEVICE", pool.ON_DEVICE - {State.COMPUTING})
    with pytest.raises(AssertionError):
        fuzz(5_000)

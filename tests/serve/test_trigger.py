"""The trigger: who is admitted, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe.serve.trigger import Bounds, Rate, Reason, Trigger

BOUNDS = Bounds(footprint=0.5, load=0.4, window=10.0, residence=0.2)
AT_RISK = {
    "full_seconds": 0.2, "budget": 0.1, "saved_seconds": 0.1, "prefix_seconds": 0.1, "prefix_bytes": 100,
    "begins_in": 0.0, "needed_in": 0.1,
}  # fmt: skip


def decide(trigger: Trigger, now: float = 0.0, **differs: Any) -> Reason:
    return trigger.decide(now, **AT_RISK | differs)


def test_only_a_full_pass_that_would_miss_its_budget_is_worth_a_prefix() -> None:
    trigger = Trigger(BOUNDS, device_bytes=1000)
    assert decide(trigger) is Reason.ADMITTED
    assert decide(trigger, full_seconds=0.09) is Reason.FAST_ENOUGH
    assert decide(trigger, full_seconds=0.09, budget=0.08) is Reason.ADMITTED  # since the queue is longer now


def test_a_prefix_larger_than_the_device_is_refused_also_by_a_trigger_that_admits_all_else() -> None:
    assert decide(Trigger(BOUNDS, device_bytes=99)) is Reason.TOO_LARGE
    always = Trigger(BOUNDS, device_bytes=99, always=True)
    assert decide(always) is Reason.TOO_LARGE
    assert decide(always, full_seconds=0.0, prefix_bytes=99) is Reason.ADMITTED


def test_the_footprint_is_arrivals_times_size_times_residence() -> None:
    trigger = Trigger(BOUNDS, device_bytes=1000)
    for tick in range(10_000):  # 100 a second, for ten windows
        trigger.began(tick / 100, prefix_seconds=0.0, prefix_bytes=25)
    assert trigger.footprint(100.0) == pytest.approx(100 * 25 * 0.2, rel=0.01)
    assert decide(trigger, 100.0, prefix_bytes=100) is Reason.FOOTPRINT
    assert decide(trigger, 105.0, prefix_bytes=100) is Reason.ADMITTED  # they are less by now


def test_longer_residence_leaves_room_for_fewer() -> None:
    trigger = Trigger(BOUNDS, device_bytes=1000)
    for _ in range(200):
        trigger.used(0.0, resided=2.0)
    assert trigger.residence == pytest.approx(2.0, rel=0.01)
    for _ in range(100):
        trigger.began(0.0, prefix_seconds=0.0, prefix_bytes=25)
    assert decide(trigger) is Reason.FOOTPRINT


def test_pre_inference_takes_no_more_than_its_share_of_the_time() -> None:
    trigger = Trigger(BOUNDS, device_bytes=10**9)
    admitted = 0
    for tick in range(20_000):  # each takes 0.05 s, and 20 a second come
        if decide(trigger, tick / 20, prefix_seconds=0.05) is Reason.ADMITTED:
            trigger.began(tick / 20, prefix_seconds=0.05, prefix_bytes=0)
            admitted += 1
    assert admitted * 0.05 / 1000 == pytest.approx(0.4, rel=0.05)
    assert decide(trigger, 1000.0, prefix_seconds=0.05) is Reason.LOAD


def test_a_prefix_that_could_not_begin_in_time_is_refused() -> None:
    assert decide(Trigger(BOUNDS, device_bytes=1000), begins_in=0.11) is Reason.TOO_LATE


def test_for_reuse_signals_are_admitted_as_long_as_prefixes_save_more_than_they_take() -> None:
    bounds = Bounds(window=10.0, reuse=True)
    trigger = Trigger(bounds, device_bytes=10**6)
    fast = {"full_seconds": 0.05, "saved_seconds": 0.04, "prefix_seconds": 0.05}
    assert decide(Trigger(BOUNDS, device_bytes=10**6), **fast) is Reason.FAST_ENOUGH
    assert decide(trigger, **fast) is Reason.REUSE  # nothing is known yet: it is tried
    for _ in range(200):
        trigger.computed(0.0)
        trigger.used(0.0, resided=0.1)
    assert trigger.uses(0.0) == pytest.approx(1.0, abs=0.1)
    assert decide(trigger, **fast) is Reason.FAST_ENOUGH
    for _ in range(200):
        trigger.used(0.0, resided=0.1)
    assert decide(trigger, **fast) is Reason.REUSE


def test_every_decision_is_counted_under_its_reason() -> None:
    trigger = Trigger(BOUNDS, device_bytes=1000)
    for reason in (Reason.ADMITTED, Reason.LOAD, Reason.LOAD):
        trigger.count(reason)
    assert trigger.counters == {Reason.ADMITTED: 1, Reason.LOAD: 2}


def test_a_rate_forgets() -> None:
    rate = Rate(2.0)
    rate.add(0.0, 10.0)
    assert rate.per_second(0.0) == 5.0
    assert rate.per_second(0.0, 2.0) == 6.0
    assert rate.per_second(20.0) < 0.001


@pytest.mark.parametrize("wrong", [{"footprint": 0}, {"load": 1.5}, {"window": 0}, {"residence": -1}])
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Bounds(**wrong)

"""The cache: one computation per prefix, budgets that hold, and nothing dropped that is read; also under random interleavings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from nestpipe.serve.cache import Cache
from nestpipe.serve.fuzz import Account
from nestpipe.serve.states import (
    TRANSITIONS,
    Compute,
    Drop,
    Event,
    Hit,
    Key,
    Load,
    Miss,
    Place,
    Spill,
    State,
    Wait,
    Why,
)


def key(user: int = 1, history: int = 0, tokens: int = 10, model: str = "m") -> Key:
    return Key(user, history, tokens, model)


def make(device: int = 30, host: int = 0, **rest: Any) -> Account:
    return Account(Cache(device_bytes=device, host_bytes=host, model="m", **rest))


def ask(account: Account, which: Key, who: str = "who", **how: Any) -> Any:
    return account.claim(which, who, **{"size": which.tokens, "compute": True, "compute_seconds": 1.0} | how)


def put(account: Account, which: Key, *, ranking: bool = True) -> None:
    """Computed, and read by nobody."""
    assert isinstance(ask(account, which, "putter", ranking=ranking), Compute)
    account.end(which, well=True)
    account.release("putter")


def spill(account: Account) -> Key:
    actions = account.cache.spill()
    account.do(actions)
    assert isinstance(actions[-1], Spill)
    return actions[-1].key


# -- one of each -------------------------------------------------------------------------------------------------------


def test_the_first_who_asks_makes_it_compute_and_all_others_wait_for_the_same_computation() -> None:
    account = make()
    assert ask(account, key(), "a") == Compute(key(), 10)
    assert ask(account, key(), "b") == Wait(key(), "b")
    assert account.cache.computed(key()) == [Hit(key(), "a"), Hit(key(), "b")]


def test_a_ranking_does_not_begin_a_computation() -> None:
    assert ask(make(), key(), compute=False) == Miss(key(), "who", Why.ABSENT)


def test_a_computation_that_fails_tells_all_who_wait_and_leaves_nothing() -> None:
    account = make()
    ask(account, key(), "a")
    ask(account, key(), "b")
    assert account.cache.failed(key()) == [Miss(key(), "a", Why.FAILED), Miss(key(), "b", Why.FAILED)]
    assert account.cache.state(key()) is State.ABSENT and account.cache.pool.device_used == 0
    assert account.cache.counters.failed == 1


def test_whoever_leaves_is_not_told() -> None:
    account = make()
    ask(account, key(), "a")
    account.leave("a")
    assert account.cache.computed(key()) == []
    assert account.cache.state(key()) is State.DEVICE


def test_a_prefix_larger_than_the_budget_is_refused_and_nothing_is_dropped_for_it() -> None:
    account = make(30)
    put(account, key(1))
    assert ask(account, key(2, tokens=31)) == Miss(key(2, tokens=31), "who", Why.TOO_LARGE)
    assert account.cache.state(key(1)) is State.DEVICE


def test_what_is_read_is_never_dropped_so_a_full_device_refuses() -> None:
    account = make(30)
    for user in range(3):
        ask(account, key(user), f"reader {user}")
        account.end(key(user), well=True)
    assert ask(account, key(9)) == Miss(key(9), "who", Why.NO_ROOM)
    account.release("reader 1")
    assert isinstance(ask(account, key(9)), Compute)
    assert account.cache.state(key(1)) is State.ABSENT
    assert account.cache.state(key(0)) is State.DEVICE and account.cache.state(key(2)) is State.DEVICE


def test_room_under_way_counts_as_used() -> None:
    account = make(30)
    ask(account, key(1, tokens=20), "a")
    assert ask(account, key(2, tokens=20), "b") == Miss(key(2, tokens=20), "b", Why.NO_ROOM)


def test_the_least_recently_used_is_dropped_first() -> None:
    account = make(30)
    for user in (1, 2, 3):
        put(account, key(user))
    ask(account, key(1), "a")
    account.release("a")
    ask(account, key(4))
    assert [account.cache.state(key(user)) for user in (1, 2, 3)] == [State.DEVICE, State.ABSENT, State.DEVICE]


def test_a_prefix_that_no_ranking_used_is_counted_as_wasted_when_it_goes() -> None:
    account = make(10)
    ask(account, key(1), "signal", ranking=False)
    account.end(key(1), well=True, seconds=0.5)
    account.release("signal")
    assert account.cache.wasted_seconds() == 0.5 and account.cache.counters.wasted == 0
    put(account, key(2))
    assert account.cache.counters.wasted == 1 and account.cache.wasted_seconds() == 0.5
    put(account, key(3))
    assert account.cache.counters.wasted == 1  # that of user 2 was for a ranking


def test_a_ranking_that_left_before_it_came_has_not_used_it() -> None:
    account = make(10)
    ask(account, key(1), "ranking", ranking=True)
    account.leave("ranking")
    account.end(key(1), well=True)
    put(account, key(2))
    assert account.cache.counters.wasted == 1


def test_seconds_of_a_computation_that_is_given_up_or_fails_are_wasted() -> None:
    account = make(20)
    for user in (1, 2):
        ask(account, key(user), f"{user}")
        account.leave(f"{user}")
    account.give_up(key(1), seconds=0.5)
    assert account.cache.failed(key(2), seconds=0.25) == []
    assert account.cache.wasted_seconds() == 0.75 and account.cache.pool.device_used == 0
    assert account.cache.counters.cancelled == account.cache.counters.failed == 1


# -- the host ----------------------------------------------------------------------------------------------------------


def test_a_spilled_prefix_is_read_on_the_device_until_room_is_needed_and_then_loaded() -> None:
    account = make(30, 100, spill_at=0.5)
    put(account, key(1, tokens=20))
    assert spill(account) == key(1, tokens=20)
    assert isinstance(ask(account, key(1, tokens=20), "a"), Hit)  # while it is copied
    account.release("a")
    account.end(key(1, tokens=20), well=True)
    assert isinstance(ask(account, key(1, tokens=20), "a"), Hit)  # and after
    account.release("a")
    put(account, key(2, tokens=20))
    assert account.cache.state(key(1, tokens=20)) is State.HOST and account.cache.counters.lost == 0
    assert isinstance(ask(account, key(1, tokens=20), "a"), Load)
    assert isinstance(ask(account, key(1, tokens=20), "b"), Wait)
    account.end(key(1, tokens=20), well=True)
    assert account.reading == {"a": key(1, tokens=20), "b": key(1, tokens=20)}


def test_after_a_load_the_copy_on_the_host_stays_so_that_it_need_not_be_spilled_again() -> None:
    account = make(10, 100, spill_at=0.0)
    put(account, key(1))
    account.end(spill(account), well=True)
    put(account, key(2))
    ask(account, key(1), "a")
    account.end(key(1), well=True)
    account.release("a")
    assert account.cache.state(key(1)) is State.BOTH and account.cache.spill() == []


def test_it_is_loaded_only_if_that_is_faster_than_computing() -> None:
    account = make(10, 100, spill_at=0.0)
    put(account, key(1))
    account.end(spill(account), well=True)
    put(account, key(2))
    slow = {"compute_seconds": 1.0, "load_seconds": 2.0}
    assert ask(account, key(1), compute=False, **slow) == Miss(key(1), "who", Why.SLOW_LOAD)
    assert isinstance(ask(account, key(1), **slow), Compute)
    assert account.host == {}  # the copy that was of no use


def test_without_a_host_budget_nothing_is_spilled_and_what_goes_is_lost() -> None:
    account = make(10, 0, spill_at=0.0)
    put(account, key(1))
    assert account.cache.spill() == []
    put(account, key(2))
    assert account.cache.counters.lost == 1


def test_the_host_drops_what_was_used_least_recently_and_never_what_is_being_loaded() -> None:
    account = make(10, 20, spill_at=0.0)
    for user in (1, 2):
        put(account, key(user))
        account.end(spill(account), well=True)
    put(account, key(3))  # 1 and 2 are on the host only
    account.end(spill(account), well=True)
    assert [account.cache.state(key(user)) for user in (1, 2, 3)] == [State.ABSENT, State.HOST, State.BOTH]
    ask(account, key(2), "loads")
    assert (
        account.cache.spill() == []
    )  # one on the host is being loaded, the other is the copy of what is on the device
    account.check()


def test_a_host_that_is_full_of_copies_of_what_is_on_the_device_takes_no_more() -> None:
    account = make(30, 15, spill_at=0.0)
    for user in (1, 2):
        put(account, key(user))
    account.end(spill(account), well=True)
    assert account.cache.state(key(1)) is State.BOTH and account.cache.spill() == []
    assert account.host == {key(1): 10}


def test_a_load_that_fails_drops_the_copy() -> None:
    account = make(10, 20, spill_at=0.0)
    put(account, key(1))
    account.end(spill(account), well=True)
    put(account, key(2))
    ask(account, key(1), "a")
    account.end(key(1), well=False)
    assert account.cache.state(key(1)) is State.ABSENT and key(1) not in account.host


# -- newer and older ---------------------------------------------------------------------------------------------------


def test_a_longer_prefix_of_the_same_history_takes_the_place_of_a_shorter_once_it_is_there() -> None:
    account = make(50)
    put(account, key(tokens=10))
    ask(account, key(tokens=20), "a")
    assert account.cache.state(key(tokens=10)) is State.DEVICE  # still the best there is
    account.end(key(tokens=20), well=True)
    assert account.cache.state(key(tokens=10)) is State.ABSENT


def test_a_new_version_of_the_history_drops_the_old_one_at_once_unless_it_is_read() -> None:
    account = make(50)
    put(account, key(history=1))
    ask(account, key(history=1), "reader")
    ask(account, key(history=2), "a")
    assert account.cache.state(key(history=1)) is State.DEVICE
    account.release("reader")
    assert account.cache.state(key(history=1)) is State.ABSENT
    assert ask(account, key(history=1), "late") == Miss(key(history=1), "late", Why.SUPERSEDED)


def test_a_new_model_drops_what_the_old_one_computed_on_both_sides() -> None:
    account = make(20, 100, spill_at=0.0)
    put(account, key(1))
    account.end(spill(account), well=True)
    put(account, key(2, tokens=15))
    ask(account, key(3, tokens=5), "under way")
    account.do(account.cache.switch("n"))
    assert account.host == {} and set(account.device) == {key(3, tokens=5)}
    assert ask(account, key(4)) == Miss(key(4), "who", Why.SUPERSEDED)
    account.end(key(3, tokens=5), well=True)  # whoever waited may still use it
    assert account.reading == {"under way": key(3, tokens=5)}
    account.release("under way")
    assert account.device == {}


def test_a_discarded_prefix_is_not_offered_again() -> None:
    account = make()
    put(account, key())
    ask(account, key(), "reader")
    account.do(account.cache.discard(key()))
    assert list(account.cache.of_user(1)) == []
    account.release("reader")
    assert account.cache.state(key()) is State.ABSENT


# -- the table ---------------------------------------------------------------------------------------------------------


def test_events_that_the_table_does_not_list_are_refused() -> None:
    account = make(30, 30, spill_at=0.0)
    put(account, key())
    for event in Event:
        if (State.DEVICE, event) not in TRANSITIONS:
            with pytest.raises(AssertionError, match="is device: no"):
                account.cache.pool.move(account.cache.pool.entries[key()], event)


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) == set(TRANSITIONS.values())


def test_a_release_too_many_is_refused() -> None:
    account = make()
    put(account, key())
    with pytest.raises(AssertionError, match="released more often"):
        account.cache.release(key())


@pytest.mark.parametrize("wrong", [{"device_bytes": -1}, {"host_bytes": -1}, {"spill_at": 1.5}, {"spills": 0}])
def test_budgets_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        Cache(**{"device_bytes": 10} | wrong)


# -- random interleavings ----------------------------------------------------------------------------------------------


class Interleavings(RuleBasedStateMachine):
    """An instance in which anything may happen at any moment. What must hold is asserted by the account."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.account = make(40, 25, spill_at=0.4, spills=2)  # a small host: copies of what is on the device can fill it
        self.models = 0
        self.number = 0

    @rule(
        target=claims,
        user=st.integers(0, 3),
        history=st.integers(0, 2),
        tokens=st.sampled_from([3, 8, 20, 50]),
        compute=st.booleans(),
        load=st.sampled_from([0.5, 2.0]),
        ranking=st.booleans(),
    )
    def claim(self, user: int, history: int, tokens: int, compute: bool, load: float, ranking: bool) -> Any:
        self.number += 1
        which = key(user, history, tokens, self.account.cache.model)
        verdict = ask(self.account, which, str(self.number), compute=compute, load_seconds=load, ranking=ranking)
        return multiple() if isinstance(verdict, Miss) else str(self.number)

    @rule(who=consumes(claims))
    def release_or_leave(self, who: str) -> None:
        if who in self.account.reading:
            self.account.release(who)
        elif who in self.account.waiting:
            self.account.leave(who)

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if self.account.work:
            self.account.end(data.draw(st.sampled_from(sorted(self.account.work))), well=well)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        wanted = set(self.account.waiting.values())
        work = self.account.work.items()
        if unwanted := sorted(key for key, action in work if isinstance(action, Compute) and key not in wanted):
            self.account.give_up(data.draw(st.sampled_from(unwanted)))

    @rule()
    def spill(self) -> None:
        self.account.do(self.account.cache.spill())

    @rule()
    def switch(self) -> None:
        self.models += 1
        self.account.do(self.account.cache.switch(f"m{self.models}"))

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if copies := sorted(self.account.device.keys() | self.account.host.keys()):
            self.account.do(self.account.cache.discard(data.draw(st.sampled_from(copies))))

    @invariant()
    def everything_holds(self) -> None:
        self.account.check()

    def teardown(self) -> None:
        """When all is done and nobody reads, what is there can all be dropped."""
        while self.account.work:
            self.account.end(next(iter(self.account.work)), well=True)
        for who in list(self.account.reading):
            self.account.release(who)
        assert not self.account.waiting
        self.account.do(self.account.cache.switch("last"))
        assert self.account.device == {} and self.account.host == {} and len(self.account.cache) == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_drops_come_before_what_needs_their_room() -> None:
    cache = Cache(device_bytes=10, model="m")
    cache.claim(key(1), "a", size=10, compute=True)
    cache.computed(key(1))
    cache.release(key(1))
    assert cache.claim(key(2), "b", size=10, compute=True) == [Drop(key(1), Place.DEVICE), Compute(key(2), 10)]

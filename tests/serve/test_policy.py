"""An instance's decisions: every request is answered once, whatever becomes of prefixes."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import random
from typing import Any

import pytest

from nestpipe.serve.batching import Batching
from nestpipe.serve.costs import Costs, Law, copy_work, together
from nestpipe.serve.policy import Instance
from nestpipe.serve.requests import Action, Fail, Piece, Rank, Reject, Settings, Source
from nestpipe.serve.states import Drop, Load, Place, Spill, State
from nestpipe.serve.trigger import Bounds, Reason

SETTINGS = Settings(
    slo=0.1, overhead=0.0, device_bytes=10_000, bytes_per_token=1, wait=0.05, lease=1.0, piece=math.inf
)  # fmt: skip
LONG, SHORT = 2000, 20  # items: full passes of 0.2 s and 2 ms


def costs() -> Costs:
    laws = [Law(first, learns=False) for first in ((1e-5, 1e-4, 0, 0), (1e-5, 1e-4, 0, 0), (1e-5, 1e-7, 0, 0))]
    for law in laws:
        law.margin = 1.0
    return Costs(*laws)


def make(**differs: Any) -> Instance:
    return Instance(Settings(**vars(SETTINGS) | differs), costs(), model="m")


def signal(instance: Instance, now: float, user: int = 1, *, tokens: int = LONG, history: int = 0) -> Any:
    return instance.signal(now, user=user, history=history, tokens=tokens, candidates=10)


def request(instance: Instance, now: float, user: int = 1, *, tokens: int = LONG, history: int = 0, **rest: Any) -> Any:
    return instance.request(now, id=user, user=user, history=history, tokens=tokens, candidates=10, **rest)


def only(actions: list[Action], kind: type) -> Any:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"one {kind.__name__} in {actions}"
    return found[0]


def relay(instance: Instance, now: float, user: int = 1, *, tokens: int = LONG) -> Rank:
    """Signal, prefix, ranking request; the ranking has begun."""
    reason, actions = signal(instance, now, user, tokens=tokens)
    assert reason is Reason.ADMITTED
    assert instance.done(now, only(actions, Piece), seconds=0.0) == []
    return only(request(instance, now, user, tokens=tokens + 5), Rank)


# -- signals and rankings ----------------------------------------------------------------------------------------------


def test_a_long_history_is_computed_at_the_signal_and_ranked_behind_its_prefix() -> None:
    instance = make()
    rank = relay(instance, 0.0)
    (ranked,) = rank.requests
    assert ranked.key is not None and ranked.key.tokens == LONG and ranked.source is Source.DEVICE
    assert ranked.work.tokens == 5 + 10
    assert instance.done(0.01, rank, seconds=0.01) == []
    assert instance.sources == {Source.DEVICE: 1}


def test_a_short_history_is_ranked_in_full() -> None:
    instance = make()
    assert signal(instance, 0.0, tokens=SHORT) == (Reason.FAST_ENOUGH, [])
    assert only(request(instance, 0.1, tokens=SHORT), Rank).requests[0].key is None


def test_with_relay_off_nothing_is_ever_computed_ahead() -> None:
    instance = make(relay=False)
    assert signal(instance, 0.0) == (Reason.OFF, [])
    assert only(request(instance, 0.1), Rank).requests[0].source is Source.FULL


def test_a_second_visit_finds_the_prefix_of_the_first_and_more_items_are_its_tail() -> None:
    instance = make(max_tail=100)
    instance.done(0.01, relay(instance, 0.0), seconds=0.01)
    assert signal(instance, 1.0, tokens=LONG + 50) == (Reason.ON_DEVICE, [])
    assert only(request(instance, 1.1, tokens=LONG + 60), Rank).requests[0].work.tokens == 60 + 10


def test_a_prefix_that_lacks_too_many_items_is_computed_anew_and_then_replaces_the_old_one() -> None:
    instance = make(max_tail=100)
    instance.done(0.01, relay(instance, 0.0), seconds=0.01)
    reason, actions = signal(instance, 1.0, tokens=LONG + 101)
    assert reason is Reason.ADMITTED
    assert [action.place for action in instance.done(1.2, only(actions, Piece), seconds=0.2)] == [Place.DEVICE]
    assert len(instance.cache) == 1


def test_a_prefix_of_another_version_of_the_history_is_not_used() -> None:
    instance = make()
    signalled = only(signal(instance, 0.0, history=1)[1], Piece)
    instance.done(0.0, signalled, seconds=0.0)
    assert only(request(instance, 0.1, history=2), Rank).requests[0].key is None


def test_a_prefix_longer_than_the_history_of_the_request_is_not_used() -> None:
    instance = make()
    instance.done(0.0, only(signal(instance, 0.0)[1], Piece), seconds=0.0)
    assert only(request(instance, 0.1, tokens=LONG - 1), Rank).requests[0].key is None


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_ranking_waits_for_a_prefix_under_way_and_uses_it() -> None:
    instance = make()
    compute = only(signal(instance, 0.0)[1], Piece)
    assert request(instance, 0.02) == [] and instance.next_wakeup() == pytest.approx(0.07)
    ranked = only(instance.done(0.05, compute, seconds=0.05), Rank).requests[0]
    assert ranked.key == compute.key and ranked.source is Source.WAITED


def test_a_ranking_that_has_waited_long_enough_does_the_full_pass() -> None:
    instance = make()
    compute = only(signal(instance, 0.0)[1], Piece)
    request(instance, 0.02)
    assert instance.wake(0.071) == []  # the lane still computes the prefix
    (waiting,) = instance.queue
    assert waiting.source is Source.GAVE_UP and waiting.key is None
    assert only(instance.done(0.072, compute, seconds=0.072), Rank).requests == [waiting]
    assert instance.next_wakeup() == float("inf")


def test_a_computation_that_has_not_begun_is_cancelled_when_its_ranking_gives_up() -> None:
    instance = make()
    busy = only(request(instance, 0.0, user=9), Rank)
    assert signal(instance, 0.0) == (Reason.ADMITTED, [])
    request(instance, 0.01)
    assert instance.cache.counters.cancelled == 0
    instance.wake(0.061)
    assert instance.cache.counters.cancelled == 1 and len(instance.cache) == 0
    assert {type(action) for action in instance.done(0.2, busy, seconds=0.2)} == {Rank}


def test_a_prefix_that_fails_means_a_full_pass_and_no_error() -> None:
    instance = make()
    compute = only(signal(instance, 0.0)[1], Piece)
    request(instance, 0.02)
    ranked = only(instance.done(0.05, compute, seconds=0.05, well=False), Rank).requests[0]
    assert ranked.key is None and ranked.source is Source.UNUSABLE


def test_a_signal_whose_ranking_never_comes_lets_its_prefix_go() -> None:
    instance = make(device_bytes=LONG)
    instance.done(0.0, only(signal(instance, 0.0)[1], Piece), seconds=0.5)
    assert signal(instance, 0.5, user=2)[0] in (Reason.NO_ROOM, Reason.FOOTPRINT)
    assert instance.next_wakeup() == 1.0
    instance.wake(1.0)
    assert instance.signals.expired == 1
    for now in range(100):  # until the rates have faded
        instance.wake(now)
    reason, actions = signal(instance, 100.0, user=2)
    assert reason is Reason.ADMITTED and only(actions, Drop).key.user == 1
    assert instance.cache.wasted_seconds() == 0.5


def test_a_prefix_on_the_host_is_loaded_at_the_signal() -> None:
    instance = make(device_bytes=3000, host_bytes=10_000, spill_at=0.1, trigger=False)
    rank = relay(instance, 0.0)
    spill = only(instance.done(0.01, rank, seconds=0.01), Spill)
    instance.done(0.02, spill, seconds=0.01)
    compute = only(signal(instance, 1.0, user=2)[1], Piece)
    instance.done(1.0, compute, seconds=0.0)
    spill = only(instance.done(1.1, only(request(instance, 1.0, user=2), Rank), seconds=0.1), Spill)
    instance.done(1.2, spill, seconds=0.1)
    reason, actions = signal(instance, 2.0, user=1)
    assert reason is Reason.LOADED
    assert request(instance, 2.001) == []
    ranked = only(instance.done(2.002, only(actions, Load), seconds=0.001), Rank).requests[0]
    assert ranked.source is Source.LOADED and ranked.key is not None


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_is_tried_again_one_by_one_in_full_and_its_prefixes_are_discarded() -> None:
    instance = make(max_queue=10)
    first = relay(instance, 0.0, user=1, tokens=1000)
    request(instance, 0.0, user=2, tokens=SHORT)
    actions = instance.done(0.01, first, seconds=0.01, well=False)
    alone = only(actions, Rank)
    assert only(actions, Drop).key.user == 1 and len(alone.requests) == 1
    again = only(instance.done(0.02, alone, seconds=0.01), Rank)
    assert {alone.requests[0].user, again.requests[0].user} == {1, 2}
    assert instance.failed == 0


def test_a_full_pass_that_fails_alone_is_an_error_for_that_request_only() -> None:
    instance = make()
    rank = only(request(instance, 0.0, tokens=SHORT), Rank)
    assert only(instance.done(0.01, rank, seconds=0.01, well=False), Fail).request is rank.requests[0]
    assert instance.failed == 1


def test_a_full_queue_refuses_but_gives_up_late_ones_first() -> None:
    instance = make(max_queue=2, batching=Batching(requests=1))
    first = only(request(instance, 0.0, user=0, tokens=SHORT), Rank)
    for user in (1, 2):
        assert request(instance, 0.0, user=user, tokens=SHORT) == []
    refused = only(request(instance, 0.0, user=3, tokens=SHORT), Reject)
    assert refused.request.user == 3 and not refused.late
    second = only(instance.done(0.2, first, seconds=0.2), Rank)
    assert second.requests[0].user == 1  # late by now, as is the other
    assert request(instance, 0.2, user=4, tokens=SHORT) == []
    refused = only(request(instance, 0.2, user=5, tokens=SHORT), Reject)
    assert refused.request.user == 2 and refused.late


def test_with_shedding_a_request_that_cannot_be_in_time_is_turned_away_when_its_turn_comes() -> None:
    instance = make(batching=Batching(shed=True))
    rank = only(request(instance, 0.0, user=0, tokens=SHORT), Rank)
    request(instance, 0.0, user=1, tokens=500)
    rejected = only(instance.done(0.09, rank, seconds=0.09), Reject)
    assert rejected.late and rejected.request.user == 1 and instance.rejected == 1


def test_late_requests_hold_no_prefix_but_use_it_if_it_is_still_there() -> None:
    instance = make()
    busy = only(request(instance, 0.0, user=9, tokens=900), Rank)
    compute_later = signal(instance, 0.0)
    assert compute_later[0] is Reason.ADMITTED
    compute = only(instance.done(0.09, busy, seconds=0.09), Piece)
    request(instance, 0.1)
    actions = instance.done(0.3, compute, seconds=0.2)
    ranked = only(actions, Rank).requests[0]
    assert ranked.key == compute.key and ranked.source is Source.DEVICE


def test_how_long_a_late_request_waits_does_not_count_as_memory_in_use() -> None:
    """Else an overload would leave a footprint behind that refuses all signals, and the overload would stay."""
    instance = make()
    busy = only(request(instance, 0.0, user=9, tokens=900), Rank)
    signal(instance, 0.0)
    compute = only(instance.done(0.09, busy, seconds=0.09), Piece)
    request(instance, 0.1)
    rank = only(instance.done(60.0, compute, seconds=59.9), Rank)
    instance.done(61.0, rank, seconds=1.0)
    assert rank.requests[0].source is Source.DEVICE and instance.trigger.residence < 0.5


def test_behind_its_grace_a_late_request_is_turned_away() -> None:
    instance = make(batching=Batching(grace=0.0))
    rank = only(request(instance, 0.0, user=0, tokens=SHORT), Rank)
    request(instance, 0.0, user=1, tokens=SHORT)
    only(instance.done(0.096, rank, seconds=0.096), Rank)  # late, but it can still begin
    request(instance, 0.1, user=2, tokens=SHORT)
    rank = instance.running
    assert isinstance(rank, Rank) and rank.requests[0].user == 1
    rejected = only(instance.done(9.0, rank, seconds=0.01), Reject)
    assert rejected.late and rejected.request.user == 2 and instance.rejected == 1


# -- another model -----------------------------------------------------------------------------------------------------


def test_who_holds_a_prefix_of_the_old_model_is_ranked_with_it_and_all_others_with_the_new_one() -> None:
    instance = make()
    instance.done(0.0, only(signal(instance, 0.0)[1], Piece), seconds=0.0)
    busy = only(request(instance, 0.0, user=8, tokens=SHORT), Rank)
    request(instance, 0.0, user=9, tokens=SHORT)
    instance.switch(0.001, "n")
    assert instance.versions() == {"m", "n"}
    request(instance, 0.001)
    first = only(instance.done(0.002, busy, seconds=0.002), Rank)
    second = only(instance.done(0.003, first, seconds=0.001), Rank)
    models = {rank.requests[0].user: rank.model for rank in (first, second)}
    assert models == {1: "m", 9: "n"}
    instance.done(0.004, second, seconds=0.001)
    assert instance.versions() == {"n"} and len(instance.cache) == 0
    assert only(signal(instance, 1.0)[1], Piece).key.model == "n"


# -- pieces ------------------------------------------------------------------------------------------------------------


def go_on(instance: Instance, now: float, piece: Piece, *, pieces: int = 1000) -> tuple[float, list[Action]]:
    """Computes until the prefix is there, or something else comes, or for so many pieces; each takes what is expected."""
    actions: list[Action] = [piece]
    while pieces and actions and isinstance(actions[-1], Piece):
        seconds = instance.costs.prefix.seconds(actions[-1].work)
        now, pieces = now + seconds, pieces - 1
        actions = instance.done(now, actions[-1], seconds=seconds)
    return now, actions


def test_a_long_prefix_is_computed_in_pieces_of_a_share_of_the_slo_and_ranked_behind_when_it_is_whole() -> None:
    instance = make(piece=0.3, wait=0.5)
    piece = only(signal(instance, 0.0)[1], Piece)
    ends = []
    now, actions = 0.0, [piece]
    while piece := next((action for action in actions if isinstance(action, Piece)), None):
        assert piece.first == (ends[-1] if ends else 0) and piece.size == LONG
        ends.append(piece.last)
        now, actions = go_on(instance, now, piece, pieces=1)
    assert ends == [256, 512, 768, 1024, 1280, 1536, 1792, LONG]  # what 30 ms are enough for, in whole tiles
    assert instance.cache.counters.computations == 1 and instance.cache.wasted_seconds() == pytest.approx(now)
    assert only(request(instance, now), Rank).requests[0].source is Source.DEVICE


def test_less_than_a_tile_is_not_left_for_a_piece_of_its_own() -> None:
    for tokens, last in ((940, 940), (1000, 1000), (1030, 896)):  # 95 ms are enough for 949 items: 7 tiles
        instance = make(piece=0.95, trigger=False)
        assert only(signal(instance, 0.0, tokens=tokens)[1], Piece).last == last


def test_a_short_ranking_is_computed_between_two_pieces() -> None:
    instance = make(piece=0.1)
    piece = only(signal(instance, 0.0)[1], Piece)
    assert request(instance, 0.001, user=2, tokens=SHORT) == []
    rank = only(instance.done(0.013, piece, seconds=0.013), Rank)
    assert rank.requests[0].user == 2
    following = only(instance.done(0.015, rank, seconds=0.002), Piece)
    assert following.key == piece.key and following.first == piece.last


def test_a_prefix_that_is_due_earlier_goes_first_between_two_pieces() -> None:
    instance = make(piece=0.1, trigger=False, wait=0.04)
    piece = only(signal(instance, 0.0, user=1)[1], Piece)
    signal(instance, 0.0, user=2, tokens=300)
    request(instance, 0.001, user=2, tokens=300)  # waits until 0.041, the other is expected at 0.05
    _, actions = go_on(instance, 0.0, piece, pieces=1)
    assert only(actions, Piece).key.user == 2


def test_a_prefix_that_nobody_wants_any_more_is_given_up_between_two_pieces() -> None:
    instance = make(piece=0.1, lease=0.02)
    piece = only(signal(instance, 0.0)[1], Piece)
    assert instance.wake(0.021) == []  # a piece that has begun is not interrupted
    assert instance.done(0.03, piece, seconds=0.03) == [Drop(piece.key, Place.DEVICE)]
    assert len(instance.cache) == 0 and instance.running is None
    assert instance.cache.counters.cancelled == 1 and instance.cache.wasted_seconds() == 0.03


def test_what_is_left_of_a_prefix_that_nobody_waits_for_is_computed_if_users_come_back() -> None:
    instance = make(piece=0.1, lease=0.02, bounds=Bounds(reuse=True))
    piece = only(signal(instance, 0.0)[1], Piece)
    instance.wake(0.021)
    only(instance.done(0.03, piece, seconds=0.03), Piece)
    assert instance.signals.expired == 1
    now, actions = go_on(instance, 0.03, instance.running)
    assert actions == [] and instance.cache.state(piece.key) is State.DEVICE
    assert signal(instance, now)[0] is Reason.ON_DEVICE


def test_a_piece_that_fails_is_the_end_of_its_computation() -> None:
    instance = make(piece=0.1, wait=0.09)
    _, actions = go_on(instance, 0.0, only(signal(instance, 0.0)[1], Piece), pieces=2)
    request(instance, 0.03)
    ranked = only(instance.done(0.04, only(actions, Piece), seconds=0.01, well=False), Rank).requests[0]
    assert ranked.source is Source.UNUSABLE and ranked.key is None and len(instance.cache) == 0
    assert instance.cache.counters.failed == 1 and instance.cache.wasted_seconds() > 0.03


def test_pieces_go_on_with_the_model_that_they_began_with() -> None:
    instance = make(piece=0.1, slo=1.0, trigger=False)
    now, actions = go_on(instance, 0.0, only(signal(instance, 0.0)[1], Piece), pieces=1)
    assert instance.switch(now, "n") == [] and instance.versions() == {"m", "n"}
    now, actions = go_on(instance, now, only(actions, Piece))
    assert actions == []  # it is whole, and kept for its ranking
    rank = only(request(instance, now), Rank)
    assert rank.model == "m"
    instance.done(now, rank, seconds=0.0)
    assert instance.versions() == {"n"} and len(instance.cache) == 0


def test_a_ranking_does_not_give_up_a_prefix_of_which_less_is_left_than_a_full_pass_takes() -> None:
    instance = make(piece=0.1, wait=0.2, slo=0.3, trigger=False)
    piece = only(signal(instance, 0.0)[1], Piece)
    now, actions = go_on(instance, 0.0, piece, pieces=3)
    request(instance, now)  # a full pass would have to begin 0.1 s from here
    now, actions = go_on(instance, now, only(actions, Piece))
    assert now > 0.2
    ranked = only(actions, Rank).requests[0]
    assert ranked.source is Source.WAITED and ranked.key == piece.key


def test_a_ranking_gives_up_a_prefix_that_has_not_begun_in_time_for_its_full_pass() -> None:
    instance = make(piece=0.1, wait=0.2, slo=0.3, trigger=False)
    busy = only(request(instance, 0.0, user=9), Rank)
    signal(instance, 0.0)
    request(instance, 0.01)
    assert instance.next_wakeup() == pytest.approx(0.109, abs=1e-3)
    assert instance.wake(0.11) == [] and instance.cache.counters.cancelled == 1
    assert only(instance.done(0.2, busy, seconds=0.2), Rank).requests[0].source is Source.GAVE_UP


def test_a_prefix_that_lacks_too_many_items_is_extended() -> None:
    instance = make(piece=10.0, max_tail=100)
    instance.done(0.01, relay(instance, 0.0), seconds=0.01)
    reason, actions = signal(instance, 1.0, tokens=LONG + 101)
    piece = only(actions, Piece)
    assert reason is Reason.ADMITTED and piece.behind is not None and piece.behind.tokens == piece.first == LONG
    assert instance.cache.pool.entries[piece.behind].pins == 1  # it is read
    assert instance.done(1.2, piece, seconds=0.2) == [Drop(piece.behind, Place.DEVICE)]
    assert len(instance.cache) == 1 and instance.cache.counters.extended == 1


def test_a_prefix_whose_shorter_one_is_gone_when_its_turn_comes_is_computed_from_the_first_item() -> None:
    instance = make(piece=10.0, max_tail=100, device_bytes=LONG + LONG + 101)
    instance.done(0.01, relay(instance, 0.0), seconds=0.01)
    busy = only(request(instance, 1.0, user=9, tokens=900), Rank)
    assert signal(instance, 1.0, tokens=LONG + 101) == (Reason.ADMITTED, [])
    (shorter,) = [key for key, _ in instance.cache.of_user(1) if key.tokens == LONG]
    instance.cache.discard(shorter)
    piece = only(instance.done(1.1, busy, seconds=0.1), Piece)
    assert piece.first == 0 and piece.behind is None


# -- all of it at random -----------------------------------------------------------------------------------------------


def test_every_request_is_answered_once_whatever_fails_and_memory_stays_within_budget() -> None:
    kinds: collections.Counter[str] = collections.Counter()
    for seed in range(12):
        run_at_random(seed, kinds)
    assert all(kinds[kind] > 10 for kind in ("pieces", "extended", "given up")), kinds


def run_at_random(seed: int, kinds: collections.Counter[str]) -> None:
    draw = random.Random(seed)
    instance = make(
        device_bytes=draw.choice([2500, 6000]),
        host_bytes=draw.choice([0, 9000]),
        trigger=draw.random() < 0.7,
        wait=draw.choice([0.0, 0.05]),
        max_queue=draw.choice([5, 500]),
        lease=0.3,
        max_tail=draw.choice([1, 256]),
        piece=draw.choice([0.1, 0.5, math.inf]),
        bounds=Bounds(reuse=draw.random() < 0.5),
        batching=Batching(requests=4, hold=draw.choice([0.0, 0.01]), shed=draw.random() < 0.5),
    )
    events: list[tuple[float, int, str, Any]] = []
    number, ids = itertools.count(), itertools.count()
    asked: set[int] = set()
    answered: list[int] = []
    memory: dict[Place, dict[Any, int]] = {place: {} for place in Place}
    made: dict[Any, int] = {}  # items, of those that are not whole
    lengths = [int(draw.lognormvariate(5.5, 1.2)) + 1 for _ in range(12)]
    history = [0] * 12

    def push(time: float, kind: str, what: Any) -> None:
        heapq.heappush(events, (time, next(number), kind, what))

    def act(now: float, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Piece(key, size, first, last, behind):
                    assert first == (behind.tokens if behind else made.get(key, 0)) < last <= key.tokens
                    assert not behind or (behind in memory[Place.DEVICE] and behind[:2] == key[:2])
                    memory[Place.DEVICE][key] = size
                    kinds["pieces"] += not action.is_last
                    kinds["extended"] += behind is not None
                    push(now + instance.costs.prefix.seconds(action.work) * draw.lognormvariate(0, 0.5), "done", action)
                case Load(key, size):
                    assert key in memory[Place.HOST]
                    memory[Place.DEVICE][key] = size
                    seconds = instance.costs.copy.seconds(copy_work(size))
                    push(now + seconds * draw.lognormvariate(0, 0.5), "done", action)
                case Spill(key, size):
                    memory[Place.HOST][key] = size
                    push(now + 0.01 * draw.random(), "done", action)
                case Drop(key, place):
                    del memory[place][key]
                    kinds["given up"] += place is Place.DEVICE and made.pop(key, None) is not None
                case Rank(requests):
                    assert all(each.key is None or each.key in memory[Place.DEVICE] for each in requests)
                    assert not any(each.key in made for each in requests)
                    seconds = instance.costs.ranking.seconds(together(each.work for each in requests))
                    push(now + seconds * draw.lognormvariate(0, 0.5), "done", action)
                case Reject(refused) | Fail(refused):
                    answered.append(refused.id)
        assert sum(memory[Place.DEVICE].values()) <= instance.settings.device_bytes
        assert sum(memory[Place.HOST].values()) <= instance.settings.host_bytes
        instance.cache.pool.check()
        if (wake := instance.next_wakeup()) < float("inf"):
            push(wake, "wake", None)

    for _ in range(400):
        time, user = draw.uniform(0, 20), draw.randrange(12)
        push(time, "signal", user)
        if draw.random() < 0.9:
            push(time + draw.expovariate(20), "request", user)
    for time in (5.0, 12.0):
        push(time, "switch", f"m{time}")
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "wake":
            if instance.next_wakeup() <= now:
                act(now, instance.wake(now))
        elif kind == "switch":
            act(now, instance.switch(now, what))
        elif kind == "signal":
            history[what] += draw.random() < 0.1
            act(now, instance.signal(now, user=what, history=history[what], tokens=lengths[what], candidates=10)[1])
        elif kind == "request":
            lengths[what] += draw.randrange(3) if draw.random() < 0.9 else 150
            asked.add(name := next(ids))
            known = {"user": what, "history": history[what], "tokens": lengths[what], "candidates": 10}
            act(now, instance.request(now, id=name, **known))
        else:
            well = draw.random() < 0.9
            if isinstance(what, Rank):
                answered += [each.id for each in what.requests if well]
            elif not well:
                del memory[Place.HOST if isinstance(what, Spill) else Place.DEVICE][what.key]
            if isinstance(what, Piece):
                made.pop(what.key, None)
                made |= {what.key: what.last} if well and not what.is_last else {}
            act(now, instance.done(now, what, seconds=0.01, well=well))
    assert sorted(answered) == sorted(asked) and len(asked) > 300
    assert len(instance.queue) == 0 and instance.running is None and instance.versions() == {"m12.0"}
    assert not any(entry.pins or entry.state is State.COMPUTING for entry in instance.cache.pool.entries.values())


@pytest.mark.parametrize(
    "wrong", [{"overhead": 0.2}, {"wait": -1.0}, {"piece": 0.0}, {"bytes_per_token": 0}, {"max_queue": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)

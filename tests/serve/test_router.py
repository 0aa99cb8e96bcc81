"""The router: one user, one instance; few users move; who is overloaded or gone is passed over."""

from __future__ import annotations

import collections
import subprocess
import sys

import pytest

from nestpipe.serve.router import FIRST, Router

USERS = range(4000)


def names(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


def homes(router: Router) -> dict[int, str]:
    return {user: router.order(user)[0] for user in USERS}


def test_signal_and_ranking_of_a_user_agree_also_between_two_routers() -> None:
    here, there = Router(names(7)), Router(reversed(names(7)))
    for user in USERS[:500]:
        assert here.signal(0.0, user) == there.ranking(5.0, user) == here.ranking(5.0, user) == here.order(user)[0]


def test_a_new_instance_takes_its_part_of_the_users_and_no_other_moves() -> None:
    router = Router(names(9))
    before = homes(router)
    router.join("new")
    moved = {user for user, home in homes(router).items() if home != before[user]}
    assert all(router.order(user)[0] == "new" for user in moved)
    assert len(moved) / len(USERS) == pytest.approx(1 / 10, abs=0.02)


def test_when_an_instance_is_lost_only_its_own_users_move_and_spread_over_all_others() -> None:
    router = Router(names(10))
    before = {user: router.order(user) for user in USERS}
    router.lost("i3")
    takers = collections.Counter()
    for user in USERS:
        home = router.order(user)[0]
        assert home == (before[user][1] if before[user][0] == "i3" else before[user][0])
        takers[home] += before[user][0] == "i3"
    assert len(takers) == 9 and max(takers.values()) < 3 * sum(takers.values()) / 9


def test_one_that_comes_back_gets_its_users_back() -> None:
    router = Router(names(5))
    before = homes(router)
    router.lost("i2")
    router.join("i2")
    assert homes(router) == before


def test_users_are_spread_by_weight() -> None:
    router = Router(names(3))
    router.join("double", weight=2.0)
    counts = collections.Counter(homes(router).values())
    assert counts["double"] / len(USERS) == pytest.approx(2 / 5, abs=0.03)
    assert counts["i0"] / len(USERS) == pytest.approx(1 / 5, abs=0.03)


def test_an_overloaded_instance_is_passed_over_in_the_users_own_order() -> None:
    router = Router(names(6), least=3)
    first, second, *_ = router.order("u")
    for _ in range(3):
        router.begin(first)
    assert router.ranking(0.0, "u") == second and router.routed.overloaded == 1
    router.done(first)
    assert router.ranking(0.0, "u") == first


def test_a_hot_user_spreads_over_as_many_instances_as_it_needs() -> None:
    router = Router(names(6), least=2, slack=0.0)
    taken = []
    for _ in range(12):
        taken.append(router.ranking(0.0, "hot"))
        router.begin(taken[-1])
    assert list(dict.fromkeys(taken)) == router.order("hot") and set(collections.Counter(taken).values()) == {2}
    assert FIRST < 6  # so its whole order was needed


def test_load_is_bounded_by_the_even_part_and_the_slack() -> None:
    router = Router(names(10), slack=0.25, least=1)
    for request in range(5000):
        router.begin(router.ranking(0.0, request % 50))  # 50 users only
    assert max(member.load for member in router.members.values()) <= 1.25 * 500 + 1


def test_when_all_have_too_much_to_do_the_first_choice_gets_more() -> None:
    router = Router(names(1), least=1, slack=0.0)
    for _ in range(3):
        router.begin(router.ranking(0.0, "u"))
    assert router.routed.saturated == 2


def test_a_ranking_follows_its_signal_although_its_first_choice_has_become_free() -> None:
    router = Router(names(6), least=1)
    first, second, *_ = router.order("u")
    router.begin(first)
    assert router.signal(0.0, "u") == second
    router.done(first)
    assert router.ranking(1.0, "u") == second and router.routed.followed == 1
    assert router.ranking(1.0, "u") == first


def test_a_signal_is_forgotten_after_a_while() -> None:
    router = Router(names(6), least=1, memory=2.0)
    first = router.order("u")[0]
    router.begin(first)
    router.signal(0.0, "u")
    router.done(first)
    router.signal(3.0, "other")
    assert router.ranking(3.0, "u") == first and len(router._signals) == 1


def test_a_lost_instance_is_not_followed() -> None:
    router = Router(names(3))
    name = router.signal(0.0, "u")
    router.lost(name)
    assert router.ranking(0.1, "u") == router.order("u")[0] != name


def test_a_leaving_instance_gets_the_rankings_of_its_signals_and_nothing_new() -> None:
    router = Router(names(3))
    name = router.signal(0.0, "u")
    router.leave(name)
    assert name not in router.order("u")
    assert router.ranking(0.1, "u") == name
    assert router.ranking(0.1, "u") != name


def test_answers_of_an_earlier_life_do_not_make_the_load_negative() -> None:
    router = Router(names(2))
    router.begin("i0")
    router.lost("i0")
    router.lost("i0")
    router.done("i0")
    router.join("i0")
    router.done("i0")
    assert router.members["i0"].load == 0 and router._total_load == 0


def test_users_named_by_a_number_and_by_its_digits_are_two_users_and_every_process_agrees() -> None:
    router = Router(names(50))
    assert router.order(7) != router.order("7")
    program = "from nestpipe.serve.router import Router; print(Router(f'i{n}' for n in range(50)).order('7'))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(router.order("7"))


def test_mistakes_are_named() -> None:
    with pytest.raises(LookupError, match="no instance"):
        Router().ranking(0.0, "u")
    with pytest.raises(TypeError, match="str or an int"):
        Router(names(1)).ranking(0.0, 1.5)
    with pytest.raises(ValueError, match="weight"):
        Router().join("a", weight=0)
    with pytest.raises(ValueError, match="least=0"):
        Router(least=0)

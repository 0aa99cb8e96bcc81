"""Micro-batching: who runs together, nobody held past the moment it has to start."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from nestpipe.serve.batching import Batching, Queue
from nestpipe.serve.costs import Law, Work

LAW = Law((0.010, 0.001, 0.0, 0.0), learns=False)  # 10 ms, and 1 ms a token
LAW.margin = 1.0


@dataclasses.dataclass(eq=False)
class Item:
    deadline: float
    work: Work = Work(1, 10, 0, 0)  # 20 ms
    group: str = ""
    ready: float = 0.0
    start_by: float = 0.0


def make(*items: Item, **batching: float | bool) -> Queue[Item]:
    queue: Queue[Item] = Queue(Batching(**batching), LAW)  # type: ignore[arg-type]
    for item in items:
        queue.add(0.0, item)
    return queue


def test_all_that_end_before_the_earliest_deadline_run_together_with_the_most_urgent_first() -> None:
    items = [Item(1.0), Item(0.5), Item(0.9)]
    assert make(*items).take(0.0).run == [items[1], items[2], items[0]]


def test_nobody_joins_who_would_make_another_late() -> None:
    urgent, other, small = Item(0.025), Item(1.0), Item(1.0, Work(1, 4, 0, 0))
    queue = make(urgent, other, small)
    assert queue.take(0.0).run == [urgent, small]  # 24 ms together; with the other one 34
    assert queue.take(0.0).run == [other]


def test_long_ones_have_to_start_before_short_ones_of_the_same_deadline() -> None:
    short, long = Item(0.2), Item(0.2, Work(1, 150, 0, 0))
    assert make(short, long).take(0.0).run[0] is long


def test_a_batch_has_so_many_requests_and_tokens_at_most() -> None:
    assert len(make(*[Item(9.0) for _ in range(7)], requests=3).take(0.0).run) == 3
    assert len(make(*[Item(9.0) for _ in range(7)], tokens=45).take(0.0).run) == 4


def test_one_that_is_larger_than_a_batch_runs_alone() -> None:
    huge = Item(9.0, Work(1, 100, 0, 0))
    assert make(huge, Item(9.5), tokens=45).take(0.0).run == [huge]


def test_only_those_of_one_group_run_together() -> None:
    old, new = [Item(1.0, group="old") for _ in range(2)], [Item(2.0, group="new") for _ in range(2)]
    queue = make(*new, *old)
    assert queue.take(0.0).run == old and queue.take(0.0).run == new


def test_without_hold_the_instance_never_idles() -> None:
    assert len(make(Item(9.0)).take(0.0).run) == 1


def test_a_request_is_kept_for_others_to_join_until_its_hold_is_over() -> None:
    first = Item(1.0)
    queue = make(first, hold=0.1)
    taken = queue.take(0.0)
    assert taken.run == [] and taken.look_again == pytest.approx(0.1)
    second = Item(1.0)
    queue.add(0.05, second)
    assert queue.take(0.05).run == []
    assert queue.take(taken.look_again).run == [first, second]


def test_it_is_not_kept_past_the_moment_it_has_to_start_nor_when_the_batch_is_full() -> None:
    queue = make(Item(0.07), hold=10.0)
    taken = queue.take(0.0)
    assert taken.look_again == pytest.approx(0.05)
    assert len(queue.take(taken.look_again).run) == 1
    assert len(make(Item(9.0), Item(9.0), hold=10.0, requests=2).take(0.0).run) == 2


def test_late_ones_run_when_no_other_waits_the_longest_late_first() -> None:
    late, later, fine = Item(0.03), Item(0.04), Item(0.5)
    queue = make(later, late, fine, requests=1)
    taken = queue.take(0.03)
    assert taken.late == [late, later] and taken.run == [fine] and queue.late == 2
    assert queue.take(0.03).run == [late] and queue.take(0.03).run == [later]
    assert len(queue) == 0 and queue.take(0.03).look_again == math.inf


def test_late_ones_are_shed_only_if_told_to() -> None:
    late, fine = Item(0.03), Item(0.5)
    queue = make(late, fine, shed=True)
    taken = queue.take(0.03)
    assert taken.late == [late] and taken.run == [fine] and len(queue) == 0


def test_late_ones_run_alone_and_are_refused_when_their_grace_has_ended() -> None:
    late, later, fine = Item(0.03), Item(0.05), Item(0.5)
    queue = make(late, later, fine, grace=0.01)
    assert queue.take(0.035).run == [fine]
    taken = queue.take(0.041)
    assert (taken.over, taken.run) == ([late], [later]) and len(queue) == 0


def test_the_longest_late_can_be_dropped_to_make_room() -> None:
    queue = make(Item(0.01), Item(0.02))
    assert queue.drop_late() is None  # not known to be late yet
    queue.take(0.0)
    late = queue.drop_late()
    assert late is not None and len(queue) == 0


@pytest.mark.parametrize("seed", range(5))
def test_everyone_runs_once_and_none_is_made_late_by_those_it_runs_with(seed: int) -> None:
    draw, now = random.Random(seed), 0.0
    queue = make(requests=4, hold=draw.choice([0.0, 0.02]))
    waiting: list[Item] = []
    ran: list[Item] = []
    for _ in range(300):
        item = Item(now + draw.uniform(0.02, 0.4), Work(1, draw.randrange(1, 60), 0, 0), draw.choice("ab"))
        queue.add(now, item)
        waiting.append(item)
        now += draw.expovariate(40)
        taken = queue.take(now)
        in_time = [item for item in taken.run if item.start_by >= now]
        end = now + LAW.high(Work(1, sum(item.work.tokens for item in taken.run), 0, 0))
        assert all(end <= item.deadline + 1e-9 for item in in_time)
        assert not taken.run or len({item.group for item in taken.run}) == 1
        ran += taken.run
        now = end if taken.run else now
    while len(queue):
        now += 1.0
        ran += queue.take(now).run
    assert len(ran) == len(waiting) and set(map(id, ran)) == set(map(id, waiting))


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"tokens": 0}, {"hold": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Batching(**wrong)  # type: ignore[arg-type]

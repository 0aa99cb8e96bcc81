"""What follows from facts and links, without any worker."""

from __future__ import annotations

import pytest

from nestpipe.doctor.checks import FAIL, OK, WARN, Link, needed, of_links


def test_a_slow_pair_between_machines_is_named_and_one_inside_is_no_reason_for_it() -> None:
    hosts = ["a", "a", "b", "c"]
    links = [
        Link(0, 1, 0.1, 9000),
        Link(0, 2, 0.2, 1000),
        Link(0, 3, 0.2, 900),
        Link(1, 2, 0.2, 950),
        Link(2, 3, 0.3, 100),
    ]
    inside, between = of_links(links, hosts)
    assert inside.level == OK and "1 pairs, median 9,000 Mbit/s" in inside.says
    assert between.level == WARN and "rank 2 (b) and rank 3 (c) have 100: all wait for them" in between.says


def test_a_machine_with_a_slow_link_is_named_among_three() -> None:
    (finding,) = of_links([Link(0, 1, 0.1, 20), Link(0, 2, 0.1, 900), Link(1, 2, 0.1, 24)], ["a", "b", "c"])
    assert finding.level == WARN and "rank 0 (a) and rank 1 (b) have 20" in finding.says


def test_two_links_have_no_usual_rate() -> None:
    (finding,) = of_links([Link(0, 1, 0.1, 9000), Link(0, 2, 0.1, 100)], ["a", "b", "c"])
    assert finding.level == OK and "slowest 100" in finding.says


@pytest.mark.parametrize(("ahead", "level"), [(0.3, OK), (-90.0, WARN)])
def test_clocks_that_are_apart_are_a_warning(ahead: float, level: str) -> None:
    clocks = of_links([Link(0, 1, 0.1, 100, ahead)], ["a", "b"])[-1]
    assert (clocks.what, clocks.level) == ("clocks", level) and level != FAIL


def test_tables_take_what_their_owners_hold_and_those_on_disk_their_budget() -> None:
    memory = {"name": "a", "record": 74, "owners": None, "memory": None}
    disk = {"name": "b", "record": 84, "owners": 1, "memory": 1000}
    assert needed([memory], {"a": 80}, workers=4) == (20 * 100, 0)
    assert needed([disk], {}, workers=4) == (1000, 0)
    assert needed([disk], {"b": 10}, workers=4)[1] == pytest.approx(10 * 100 * 4096 / 3864)

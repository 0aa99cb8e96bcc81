from __future__ import annotations

import pytest

from nestpipe.doctor.links import measure, partner
from tests.cluster import Cluster


@pytest.mark.parametrize("world", range(2, 12))
def test_every_pair_meets_once_and_nobody_meets_two_at_a_time(world: int) -> None:
    met = []
    for number in range(world - 1 + world % 2):
        pairs = [(rank, partner(rank, world, number)) for rank in range(world)]
        assert all(partner(other, world, number) == rank for rank, other in pairs if other is not None)
        met += [(rank, other) for rank, other in pairs if other is not None and rank < other]
    assert sorted(met) == [(a, b) for a in range(world) for b in range(a + 1, world)]


def test_measured_links_have_a_rate_a_delay_and_the_first_workers_clock(cluster: Cluster) -> None:
    links = [link for of_worker in cluster.run(3, measure) for link in of_worker]
    assert [(link.first, link.second) for link in sorted(links, key=lambda link: (link.first, link.second))] == [
        (0, 1), (0, 2), (1, 2)
    ]  # fmt: skip
    assert all(link.mbit > 1 and 0 < link.milliseconds < 10_000 for link in links)
    assert all((link.ahead is not None) == (link.first == 0) for link in links)
    assert all(abs(link.ahead) < 5 for link in links if link.ahead is not None)

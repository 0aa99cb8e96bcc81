"""The alpha-beta forms against small cases worked out on paper."""

from __future__ import annotations

import math

import pytest

from nestpipe.simulate.network import Level, Network

INSIDE = Level(latency=1.0, bandwidth=10.0)
BETWEEN = Level(latency=3.0, bandwidth=2.0)
NODES_OF_FOUR = Network(4, INSIDE, BETWEEN)


def test_a_message_takes_a_time_and_so_does_each_byte() -> None:
    assert INSIDE.seconds(20.0, 1) == 1.0 + 2.0
    assert INSIDE.seconds(20.0, 5) == 5.0 + 2.0
    assert INSIDE.seconds(20.0, 0) == 0.0


def test_congestion_slows_bytes_and_not_messages_for_every_further_peer() -> None:
    crowded = Level(latency=1.0, bandwidth=10.0, congestion=0.01)
    assert crowded.seconds(20.0, 1) == INSIDE.seconds(20.0, 1)
    assert crowded.seconds(20.0, 101) == pytest.approx(101 * 1.0 + 2 * 2.0)
    network = Network(1, INSIDE, Level(latency=0.0, bandwidth=10.0, congestion=0.5))
    assert network.all_to_all(30.0, 3) == pytest.approx(2.0 * 1.5)


def test_all_to_all_inside_a_node() -> None:
    # 40 bytes for four workers: three messages of ten leave
    assert NODES_OF_FOUR.all_to_all(40.0, 4) == 3 * 1.0 + 30.0 / 10.0
    assert NODES_OF_FOUR.all_to_all(40.0, 2) == 1.0 + 20.0 / 10.0


def test_all_to_all_between_nodes_only() -> None:
    assert Network(1, INSIDE, BETWEEN).all_to_all(40.0, 4) == 3 * 3.0 + 30.0 / 2.0


def test_all_to_all_on_both_takes_as_long_as_the_slower() -> None:
    # 80 bytes for eight: 30 to three neighbours, 40 to four on the other node
    assert NODES_OF_FOUR.all_to_all(80.0, 8) == max(3 * 1.0 + 30.0 / 10.0, 4 * 3.0 + 40.0 / 2.0) == 32.0
    slow_inside = Network(4, Level(latency=100.0, bandwidth=10.0), BETWEEN)
    assert slow_inside.all_to_all(80.0, 8) == 303.0


@pytest.mark.parametrize(("spread", "near"), [(1, 3), (2, 1), (4, 0), (8, 0)])
def test_a_group_that_is_spread_has_fewer_neighbours(spread: int, near: int) -> None:
    far = 7 - near
    expected = max(INSIDE.seconds(10.0 * near, near), BETWEEN.seconds(10.0 * far, far))
    assert NODES_OF_FOUR.all_to_all(80.0, 8, spread=spread) == expected


def test_all_reduce_by_hand() -> None:
    assert NODES_OF_FOUR.all_reduce(40.0, 4) == 2 * 2 * 1.0 + 2 * 3 / 4 * 40.0 / 10.0
    assert Network(1, INSIDE, BETWEEN).all_reduce(40.0, 4) == 2 * 2 * 3.0 + 2 * 3 / 4 * 40.0 / 2.0
    # Inside, and then a quarter of it between two nodes.
    assert NODES_OF_FOUR.all_reduce(40.0, 8) == 4.0 + 6.0 + 2 * 1 * 3.0 + 2 * 1 / 2 * 10.0 / 2.0
    # Two of a node, on four nodes.
    expected = 2 * 1 * 1.0 + 2 / 2 * 40.0 / 10.0 + 2 * 2 * 3.0 + 2 * 3 / 4 * 20.0 / 2.0
    assert NODES_OF_FOUR.all_reduce(40.0, 8, spread=2) == expected


def test_a_node_that_is_not_full_counts_as_one() -> None:
    assert NODES_OF_FOUR.all_reduce(0.0, 9) == pytest.approx(2 * 2 * 1.0 + 2 * math.log2(3) * 3.0)


@pytest.mark.parametrize("spread", [1, 2])
def test_one_worker_costs_nothing(spread: int) -> None:
    assert NODES_OF_FOUR.all_to_all(1e9, 1, spread=spread) == 0
    assert NODES_OF_FOUR.all_reduce(1e9, 1, spread=spread) == 0


def test_many_small_messages_cost_more_than_one_large() -> None:
    assert sum(INSIDE.seconds(1.0, 1) for _ in range(20)) == pytest.approx(20 + 2)
    assert sum(INSIDE.seconds(1.0, 1) for _ in range(20)) > INSIDE.seconds(20.0, 1)
    assert 8 * NODES_OF_FOUR.all_to_all(10.0, 8) > NODES_OF_FOUR.all_to_all(80.0, 8)
    # The bytes that a worker sends stay the same; those they go to are more.
    assert NODES_OF_FOUR.all_to_all(0.0, 64) > NODES_OF_FOUR.all_to_all(0.0, 8)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "congestion"),
    [(-1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 1.0, -0.1), (0.0, math.nan, 0.0)],
)
def test_a_link_that_cannot_be_is_refused(latency: float, bandwidth: float, congestion: float) -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Level(latency=latency, bandwidth=bandwidth, congestion=congestion)


@pytest.mark.parametrize("field", ["latency", "congestion"])
def test_a_link_that_is_not_a_number_is_refused(field: str) -> None:
    """TOML has nan; every time that it touches would be one."""
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Level(**{"latency": 0.0, "bandwidth": 1.0, field: math.nan})

"""Which keys wait to be averaged: of steps since the last average, trained on, and no others."""

from __future__ import annotations

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.averaging import Awaiting, average
from nestpipe.exchange.transport import Transport
from tests.cluster import Cluster


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_keys_of_the_steps_since_the_last_average_wait() -> None:
    awaiting = Awaiting(3)
    due = []
    for step in range(7):
        if awaiting.is_due(step):
            due.append(awaiting.before(step).tolist())
        awaiting.add(step, keys(10 + step))
    assert due == [[10, 11], [13, 14]]
    assert awaiting.before(7).tolist() == [16]


def test_batches_that_were_routed_and_not_trained_on_do_not_wait() -> None:
    awaiting = Awaiting(4)
    for step in range(3):
        awaiting.add(step, keys(step))
    awaiting.begin(1)  # batches 1 and 2 come again, with other keys
    awaiting.add(1, keys(21))
    assert awaiting.before(2).tolist() == [0, 21]


def test_after_a_checkpoint_none_waits() -> None:
    awaiting = Awaiting(4)
    for step in range(2):
        awaiting.add(step, keys(step))
    assert awaiting.before(2).tolist() == [0, 1]
    awaiting.settle(2)
    assert awaiting.before(2).tolist() == []
    awaiting.add(2, keys(2))
    assert awaiting.is_due(3) and awaiting.before(3).tolist() == [2]


def test_a_caller_may_use_its_array_again() -> None:
    awaiting, mine = Awaiting(2), keys(5)
    awaiting.add(0, mine)
    mine[0] = 6
    assert awaiting.before(1).tolist() == [5]


def averaged(rows: int) -> list[list[float]]:
    import torch.distributed as dist

    transport = Transport(dist.group.WORLD)
    peers = [0, 2] if transport.rank != 1 else [1]
    records = np.full((rows, 3), float(transport.rank), np.float32)

    def mean(records_MNW: np.ndarray, out: np.ndarray) -> None:
        out[:] = records_MNW.mean(axis=0)

    if len(peers) > 1:
        average(records, peers, transport, mean, Arena())
    return records.tolist()


def test_peers_average_and_others_do_not_take_part(cluster: Cluster) -> None:
    for rows in (0, 1, 5):
        first, other, last = cluster.run(3, averaged, rows)
        assert first == last == [[1.0] * 3] * rows and other == [[1.0] * 3] * rows

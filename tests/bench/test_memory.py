"""What one part of a process takes is told from what others took before it."""

from __future__ import annotations

import sys

import pytest
import torch

from nestpipe.bench.contestants import POOL, Law, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel
from nestpipe.bench.memory import Growth, resident
from nestpipe.process import keep_large_blocks
from nestpipe.schedule.setting import Setting
from tests.cluster import Cluster

MB = 1e6
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")


def growth() -> list[float]:
    """Of 20 MB that stay and 40 that go, then of 20 that fit in what is free, in a process that keeps what is freed."""
    keep_large_blocks()
    before = torch.ones(25_000_000)
    del before
    results, kept, free = [], [], resident()
    first = Growth()
    results.append(free - resident())
    kept.append(torch.ones(5_000_000))
    passing = torch.ones(10_000_000)
    del passing
    results.append(first.peak())
    second = Growth()
    kept.append(torch.ones(5_000_000))
    results.append(second.peak())
    return results


def test_memory_that_was_free_before_counts_for_who_uses_it(cluster: Cluster) -> None:
    (results,) = cluster.run(1, growth)
    given_back, first, second = (value / MB for value in results)
    assert given_back > 90 and 59 < first < 65 and 19 < second < 25


def contestants() -> list[float]:
    load_everything()
    pool = pool_of(Law(0), 64, 20)
    small, large = Setting("dbp"), Setting("serial")
    made = [
        in_memory(setting, EmulatedModel(dim=dim), pool, dim=dim, warm_up=POOL)
        for setting, dim in ((small, 8), (large, 1024), (small, 8), (large, 1024))
    ]
    return [one.memory for one in made]


def test_a_contestant_takes_the_same_whoever_came_before(cluster: Cluster) -> None:
    for taken in cluster.run(2, contestants):
        small, large, small_again, large_again = (value / MB for value in taken)
        rows = (
            POOL * 64 * 20 * 1025 * 4 / MB
        )  # nearly all keys are new: rows of both workers' batches, half of them here
        assert rows < large < 4 * rows and large_again == pytest.approx(large, rel=0.3)
        assert small < 0.3 * large and small_again < 0.3 * large

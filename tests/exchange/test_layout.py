"""Layouts: both sides of an exchange work out the same places, and no two things lie in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.exchange.layout import Sizes, lay_out, starts


@given(st.lists(st.integers(0, 9), max_size=20))
def test_segments_follow_each_other(counts: list[int]) -> None:
    assert starts(np.array(counts, np.int64)).tolist() == [sum(counts[:place]) for place in range(len(counts))]


@pytest.mark.parametrize("num_tables", [0, 1, 3])
def test_sizes_come_back_as_they_were_put_and_in_one_array_that_can_be_sent(num_tables: int) -> None:
    world, parts, rng = 4, 2, np.random.default_rng(num_tables)
    sizes = Sizes.empty(world, num_tables, parts)
    keys, vectors = rng.integers(0, 99, (num_tables, world)), rng.integers(0, 99, (num_tables, parts, world))
    sizes.state[:] = 7
    for k in range(num_tables):
        sizes.put(k, keys[k], vectors[k], weighted=k == 1, wide=k == 2)
    received = Sizes(sizes.table.copy(), num_tables, parts)
    assert received.table.shape == (world, 1 + num_tables * (3 + parts)) and (received.state == 7).all()
    assert (received.keys == keys).all() and (received.vectors == vectors).all()
    assert received.weighted.tolist() == [[int(k == 1)] * world for k in range(num_tables)]
    assert received.wide.tolist() == [[int(k == 2)] * world for k in range(num_tables)]


@given(seed=st.integers(0, 2**31), parts=st.integers(1, 4), world=st.integers(1, 4))
def test_vectors_lie_by_part_then_worker_then_table_and_fill_the_buffer_of_their_dim(
    seed: int, parts: int, world: int
) -> None:
    groups = {8: [0, 2], 16: [1]}
    plan: Any = SimpleNamespace(groups=groups)
    counts = np.random.default_rng(seed).integers(0, 5, (3, parts, world))
    layout = lay_out(counts, plan)
    for dim, members in groups.items():
        place = 0
        for p in range(parts):
            assert layout.part(dim, p).start == place
            for worker in range(world):
                assert layout.counts[dim][p, worker] == counts[members, p, worker].sum()
                for k in members:
                    assert layout.start[k, p, worker] == place
                    place += counts[k, p, worker]
            assert layout.part(dim, p).stop == place
        assert layout.total(dim) == place

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import reference
from nestpipe.kernels.route import (
    copy_segments,
    count_bags,
    fill_bags,
    mean_weights,
    segment_places,
    spread_over_bags,
)  # fmt: skip
from nestpipe.kernels.rows import NONE, ONES, pool, rows_of
from tests.kernels.cases import few, floats, int64, same_bits, seeds


def starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


@given(seeds, st.integers(0, 5))
@few
def test_copy_segments_equals_the_reference(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, world)
    source, target = rng.integers(0, 99, 40), rng.integers(0, 99, 40)
    order = rng.permutation(world)
    target_start = np.empty(world, np.int64)
    target_start[order] = starts(counts[order]) + 3  # segments land in another order, without overlapping
    source_start = rng.integers(0, 30, world)
    expected = reference.copy_segments(*map(torch.from_numpy, (source, source_start, target, target_start, counts)))
    copy_segments(source, source_start, target, target_start, counts)
    assert target.tolist() == expected.tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=6))
@few
def test_segment_places_equals_the_reference(segments: list[tuple[int, int]]) -> None:
    counts, start = int64([n for n, _ in segments]), int64([a for _, a in segments])
    out = np.full(counts.sum(), -9, np.int32)
    segment_places(counts, start, out)
    assert out.tolist() == reference.segment_places(torch.from_numpy(counts), torch.from_numpy(start)).tolist()


@given(seeds, st.booleans())
@few
def test_mean_weights_equal_the_reference_bit_for_bit(seed: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, 6))]).astype(np.int64)
    weights = floats(rng, offsets[-1]) if weighted else ONES
    out = np.full(offsets[-1] + 1, 77, np.float32)
    mean_weights(offsets, weights, out)
    expected = reference.mean_weights(torch.from_numpy(offsets), torch.from_numpy(weights) if weighted else None)
    assert same_bits(out[:-1], expected)
    assert out[-1] == 77


@pytest.mark.parametrize(
    ("weights", "mean"), [([], [0.5, 0.5, 1.0]), ([1, 3, 8], [0.25, 0.75, 1]), ([2, -2, 5], [0, 0, 1])]
)
def test_mean_weights_sum_to_one_in_each_bag_or_are_zero(weights: list[float], mean: list[float]) -> None:
    out = np.empty(3, np.float32)
    mean_weights(int64([0, 2, 2, 3]), np.array(weights, np.float32), out)
    assert out.tolist() == mean


class Cut:
    """Random bags of keys, cut by the kernels."""

    def __init__(self, seed: int, world: int, *, weighted: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, rng.integers(0, 9)))]).astype(np.int64)
        self.keys = rng.integers(-10, 10, self.offsets[-1])
        n = len(self.keys)
        self.weights = rng.integers(-3, 4, n).astype(np.float32) if weighted else ONES
        self.owner = np.full(n, -9, np.int32)
        self.num_bags, self.num_keys = np.full(world, 99, np.int64), np.full(world, 99, np.int64)
        count_bags(
            self.keys,
            np.arange(world),
            self.offsets,
            np.empty(world, np.int64),
            self.owner,
            self.num_bags,
            self.num_keys,
        )
        # As if another table's vectors lay between those of the workers.
        self.vector_start = starts(self.num_bags + 2)
        total = int(self.num_bags.sum())
        self.lengths, self.vectors = np.full(total, -9, np.int32), np.full(total, -9, np.int32)
        self.sent_keys, self.sent_weights = np.full(n, -9), np.full(len(self.weights), np.nan, np.float32)
        self.vector_offsets = np.full(len(self.offsets), -9, np.int64)
        self.vector_offsets[0] = 0
        fill_bags(
            self.keys, self.owner, self.offsets, self.weights, starts(self.num_bags), starts(self.num_keys),
            self.vector_start.copy(), np.empty(world, np.int64),
            self.lengths, self.sent_keys, self.sent_weights, self.vectors, self.vector_offsets,
        )  # fmt: skip


@given(seeds, st.integers(1, 5), st.booleans())
@few
def test_count_and_fill_bags_equal_the_reference(seed: int, world: int, weighted: bool) -> None:
    cut = Cut(seed, world, weighted=weighted)
    assert cut.owner.tolist() == reference.owner(torch.from_numpy(cut.keys), torch.arange(world)).tolist()
    weights = cut.weights if weighted else np.ones(len(cut.keys), np.float32)
    arrays = (cut.keys, cut.owner, cut.offsets, weights, cut.vector_start)
    expected = reference.cut_bags(*map(torch.from_numpy, arrays))
    for name in ("num_bags", "num_keys", "lengths", "vectors", "vector_offsets"):
        assert getattr(cut, name).tolist() == getattr(expected, name).tolist(), name
    assert cut.sent_keys.tolist() == expected.keys.tolist()
    if weighted:
        assert same_bits(cut.sent_weights, expected.weights)


@given(seeds, st.integers(1, 5))
@few
def test_pooling_the_parts_and_then_the_vectors_is_pooling_the_bags(seed: int, world: int) -> None:
    cut = Cut(seed, world)
    rng = np.random.default_rng(seed)
    values = rng.integers(-9, 9, (20, 3)).astype(np.float32)  # of keys -10 to 9; sums are exact in any order
    sent = np.full((int((cut.num_bags + 2).sum()), 3), np.nan, np.float32)
    part_start, key_start = starts(cut.num_bags), starts(cut.num_keys)
    for w in range(world):
        parts = cut.lengths[part_start[w] :][: cut.num_bags[w]]
        mine = slice(key_start[w], key_start[w] + cut.num_keys[w])
        offsets = np.concatenate([[0], np.cumsum(parts)]).astype(np.int64)
        targets = np.arange(cut.vector_start[w], cut.vector_start[w] + cut.num_bags[w])
        pool(rows_of(values), cut.sent_keys[mine] + 10, offsets, cut.sent_weights[mine], targets, sent)
    pooled = np.full((len(cut.offsets) - 1, 3), np.nan, np.float32)
    pool(rows_of(sent), cut.vectors, cut.vector_offsets, ONES, NONE, pooled)
    for b, (first, last) in enumerate(zip(cut.offsets[:-1], cut.offsets[1:], strict=True)):
        expected = sum((cut.weights[i] * values[cut.keys[i] + 10] for i in range(first, last)), np.zeros(3))
        assert pooled[b].tolist() == expected.tolist()


def test_every_entry_of_a_bag_gets_its_target() -> None:
    out = np.full(5, -1, np.int32)
    spread_over_bags(int64([0, 2, 2, 5]), int64([7, 8, 9]), out)
    assert out.tolist() == [7, 7, 9, 9, 9]

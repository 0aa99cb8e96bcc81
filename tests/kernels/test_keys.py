from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import reference
from nestpipe.kernels.keys import NUM_SHARDS, Deduplicator, bucket, compose, mix, owner_of, shards
from tests.kernels.cases import EXTREMES, any_key, few, int64, key_with_hash, signed


def deduplicated(keys: np.ndarray, dedup: Deduplicator | None = None) -> tuple[np.ndarray, np.ndarray]:
    unique, inverse = np.full(len(keys), -77, np.int64), np.full(len(keys), -77, np.int32)
    n = (dedup or Deduplicator())(keys, unique, inverse)
    return unique[:n], inverse


def assert_deduplicates(keys: np.ndarray, dedup: Deduplicator | None = None) -> None:
    unique, inverse = deduplicated(keys, dedup)
    expected_unique, expected_inverse = reference.deduplicate(torch.from_numpy(keys))
    np.testing.assert_array_equal(unique, expected_unique.numpy())
    np.testing.assert_array_equal(inverse, expected_inverse.numpy())


def keys_with_one_home(n: int, top: int, bits: int) -> np.ndarray:
    """Keys that the scratch table of 2^bits slots, and every smaller one, puts into one slot."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    spread = [((top << (64 - bits)) | i) * inverse % 2**64 for i in range(n)]
    return int64([signed(h ^ (h >> 32)) for h in spread])


@given(st.lists(any_key, max_size=50))
@few
def test_mix_and_shards_equal_the_reference(keys: list[int]) -> None:
    assert [signed(mix(key)) for key in keys] == reference.mix(torch.tensor(keys, dtype=torch.int64)).tolist()
    assert shards(int64(keys)).tolist() == reference.shards(torch.tensor(keys, dtype=torch.int64)).tolist()


def test_mix_is_the_published_finalizer() -> None:
    assert mix(0) == 0
    assert mix(1) == 0xB456BCFC34C2CB2C


@given(st.lists(any_key, max_size=200))
@few
def test_deduplicate_equals_the_reference(keys: list[int]) -> None:
    assert_deduplicates(int64(keys))


def test_deduplicate_of_no_keys_gives_none() -> None:
    unique, inverse = deduplicated(int64([]))
    assert len(unique) == len(inverse) == 0


def test_deduplicate_keeps_order_of_first_appearance() -> None:
    unique, inverse = deduplicated(int64([7, -1, 7, 0, -1, 7]))
    assert unique.tolist() == [7, -1, 0]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize("key", EXTREMES)
def test_deduplicate_of_one_key_repeated(key: int) -> None:
    unique, inverse = deduplicated(np.full(5000, key, np.int64))
    assert unique.tolist() == [key]
    assert not inverse.any()


@pytest.mark.parametrize("n", [2048, 2049, 4097, 40_000])
def test_deduplicate_grows_its_table_when_all_keys_are_distinct(n: int) -> None:
    keys = np.random.default_rng(n).permutation(n) * 1_000_003 - 17
    unique, inverse = deduplicated(keys)
    np.testing.assert_array_equal(unique, keys)
    np.testing.assert_array_equal(inverse, np.arange(n))


def test_deduplicate_finds_keys_again_after_the_table_grew() -> None:
    keys = np.random.default_rng(0).permutation(9000)
    assert_deduplicates(np.concatenate([keys, keys[::-1], keys]))


@pytest.mark.parametrize("top", [0, 2**13 - 1])
def test_deduplicate_survives_keys_that_share_a_slot_and_runs_that_wrap_around(top: int) -> None:
    keys = keys_with_one_home(3000, top, bits=13)  # more than the first table holds: they move together once
    assert_deduplicates(np.concatenate([keys, keys[::-1]]))


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 5000), st.integers(0, 99)), min_size=2, max_size=8))
@few
def test_one_deduplicator_serves_batches_of_any_size(batches: list[tuple[int, int, int]]) -> None:
    dedup = Deduplicator()
    for length, distinct, seed in batches:
        assert_deduplicates(np.random.default_rng(seed).integers(0, distinct, length) - distinct // 2, dedup)


def test_a_deduplicator_forgets_every_earlier_batch() -> None:
    dedup, rng = Deduplicator(), np.random.default_rng(0)
    for _ in range(300):
        assert_deduplicates(rng.integers(-40, 40, 100), dedup)


@given(st.sets(any_key, max_size=100), st.integers(1, 9))
@few
def test_bucket_equals_the_reference(keys: set[int], world: int) -> None:
    unique = int64(list(keys))
    owner, place, bucketed = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32), np.empty(len(keys), np.int64)
    counts, start = np.full(world, 99, np.int64), np.full(world, 99, np.int64)
    owners = np.roll(np.arange(world), 1)[: max(1, world - 1)]
    bucket(unique, owners, owner, counts, start, bucketed, place)
    expected_bucketed, expected_place, expected_counts = reference.bucket(
        torch.from_numpy(unique), torch.from_numpy(owners), world
    )
    np.testing.assert_array_equal(bucketed, expected_bucketed.numpy())
    np.testing.assert_array_equal(place, expected_place.numpy())
    np.testing.assert_array_equal(counts, expected_counts.numpy())
    np.testing.assert_array_equal(owner, reference.owner(torch.from_numpy(unique), torch.from_numpy(owners)).numpy())


@pytest.mark.parametrize("world", [1, 3, 8, 1000])
def test_every_worker_owns_one_range_of_shards_and_all_ranges_are_equal_to_within_one(world: int) -> None:
    keys = int64([key_with_hash((shard << 48) | 12345) for shard in range(NUM_SHARDS)])
    np.testing.assert_array_equal(shards(keys), np.arange(NUM_SHARDS))
    owner = np.array([owner_of(key, np.arange(world)) for key in keys])
    assert (np.diff(owner) >= 0).all()
    sizes = np.bincount(owner, minlength=world)
    assert len(sizes) == world
    assert sizes.max() - sizes.min() <= 1


@given(st.lists(st.integers(0, 4), max_size=30))
@few
def test_compose_looks_one_list_up_in_another(first: list[int]) -> None:
    second, out = int64([9, -8, 7, -6, 5]), np.empty(len(first), np.int64)
    compose(int64(first), second, out)
    assert out.tolist() == [int(second[i]) for i in first]


def test_compose_may_write_over_its_first_list() -> None:
    first = int64([2, 0, 1])
    compose(first, int64([1, 2, 0]), first)
    assert first.tolist() == [0, 1, 2]

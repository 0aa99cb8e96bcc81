from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.batch import Batch, Jagged
from nestpipe.exchange.clustering import cluster, even_bounds, tapered_bounds
from nestpipe.exchange.plan import ExchangePlan, Holders
from nestpipe.kernels import clusters
from nestpipe.kernels.keys import Deduplicator, shards
from nestpipe.schedule.setting import CLUSTERINGS
from nestpipe.tables import Feature, Table

EVEN = ("shared", "window")
CLUSTERED = (*EVEN, "taper")
ITEMS = ExchangePlan([Table("item", dim=16)], [Feature("history", table="item")])
TWO_TABLES = ExchangePlan(
    [Table("item", dim=16), Table("user", dim=4)],
    [Feature("history", table="item"), Feature("liked", table="item"), Feature("user", table="user")],
)
few = settings(max_examples=60, deadline=None)
STRANGER = {"rank": -1, "world": 2}  # a worker that owns no row: all are to travel


def jagged(lists: list[np.ndarray]) -> Jagged:
    lengths = torch.tensor([len(keys) for keys in lists], dtype=torch.int64)
    return Jagged.from_lengths(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *lists])), lengths)


def micro_batches(batch: Batch, count: int, how: str, plan: ExchangePlan = ITEMS) -> list[list[int]]:
    """The samples of each micro-batch; whatever the data, each sample is in one, in its old order, and sizes are even."""
    order, bounds = cluster(batch, plan, count, how, Deduplicator(), **STRANGER)
    assert bounds == (tapered_bounds if how == "taper" else even_bounds)(batch.size, count)
    samples = list(range(batch.size)) if order is None else order.tolist()
    assert sorted(samples) == list(range(batch.size))
    parts = [samples[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert all(part == sorted(part) for part in parts)
    return parts


def histories(lists: list[np.ndarray]) -> Batch:
    return Batch({"history": jagged(lists)})


def distinct(lists: list[np.ndarray], parts: list[list[int]]) -> list[int]:
    return [len({key for s in part for key in lists[s].tolist()}) for part in parts]


def worst_tokens(lists: list[np.ndarray], parts: list[list[int]]) -> float:
    """How far the tokens of a micro-batch are from even, at worst."""
    tokens = np.array([sum(len(lists[s]) for s in part) for part in parts])
    return float(abs(tokens / tokens.mean() - 1).max())


@functools.cache
def cumulative_zipf(exponent: float) -> np.ndarray:
    return np.cumsum(np.arange(1.0, 100_001) ** -exponent)


def zipf(rng: np.random.Generator, size: int, exponent: float = 1.2) -> np.ndarray:
    cumulative = cumulative_zipf(exponent)
    return np.searchsorted(cumulative, rng.random(size) * cumulative[-1])


def sessions(rng: np.random.Generator, size: int, length: int = 50) -> list[np.ndarray]:
    """Samples in random order; 1 to 8 of them are consecutive windows of one user's history: own items, and popular ones."""
    samples: list[np.ndarray] = []
    while len(samples) < size:
        windows = int(rng.integers(1, 9))
        n = length + windows
        own = rng.integers(10**6, 10**7, 60)[rng.integers(0, 60, n)]
        history = np.where(rng.random(n) < 0.6, own, zipf(rng, n, 1.05))
        samples += [history[w : w + length] for w in range(windows)]
    return [samples[s] for s in rng.permutation(size)]


def groups(
    rng: np.random.Generator, num_groups: int, size: int, length: int = 20
) -> tuple[list[np.ndarray], list[int]]:
    """Samples in random order whose keys are drawn from the 40 keys of their group, and the group of each."""
    group = rng.permutation(np.repeat(np.arange(num_groups), size))
    return [1000 * g + rng.integers(0, 40, length) for g in group], group.tolist()


@pytest.mark.parametrize("how", CLUSTERINGS)
@given(
    lists=st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=40),
    users=st.lists(st.integers(-3, 3), min_size=40, max_size=40),
    count=st.integers(1, 50),
)
@few
def test_every_sample_is_in_one_micro_batch(how: str, lists: list[list[int]], users: list[int], count: int) -> None:
    batch = Batch({
        "history": Jagged.from_lists(lists),
        "liked": Jagged.from_lists([keys[::2] for keys in lists]),
        "user": Jagged.from_lists([[user] for user in users[: len(lists)]]),
    })  # fmt: skip
    micro_batches(batch, count, how, TWO_TABLES)  # asserts it


@pytest.mark.parametrize("how", CLUSTERED)
@pytest.mark.parametrize("count", [2, 3, 8, 65, 130])
def test_any_number_of_micro_batches_will_do(how: str, count: int) -> None:
    lists = sessions(np.random.default_rng(0), 400, 20)
    parts = micro_batches(histories(lists), count, how)
    as_they_come = micro_batches(histories(lists), count, "none")
    assert sum(distinct(lists, parts)) < sum(distinct(lists, as_they_come))


@pytest.mark.parametrize("how", CLUSTERINGS)
@pytest.mark.parametrize(
    ("lists", "count"),
    [([], 1), ([], 4), ([[1], [2]], 3), ([[1, 2], [3]], 1), ([[], [], []], 2)],
    ids=["no samples", "no samples for 4", "fewer samples than micro-batches", "one micro-batch", "no keys"],
)
def test_where_nothing_can_be_chosen_samples_stay_as_they_are(how: str, lists: list[list[int]], count: int) -> None:
    order, bounds = cluster(Batch({"history": Jagged.from_lists(lists)}), ITEMS, count, how, Deduplicator(), **STRANGER)
    assert order is None
    assert bounds == (tapered_bounds if how == "taper" else even_bounds)(len(lists), count)


def test_none_leaves_samples_as_they_come() -> None:
    lists = sessions(np.random.default_rng(1), 50)
    assert cluster(histories(lists), ITEMS, 4, "none", Deduplicator(), **STRANGER) == (None, [0, 12, 25, 37, 50])


def test_an_unknown_clustering_is_refused() -> None:
    with pytest.raises(ValueError, match="none, shared, window, taper, got 'keys'"):
        cluster(histories([]), ITEMS, 4, "keys", Deduplicator(), **STRANGER)


@pytest.mark.parametrize("how", EVEN)
@pytest.mark.parametrize(("size", "count"), [(256, 8), (1024, 32), (2048, 8)])
def test_tokens_are_even_although_lengths_differ(how: str, size: int, count: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lists = [zipf(rng, int(n)) for n in rng.geometric(1 / 20, size)]
        assert worst_tokens(lists, micro_batches(histories(lists), count, how)) <= 0.05


@pytest.mark.parametrize("how", EVEN)
def test_one_sample_longer_than_a_micro_batch_does_not_upset_the_others(how: str) -> None:
    rng = np.random.default_rng(0)
    lists = [zipf(rng, int(n)) for n in rng.geometric(1 / 20, 256)]
    lists[17] = zipf(rng, 5000)
    parts = micro_batches(histories(lists), 8, how)
    others = [part for part in parts if 17 not in part]
    assert worst_tokens(lists, others) <= 0.1


@pytest.mark.parametrize("how", CLUSTERED)
def test_the_same_keys_give_the_same_order(how: str) -> None:
    batch = histories(sessions(np.random.default_rng(2), 300))
    used = Deduplicator()
    cluster(histories([np.arange(9999)]), ITEMS, 1, how, used, **STRANGER)
    orders = [cluster(batch, ITEMS, 8, how, dedup, **STRANGER)[0] for dedup in (used, used, Deduplicator())]
    assert orders[0] is not None
    assert all(order is not None and np.array_equal(order, orders[0]) for order in orders)


def test_what_was_decided_at_run_time_does_not_matter() -> None:
    lists = sessions(np.random.default_rng(3), 100)
    plan = ExchangePlan([Table("item", dim=16)], [Feature("history", table="item", pooling="sum")])
    before = micro_batches(histories(lists), 4, "window", plan)
    plan.decide(0, row_bytes=2, bag_bytes=1, whole_bytes=1)
    assert micro_batches(histories(lists), 4, "window", plan) == before


def test_equal_keys_of_two_tables_are_not_one_row() -> None:
    # Sample s has item s % 4; its user is called like the item of another sample, which must not bring the two together.
    items = [np.full(3, s % 4) for s in range(64)]
    users = [np.array([s // 4 % 4]) for s in range(64)]
    wide = ExchangePlan(
        [Table("item", dim=64), Table("user", dim=1)], [Feature("i", table="item"), Feature("u", table="user")]
    )
    batch = Batch({"i": jagged(items), "u": jagged(users)})
    assert distinct(items, micro_batches(batch, 4, "shared", wide)) == [1] * 4
    # The same with the wide table last: it is the width of a row that counts.
    wide_last = ExchangePlan([wide.tables[1], wide.tables[0]], wide.features)
    assert distinct(items, micro_batches(batch, 4, "shared", wide_last)) == [1] * 4


def test_features_of_one_table_share_rows() -> None:
    # Odd samples have their keys in another feature: mates are found all the same.
    rng = np.random.default_rng(4)
    lists, group = groups(rng, 8, 16)
    none = np.empty(0, np.int64)
    plan = ExchangePlan([Table("item", dim=8)], [Feature("a", table="item"), Feature("b", table="item")])
    a = [none if s % 2 else keys for s, keys in enumerate(lists)]
    b = [keys if s % 2 else none for s, keys in enumerate(lists)]
    parts = micro_batches(Batch({"a": jagged(a), "b": jagged(b)}), 8, "shared", plan)
    assert all(len({group[s] for s in part}) == 1 for part in parts)


@pytest.mark.parametrize(("num_groups", "size"), [(8, 32), (8, 128), (40, 16)])
def test_shared_finds_groups_of_the_size_of_a_micro_batch(num_groups: int, size: int) -> None:
    lists, group = groups(np.random.default_rng(5), num_groups, size)
    parts = micro_batches(histories(lists), num_groups, "shared")
    at_home = sum(Counter(group[s] for s in part).most_common(1)[0][1] for part in parts)
    assert at_home >= 0.97 * len(lists)


@pytest.mark.parametrize("count", [8, 32])
def test_shared_keeps_the_windows_of_a_session_together(count: int) -> None:
    lists = sessions(np.random.default_rng(6), 1024)
    as_they_come = sum(distinct(lists, micro_batches(histories(lists), count, "none")))
    assert sum(distinct(lists, micro_batches(histories(lists), count, "shared"))) < 0.45 * as_they_come


@pytest.mark.parametrize(("count", "at_most"), [(3, 0.9), (8, 0.8), (32, 0.8)])
def test_window_has_fewer_rows_at_both_ends_on_zipf_keys(count: int, at_most: float) -> None:
    rng = np.random.default_rng(7)
    lists = list(zipf(rng, 1024 * 50).reshape(1024, 50))
    before = distinct(lists, micro_batches(histories(lists), count, "none"))
    after = distinct(lists, micro_batches(histories(lists), count, "window"))
    assert after[0] + after[-1] < at_most * (before[0] + before[-1])
    assert max(after[0], after[-1]) < min(after[1:-1])


def test_tapered_bounds_are_small_at_both_ends_and_none_is_empty() -> None:
    assert np.diff(tapered_bounds(2208, 8)).tolist() == [101, 201, 401, 401, 401, 401, 201, 101]
    assert np.diff(tapered_bounds(403, 3)).tolist() == [101, 201, 101]
    assert tapered_bounds(5, 8) == even_bounds(5, 8)
    for size, count in itertools.product(range(1, 60), range(1, 20)):
        sizes = np.diff(tapered_bounds(size, count))
        assert sizes.sum() == size and (size < count or sizes.min() >= 1)


@pytest.mark.parametrize("size", [512, 1024])
def test_taper_has_fewer_rows_at_both_ends_than_even_micro_batches_can_have(size: int) -> None:
    rng = np.random.default_rng(7)
    lists = [zipf(rng, int(n), 1.05) for n in rng.geometric(1 / 20, size)]
    total = len(set(np.concatenate(lists).tolist()))
    parts = micro_batches(histories(lists), 8, "taper")
    rows, tokens = distinct(lists, parts), np.array([sum(len(lists[s]) for s in part) for part in parts])
    assert rows[0] + rows[-1] < 0.13 * total
    even = tokens.sum() / 8
    assert abs(tokens - tokens.sum() * np.array([len(part) for part in parts]) / size).max() <= 0.05 * even + 1


def test_window_prefers_rows_of_its_own_worker_at_both_ends() -> None:
    rng = np.random.default_rng(7)
    lists = list(zipf(rng, 512 * 50, 1.05).reshape(512, 50))
    owner = (shards(np.concatenate(lists)) * 2 >> 16).reshape(512, 50)

    on_two = ExchangePlan(ITEMS.tables, ITEMS.features, [Holders(np.arange(2))])

    def to_travel(rank: int) -> int:
        order, bounds = cluster(histories(lists), on_two, 8, "window", Deduplicator(), rank=rank, world=2)
        assert order is not None
        ends = (order[: bounds[1]], order[bounds[-2] :])
        return sum(len({key for s in end for key in lists[s][owner[s] != 0].tolist()}) for end in ends)

    assert to_travel(0) < 0.9 * to_travel(-1)


@pytest.mark.parametrize("how", CLUSTERED)
def test_with_one_worker_samples_stay_as_they_are(how: str) -> None:
    lists = sessions(np.random.default_rng(1), 50)
    assert cluster(histories(lists), ITEMS, 4, how, Deduplicator(), rank=0, world=1)[0] is None


def test_window_has_few_rows_at_both_ends_of_sessions_and_is_even_between() -> None:
    lists = sessions(np.random.default_rng(8), 1024)
    total = len(set(np.concatenate(lists).tolist()))
    parts = micro_batches(histories(lists), 8, "window")
    rows = distinct(lists, parts)
    assert rows[0] + rows[-1] < 0.2 * total
    for direction in (1, -1):  # forwards: new rows; backwards: completed ones
        seen: set[int] = set()
        fresh = []
        for part in parts[::direction]:
            keys = {key for s in part for key in lists[s].tolist()}
            fresh.append(len(keys - seen))
            seen |= keys
        assert max(fresh[1:-1]) < 1.35 * total / 8


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=12))
@few
def test_rows_and_their_users_equal_plain_python(lists: list[list[int]]) -> None:
    starts = np.cumsum([0] + [len(keys) for keys in lists])[None, :]
    ids = np.array([key for keys in lists for key in keys], np.int32)
    start, rows, frequency = clusters.distinct_rows(starts, ids, 10)
    assert [rows[a:b].tolist() for a, b in zip(start[:-1], start[1:], strict=True)] == [
        list(dict.fromkeys(keys)) for keys in lists
    ]
    assert frequency.tolist() == [sum(key in keys for keys in lists) for key in range(10)]
    user_start, user = clusters.users(start, rows, frequency, frequency > 1)
    for key in range(10):
        expected = [s for s, keys in enumerate(lists) if key in keys] if frequency[key] > 1 else []
        assert user[user_start[key] : user_start[key + 1]].tolist() == expected


@given(st.integers(0, 10**6))
@few
def test_levelling_swaps_and_never_makes_the_worst_worse(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    home = rng.permutation(np.arange(int(rng.integers(count, 60))) % count).astype(np.int32)
    sizes, tokens = np.bincount(home, minlength=count), rng.geometric(0.1, len(home)) - 1

    def worst() -> float:
        return float(abs(np.bincount(home, tokens, count) - sizes * tokens.mean()).max())

    before = worst()
    clusters.level(tokens, np.argsort(tokens, kind="stable"), home, sizes, 0.05)
    assert worst() <= before + 1e-6
    assert np.bincount(home, minlength=count).tolist() == sizes.tolist()
    if len(home) >= 16 * count:
        assert worst() <= 0.05 * tokens.sum() / count + 1

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.kernels import reference
from nestpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.store import chunks
from nestpipe.store.memory import MemoryStore
from nestpipe.tables import Eviction, Normal, Table, Uniform
from tests.kernels.cases import EXTREMES, int64, key_with_hash, one_each, same_bits
from tests.store.model import ModelStore, OverBudget, Row, first_values, restore

few = settings(max_examples=60, deadline=None)

ADAGRAD = Adagrad(lr=0.5, initial=0.125)
# Twenty-four keys of three shards, so that rare keys do share rows.
POOL = [key_with_hash((shard << 48) | (i * 7919)) for shard in (3, 40_000, 65_535) for i in range(8)]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """A few records to a chunk, so that every test crosses chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 128)
        yield


def make_table(**settings) -> Table:
    return Table(**{"name": "item", "dim": 3, "optimizer": ADAGRAD} | settings)


def values_of(store: MemoryStore, keys: list[int]) -> torch.Tensor:
    """What evaluation would read."""
    out = np.full((len(keys), store.table.dim), np.nan, np.float32)
    store.read(int64(keys), store.find(int64(keys)), out)
    return torch.from_numpy(out)


def state_of(store: MemoryStore, keys: list[int]) -> torch.Tensor:
    words = store.records(store.find(int64(keys)))
    after_values = store.record_words - store.table.optimizer.state_floats(store.table.dim)
    return torch.from_numpy(words[:, after_values : store.record_words].copy())


def train(store: MemoryStore, keys: list[int], step: int, grad: float = 1.0) -> None:
    """One step that uses the keys; every row used gets the same gradient."""
    positions = np.unique(store.resolve(int64(keys), step))
    store.update(positions, one_each(np.full((len(positions), store.table.dim), grad, np.float32)), 1.0)


def own_keys(store: MemoryStore) -> list[int]:
    return store.items()[0].tolist()


def copy_of(store: MemoryStore) -> MemoryStore:
    """A new store, restored from everything that a checkpoint holds."""
    other = MemoryStore(store.table, seed=7)
    restore(store, into=other)
    return other


# -- births ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("init", [Uniform(-0.3, 0.1), Normal(0.5)])
@pytest.mark.parametrize("dim", [1, 4, 5])
def test_a_row_is_born_with_values_of_its_seed_table_and_key(dtype: torch.dtype, init, dim: int) -> None:
    table = make_table(dtype=dtype, init=init, dim=dim)
    store = MemoryStore(table, seed=7)
    store.resolve(int64(EXTREMES), 0)
    # Normal values may differ in the last bit from torch's, or by one rounding to bfloat16.
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 3e-7
    expected = first_values(table, 7, EXTREMES).float()
    torch.testing.assert_close(values_of(store, EXTREMES), expected, rtol=tolerance, atol=1e-7)


def test_first_values_are_the_same_in_another_order_batch_and_number_of_workers() -> None:
    keys = [*EXTREMES, *range(100, 160)]
    alone, other = MemoryStore(make_table(), seed=7), MemoryStore(make_table(), seed=7, owners=np.arange(5))
    alone.resolve(int64(keys), 0)
    for step, part in enumerate(np.array_split(int64(keys[::-1]), 9)):
        other.resolve(part, step)
    assert same_bits(values_of(alone, keys), values_of(other, keys))
    assert alone.digest() == other.digest()


def test_first_values_differ_by_seed_and_by_table_name() -> None:
    stores = [MemoryStore(make_table(name=name), seed=seed) for name in ("item", "user") for seed in (0, 1, -1)]
    rows = torch.cat([values_of(store, [1, 2, 3]) for store in stores])
    assert len(torch.unique(rows, dim=0)) == 18


def test_resolve_gives_distinct_keys_distinct_positions_and_a_key_the_same_one_again() -> None:
    store = MemoryStore(make_table(), seed=7)
    positions = store.resolve(int64(EXTREMES), 0)
    assert len(set(positions.tolist())) == len(EXTREMES)
    assert store.resolve(int64(EXTREMES[::-1]), 1).tolist() == positions[::-1].tolist()
    assert store.find(int64(EXTREMES)).tolist() == positions.tolist()


def test_growth_over_many_chunks_moves_no_record() -> None:
    store = MemoryStore(make_table(), seed=7)
    train(store, list(range(10)), 0)
    bases, positions = store.rows.bases.copy(), store.find(np.arange(10))
    before = values_of(store, list(range(10)))
    for step in range(1, 30):
        store.resolve(np.arange(step * 50, step * 50 + 50), step)
    assert len(store.rows.bases) > 100
    assert store.rows.bases[: len(bases)].tolist() == bases.tolist()
    assert store.find(np.arange(10)).tolist() == positions.tolist()
    assert same_bits(values_of(store, list(range(10))), before)
    assert same_bits(
        values_of(store, list(range(50, 1500)))[::97], first_values(store.table, 7, list(range(50, 1500)))[::97]
    )


def test_reading_an_unborn_key_gives_its_first_values_and_makes_no_row() -> None:
    store = MemoryStore(make_table(), seed=7)
    store.resolve(int64([1]), 0)
    assert store.find(int64([5, 1, 6])).tolist() == [-1, store.find(int64([1]))[0], -1]
    unborn = values_of(store, [5, 1, 6])
    assert own_keys(store) == [1]
    assert store.stats().born == 1
    store.resolve(int64([6, 5]), 1)
    assert same_bits(values_of(store, [5, 1, 6]), unborn)


def test_reading_an_unborn_key_of_a_half_table_gives_rounded_values() -> None:
    store = MemoryStore(make_table(dtype=torch.bfloat16), seed=7)
    unborn = values_of(store, [5, 6])
    assert same_bits(unborn, unborn.bfloat16())
    store.resolve(int64([5, 6]), 0)
    assert same_bits(values_of(store, [5, 6]), unborn)


def test_an_empty_batch_changes_nothing() -> None:
    for table in (make_table(), make_table(admit_after=2, eviction=Eviction(max_rows=4, ttl=2))):
        store = MemoryStore(table, seed=7)
        store.resolve(int64([1, 2]), 0)
        before = store.digest()
        assert store.resolve(int64([]), 1).tolist() == []
        store.update(int64([]), one_each(np.empty((0, 3), np.float32)), 1.0)
        assert values_of(store, []).shape == (0, 3)
        assert store.digest() == before


# -- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eviction", [None, Eviction(ttl=100)])
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.3, weight_decay=0.1, clip=0.5),
        Adagrad(lr=0.3, weight_decay=0.1, clip=0.5, eps=1e-3, initial=0.25),
        RowwiseAdagrad(lr=0.3, weight_decay=0.1, clip=0.5, eps=1e-3, initial=0.25),
        Adam(lr=0.3, weight_decay=0.1, clip=0.5, beta1=0.7, beta2=0.9, eps=1e-3),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_three_updates_equal_the_reference_with_state_beside_each_row(optimizer, eviction, dtype) -> None:
    table = make_table(dim=5, dtype=dtype, optimizer=optimizer, eviction=eviction, init=Uniform(-1.0, 1.0))
    store = MemoryStore(table, seed=7)
    keys = list(range(9))
    rows = first_values(table, 7, keys)
    state = torch.full((9, optimizer.state_floats(5)), getattr(optimizer, "initial", 0.0))
    names = {SGD: "sgd", Adagrad: "adagrad", RowwiseAdagrad: "rowwise_adagrad", Adam: "adam"}
    rule = getattr(reference, names[type(optimizer)])
    with_all = {name: value for name, value in dataclasses.asdict(optimizer).items() if name != "initial"}
    store.resolve(int64(keys), 0)
    for update, touched in enumerate([[0, 3, 8], [8, 1], [3, 4, 5, 6, 7]], start=1):
        grads = torch.randn(len(touched), 5, generator=torch.Generator().manual_seed(update))
        if isinstance(optimizer, Adam):
            with_all["updates"] = update
        rows[touched], state[touched] = rule(rows[touched], state[touched], grads, scale=0.25, **with_all)
        store.update(store.resolve(int64(touched), update), one_each(grads.numpy().copy()), 0.25)
    assert store.updates == 3
    assert same_bits(values_of(store, keys), rows)
    assert same_bits(state_of(store, keys), state)


SCALED = ScaledRowwiseAdagrad(lr=0.3, weight_decay=0.1, clip=0.5, eps=1e-3, initial=0.25, scale="row")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "c"), [(2.0, 2.0), ("replicas", 3.0), ("row", None)])
def test_replicas_of_a_store_are_updated_and_averaged_as_the_reference_does(scale, c, dtype: torch.dtype) -> None:
    optimizer = dataclasses.replace(SCALED, scale=scale)
    table = make_table(dim=5, dtype=dtype, optimizer=optimizer, init=Uniform(-1.0, 1.0))
    stores, keys = [MemoryStore(table, seed=7) for _ in range(3)], list(range(4))
    rows = first_values(table, 7, keys).repeat(3, 1, 1)
    state = torch.full((3, 4, optimizer.state_floats(5)), 0.0 if scale == "row" else 0.25)
    common = {"lr": 0.3, "weight_decay": 0.1, "clip": 0.5, "scale": 0.25}
    sharers = torch.tensor([3, 1, 2, 3])
    for window in range(2):
        for replica, store in enumerate(stores):
            store.replicas = 3
            positions = store.resolve(int64(keys), window)
            grads = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * window + replica))
            if scale == "row":
                own = {"eps": 0.251, "num_replicas": 3, "sharers": sharers, "updates": store.updates + 1}
                rule = reference.row_scaled_adagrad
            else:
                own, rule = {"eps": 1e-3, "c": c}, reference.scaled_rowwise_adagrad
            rows[replica], state[replica] = rule(rows[replica], state[replica], grads, **common, **own)
            store.update(positions, one_each(grads.numpy().copy()), 0.25, sharers=sharers.numpy())
            assert same_bits(values_of(store, keys), rows[replica]) and same_bits(state_of(store, keys), state[replica])
        out = np.empty((4, stores[0].record_words), np.float32)
        stores[0].average(np.stack([store.words(store.find(int64(keys))) for store in stores]), out)
        averaged = reference.average_row_scaled if scale == "row" else reference.average
        values, after = averaged(rows, state)
        rows, state = values.repeat(3, 1, 1), after.repeat(3, 1, 1)
        stores = [MemoryStore(table, seed=7) for _ in range(3)]
        for store in stores:
            store.put(int64(keys), out)
            torch.testing.assert_close(values_of(store, keys), values.float(), rtol=0.0, atol=0.0)
            torch.testing.assert_close(state_of(store, keys), after)
        state = torch.stack([state_of(store, keys) for store in stores])  # rounded once less than the reference's


def test_one_scale_for_each_row_is_one_scale_for_all_without_replicas() -> None:
    by_row, scaled = (MemoryStore(make_table(optimizer=optimizer), seed=7) for optimizer in
                      (SCALED, dataclasses.replace(SCALED, scale=4.0)))  # fmt: skip
    for step, keys in enumerate([[1, 2], [2, 3], [1, 2, 3]]):
        train(by_row, keys, step, grad=0.1 * step)
        train(scaled, keys, step, grad=0.1 * step)
    torch.testing.assert_close(values_of(by_row, [1, 2, 3]), values_of(scaled, [1, 2, 3]))


def test_a_new_learning_rate_holds_from_the_next_update_on() -> None:
    store = MemoryStore(make_table(optimizer=SGD(lr=1.0)), seed=7)
    before = values_of(store, [1])
    train(store, [1], 0)
    store.lr = 0.0
    train(store, [1], 1)
    assert same_bits(values_of(store, [1]), before - 1)


# -- admission -------------------------------------------------------------------------------------------------------


def test_a_key_gets_a_row_of_its_own_in_the_kth_step_that_uses_it() -> None:
    table = make_table(admit_after=3)
    store = MemoryStore(table, seed=7)
    key, neighbour = POOL[:2]
    for step in (0, 5):
        train(store, [key], step)
        assert own_keys(store) == []
        assert store.sightings()[0].tolist() == [key]
        assert store.sightings()[1].tolist() == [1 + (step == 5)]
    shared = values_of(store, [neighbour])  # of the same shard: it reads the row that `key` trained twice
    assert same_bits(values_of(store, [key]), shared)
    assert not torch.allclose(shared, first_values(table, 7, [3], shared=True))
    store.resolve(int64([key]), 6)
    assert own_keys(store) == [key]
    assert store.sightings()[0].tolist() == []
    assert same_bits(values_of(store, [key, neighbour]), torch.cat([first_values(table, 7, [key]), shared]))


def test_rare_keys_of_one_shard_share_a_position_and_others_do_not() -> None:
    store = MemoryStore(make_table(admit_after=2), seed=7)
    positions = store.resolve(int64([POOL[0], POOL[8], POOL[1], POOL[9], POOL[0] + 1]), 0).tolist()
    assert positions[0] == positions[2]
    assert positions[1] == positions[3]
    assert len(set(positions)) == 3
    assert store.stats().shared_rows == 3
    assert store.stats().rows == 0


def test_an_unseen_rare_key_reads_the_first_values_of_its_shard() -> None:
    table = make_table(admit_after=2)
    store = MemoryStore(table, seed=7)
    assert same_bits(values_of(store, [POOL[0], POOL[8]]), first_values(table, 7, [3, 40_000], shared=True))
    assert store.stats().shared_rows == 0
    assert len(store.sightings()[0]) == 0


@pytest.mark.parametrize(("world", "part"), [(1, 7), (2, 4)])
def test_a_step_that_would_count_more_rare_keys_than_allowed_is_refused_and_changes_nothing(
    world: int, part: int
) -> None:
    store = MemoryStore(make_table(admit_after=3, max_rare_keys=7), seed=7, owners=np.arange(world))
    store.resolve(np.arange(part), 0)
    store.resolve(np.arange(part), 1)  # full, not over: keys that are counted already need no more room
    before = [array.tolist() for array in (*store.sightings(), *store.shared_items())]
    with pytest.raises(
        ValueError, match=rf"'item': step 2 .* {part + 1} rare keys .*\({part}\) of max_rare_keys=7; raise"
    ):
        store.resolve(int64([0, 100, 101]), 2)  # 0 gets a row and is counted no longer; two are new
    assert [array.tolist() for array in (*store.sightings(), *store.shared_items())] == before
    assert own_keys(store) == []
    store.resolve(int64([0, 100]), 2)
    assert own_keys(store) == [0] and len(store.sightings()[0]) == part


def test_more_rare_keys_than_allowed_are_restored_and_only_further_ones_refused() -> None:
    store = MemoryStore(make_table(admit_after=3), seed=7)
    store.resolve(np.arange(10), 0)
    store.table = dataclasses.replace(store.table, max_rare_keys=4)
    other = copy_of(store)
    other.resolve(np.arange(10), 1)
    assert set(other.sightings()[1].tolist()) == {2}
    with pytest.raises(ValueError, match="max_rare_keys=4"):
        other.resolve(int64([100]), 2)


# -- eviction --------------------------------------------------------------------------------------------------------


def test_over_budget_the_least_recently_used_rows_go_until_fifteen_sixteenths_are_left() -> None:
    store = MemoryStore(make_table(eviction=Eviction(max_rows=32)), seed=7)
    for step in range(32):
        train(store, [step], step)
    train(store, [0], 32)
    assert len(own_keys(store)) == 32  # full, not over
    train(store, [100], 33)
    # 30 are left: 32 + 1 - 30 go, of which key 0 was spared by its second use.
    assert own_keys(store) == [0, *range(4, 32), 100]
    assert store.stats().evicted == 3


def test_least_frequently_used_goes_by_steps_of_use_then_by_age() -> None:
    store = MemoryStore(make_table(eviction=Eviction(max_rows=4, policy="lfu")), seed=7)
    for step, keys in enumerate([[1, 2], [1, 3], [2], [4]]):
        train(store, keys, step)
    train(store, [5], 4)  # 3 are left: of 3 and 4, used once each, both go
    assert own_keys(store) == [1, 2, 5]


def test_ties_go_by_key_whatever_the_order_of_birth() -> None:
    for order in ([4, -3, 7, 9], [9, 7, 4, -3]):
        store = MemoryStore(make_table(eviction=Eviction(max_rows=4)), seed=7)
        store.resolve(int64(order), 0)
        store.resolve(int64([100]), 1)
        assert own_keys(store) == [7, 9, 100]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_row_of_the_current_batch_is_never_dropped(policy: str) -> None:
    store = MemoryStore(make_table(eviction=Eviction(max_rows=8, policy=policy)), seed=7)
    store.resolve(np.arange(4), 0)
    for step in (1, 2, 3):
        store.resolve(np.arange(4, 8), step)
    store.resolve(int64([0, 1, 2, 3, 50, 51, 52, 53]), 4)  # the rows of lowest rank are all in use
    assert own_keys(store) == [0, 1, 2, 3, 50, 51, 52, 53]


@pytest.mark.parametrize(("world", "part"), [(1, 7), (2, 4)])
def test_a_step_that_needs_more_than_the_budget_is_refused_with_the_numbers(world: int, part: int) -> None:
    store = MemoryStore(make_table(eviction=Eviction(max_rows=7)), seed=7, owners=np.arange(world))
    store.resolve(np.arange(part), 0)
    with pytest.raises(ValueError, match=rf"'item': step 12 alone uses {part + 1} rows .*\({part}\) of .*max_rows=7"):
        store.resolve(np.arange(part + 1), 12)


def test_a_row_lives_through_its_ttl_and_not_a_step_longer() -> None:
    store = MemoryStore(make_table(eviction=Eviction(ttl=20)), seed=7)
    train(store, [1, 2], 0)
    trained = values_of(store, [1, 2])
    store.resolve(int64([1]), 20)
    assert same_bits(values_of(store, [1, 2]), trained)
    store.resolve(int64([1]), 21)
    assert same_bits(values_of(store, [1]), trained[:1])
    assert same_bits(values_of(store, [2]), first_values(store.table, 7, [2]))


def test_an_evicted_key_is_born_anew_with_first_values_and_fresh_state() -> None:
    for eviction in (Eviction(ttl=2), Eviction(max_rows=1)):
        store = MemoryStore(make_table(eviction=eviction), seed=7)
        train(store, [1], 0)
        train(store, [1], 1)
        train(store, [2], 9)
        store.resolve(int64([1]), 10)
        assert same_bits(values_of(store, [1]), first_values(store.table, 7, [1]))
        assert same_bits(state_of(store, [1]), torch.full((1, 3), 0.125))
        assert store.stats().born == 3


def test_positions_of_evicted_rows_are_used_again() -> None:
    store = MemoryStore(make_table(eviction=Eviction(max_rows=10)), seed=7)
    for step in range(40):
        positions = store.resolve(np.arange(step * 5, step * 5 + 5), step)
        assert positions.max() < 15  # ten, and those that one step holds back
    assert store.stats().evicted == 200 - store.stats().rows


@pytest.mark.parametrize("eviction", [Eviction(max_rows=5), Eviction(ttl=1)])
def test_a_position_given_up_in_one_step_is_given_out_by_the_next_at_the_earliest(eviction: Eviction) -> None:
    store = MemoryStore(make_table(eviction=eviction), seed=7)
    first = store.resolve(np.arange(5), 0)
    second = store.resolve(np.arange(5, 10), 2)  # pushes all of them out, while batch 0 may still update their rows
    third = store.resolve(np.arange(10, 15), 4)
    assert not set(first) & set(second)
    assert set(third) == set(first)


def test_a_row_that_expires_in_the_batch_that_uses_it_moves_to_another_position() -> None:
    store = MemoryStore(make_table(eviction=Eviction(ttl=2)), seed=7)
    store.directory._next_sweep = 10**9
    before = store.resolve(int64([1]), 0)
    assert store.resolve(int64([1]), 3) != before


def test_a_step_over_budget_leaves_no_row_without_values() -> None:
    store = MemoryStore(make_table(admit_after=2, eviction=Eviction(max_rows=2)), seed=7)
    store.resolve(np.arange(3), 0)
    with pytest.raises(ValueError, match="raise max_rows"):
        store.resolve(np.arange(100), 1)
    ids, positions = store.shared_items()
    values = np.empty((len(ids), 3), np.float32)
    store.read(ids, positions, values)
    expected = first_values(store.table, 7, ids.tolist(), shared=True)
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=3e-7, atol=1e-7)


# -- random programs against the model -----------------------------------------------------------------------------------


class Both:
    """The store and its model, driven together."""

    def __init__(self, table: Table, *, lazy: bool = False) -> None:
        self.store, self.model = MemoryStore(table, seed=7), ModelStore(table, seed=7)
        if lazy:
            self.store.directory._next_sweep = 10**9  # only what is looked at is ever found to be late

    def train(self, keys: list[int], step: int) -> None:
        rows = self.model.resolve(keys, step)
        positions = self.store.resolve(int64(keys), step)
        # Keys that share a row in the one share it in the other; its gradient is the sum of theirs.
        grads: dict[int, float] = {}
        row_at: dict[int, Row] = {}
        for i, (position, row) in enumerate(zip(positions.tolist(), rows, strict=True)):
            assert row_at.setdefault(position, row) is row
            grads[position] = grads.get(position, 0.0) + i + 1
        assert len({id(row) for row in rows}) == len(row_at)
        grads_VD = torch.tensor(list(grads.values()))[:, None] * torch.tensor([1.0, -2.0, 0.5])
        self.store.update(int64(list(grads)), one_each(grads_VD.numpy().copy()), 1.0)
        for row, grad in zip(row_at.values(), grads_VD, strict=True):
            self.model.update(row, grad)

    def check_reads(self) -> None:
        """Compares what evaluation sees, which changes nothing."""
        assert same_bits(values_of(self.store, POOL), torch.stack([self.model.read(key) for key in POOL]))

    def check_everything(self) -> None:
        store, model = self.store, self.model
        assert (store.stats().rows, store.stats().shared_rows) == (len(model.rows), len(model.shared))
        assert (store.stats().born, store.stats().evicted) == (model.born, model.evicted)
        for (keys, positions), rows in ((store.items(), model.rows), (store.shared_items(), model.shared)):
            assert keys.tolist() == sorted(rows)
            values = np.empty((len(keys), 3), np.float32)
            store.read(keys, positions, values)
            for i, key in enumerate(keys.tolist()):
                assert same_bits(values[i], rows[key].values)
                state = store.records(positions[i : i + 1])[0, store.record_words - 3 : store.record_words]
                assert same_bits(state, rows[key].state)
            if store.table.eviction and rows is model.rows:
                counters = store.records(positions)[:, store.record_words :].view(np.int32)
                assert counters.tolist() == [[rows[key].last_used, rows[key].uses] for key in keys.tolist()]
        seen, counts = store.sightings()
        assert dict(zip(seen.tolist(), counts.tolist(), strict=True)) == model.sightings


batches = st.lists(st.sampled_from(POOL), unique=True, max_size=8)
programs = st.lists(st.tuples(st.integers(1, 7), batches), min_size=1, max_size=20)
evictions = st.one_of(
    st.none(),
    st.builds(Eviction, ttl=st.sampled_from([1, 3, 17, 30])),
    st.builds(Eviction, max_rows=st.integers(1, 20), policy=st.sampled_from(["lru", "lfu"])),
    st.builds(
        Eviction, max_rows=st.integers(6, 20), policy=st.sampled_from(["lru", "lfu"]), ttl=st.sampled_from([3, 17, 30])
    ),
)
tables = st.builds(
    make_table,
    eviction=evictions,
    admit_after=st.sampled_from([1, 1, 2, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    init=st.just(Uniform(-1.0, 1.0)),  # exact in the reference
)


@given(tables, programs, st.booleans())
@few
def test_any_program_leaves_what_the_model_holds(table: Table, program, lazy: bool) -> None:
    both, step = Both(table, lazy=lazy), 0
    for gap, keys in program:
        step += gap
        try:
            both.train(keys, step)
        except OverBudget:
            with pytest.raises(ValueError, match="raise max_rows or use smaller batches"):
                both.store.resolve(int64(keys), step)
            return
        both.check_reads()
    both.check_everything()


@given(tables, programs, st.integers(1, 10))
@few
def test_a_restored_store_goes_on_as_if_nothing_had_happened(table: Table, program, cut: int) -> None:
    both, step = Both(table), 0
    for i, (gap, keys) in enumerate(program):
        step += gap
        if i == cut:
            before = both.store
            both.store = copy_of(before)
            assert both.store.digest() == before.digest()
            assert both.store.updates == before.updates
            both.model.born = both.model.evicted = 0  # those count since the start of a process
        try:
            both.train(keys, step)
        except OverBudget:
            return
        both.check_reads()
    both.check_everything()


def test_a_ttl_that_nobody_sweeps_does_not_count_against_the_budget() -> None:
    # Sixteen rows fit. Six are past their ttl when six new ones come: nothing else may be dropped for them.
    both = Both(make_table(eviction=Eviction(max_rows=16, ttl=20, policy="lfu")), lazy=True)
    for step in range(3):
        both.train(POOL[:6], step)
    both.train(POOL[6:16], 10)
    both.train(POOL[16:22], 25)
    both.check_everything()
    assert both.store.stats().rows == 16


# -- digest and stats ------------------------------------------------------------------------------------------------


def trained_store(**settings) -> MemoryStore:
    store = MemoryStore(make_table(**settings), seed=7)
    for step in range(3):
        train(store, list(range(step, 40)), step)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("admit_after", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_digests_of_the_workers_parts_add_up_to_the_digest_of_the_whole(dtype, admit_after: int, world: int) -> None:
    table = make_table(dtype=dtype, admit_after=admit_after)
    whole, parts = (
        MemoryStore(table, seed=7),
        [MemoryStore(table, seed=7, owners=np.arange(world)) for _ in range(world)],
    )
    rng = np.random.default_rng(0)
    for step in range(4):
        keys = rng.permutation([*POOL, *range(60)])[:50]
        train(whole, keys.tolist(), step, grad=step + 1)
        owner = reference.owner(torch.from_numpy(keys), torch.arange(world)).numpy()
        for w, part in enumerate(parts):
            train(part, keys[owner == w].tolist(), step, grad=step + 1)
    assert all(len(part) for part in parts)
    sums = [sum(halves) % 2**64 for halves in zip(*(part.digest() for part in parts), strict=True)]
    assert tuple(sums) == whole.digest()


def test_the_digest_changes_with_any_value_state_or_key() -> None:
    store = trained_store()
    seen = {store.digest()}
    keys, positions = store.items()
    records = store.records(positions)
    for word in range(store.record_words):
        changed = records.copy()
        changed.view(np.uint32)[17, word] ^= 1  # the last bit
        seen.add(restored(store, keys, changed).digest())
    other = keys.copy()
    other[17] = 1000
    seen.add(restored(store, other, records).digest())
    seen.add(restored(store, keys[:-1], records[:-1]).digest())
    assert restored(store, keys, records).digest() in seen
    assert len(seen) == 3 + store.record_words


def restored(store: MemoryStore, keys: np.ndarray, records: np.ndarray) -> MemoryStore:
    other = MemoryStore(store.table, seed=7)
    other.put(keys, records)
    other.resume(updates=store.updates, step=2)
    return other


def test_the_digest_does_not_change_with_the_order_of_births_or_with_uses() -> None:
    forwards, other = (MemoryStore(make_table(eviction=Eviction(ttl=99)), seed=7) for _ in range(2))
    forwards.resolve(np.arange(50), 0)
    other.resolve(np.arange(50)[::-1].copy(), 0)
    other.resolve(np.arange(50), 1)
    assert forwards.digest() == other.digest()


def test_stats_count_rows_and_the_bytes_of_records_and_index() -> None:
    store = MemoryStore(make_table(dim=8, dtype=torch.bfloat16, eviction=Eviction(max_rows=64)), seed=7)
    empty = store.stats()
    assert (empty.rows, empty.shared_rows, empty.born, empty.evicted) == (0, 0, 0, 0)
    store.resolve(np.arange(64), 0)
    full = store.stats()
    record = 8 * 2 + 8 * 4 + 8  # values, state, counters
    assert full.bytes - empty.bytes == 64 * record
    assert full.bytes_per_row == full.bytes / 64
    store.resolve(np.arange(100, 104), 1)
    after = store.stats()
    assert (after.rows, after.born, after.evicted) == (60, 68, 8)
    assert full.bytes - after.bytes == 4 * record


def test_stats_count_shared_rows_and_sightings_too() -> None:
    store = MemoryStore(make_table(admit_after=2), seed=7)
    empty = store.stats().bytes
    store.resolve(np.arange(3000), 0)
    stats = store.stats()
    assert (stats.rows, stats.born) == (0, 0)
    assert stats.shared_rows == len(np.unique(reference.shards(torch.arange(3000))))
    grown = store.directory.nbytes
    assert stats.bytes == grown + stats.shared_rows * 6 * 4
    assert stats.bytes > empty
    assert stats.bytes_per_row == stats.bytes / stats.shared_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_of_items_gives_every_record_back(dtype: torch.dtype) -> None:
    store = trained_store(dtype=dtype, admit_after=2, eviction=Eviction(max_rows=64))
    other = copy_of(store)
    for part in ("items", "shared_items"):
        (keys, positions), (their_keys, their_positions) = getattr(store, part)(), getattr(other, part)()
        assert len(keys)
        assert their_keys.tolist() == keys.tolist()
        assert same_bits(other.records(their_positions), store.records(positions))  # counters included
    assert [a.tolist() for a in other.sightings()] == [a.tolist() for a in store.sightings()]
    assert len(store.sightings()[0])

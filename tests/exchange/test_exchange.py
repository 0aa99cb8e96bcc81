"""What workers get from one another: the right rows, over every way that keys can be spread, and no more bytes than needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Batch, Feature, Jagged, Table, Trainer
from nestpipe.exchange import transport
from nestpipe.exchange.mesh import Mesh
from nestpipe.exchange.plan import place
from nestpipe.kernels.keys import owner_of
from nestpipe.store.memory import MemoryStore
from tests.cluster import Cluster

SEED, DIM = 3, 4
FROZEN = SGD(lr=0.0)
TABLES = [
    Table("item", DIM, optimizer=FROZEN),
    Table("near", DIM, optimizer=FROZEN, pooled_at="source"),
    Table("far", DIM, optimizer=FROZEN, pooled_at="owner"),
]
FEATURES = [Feature("list", "item"), Feature("near", "near", "sum"), Feature("far", "far", "mean")]
Lists = list[list[int]]


class Recorder(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: dict[str, Tensor] = {}

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        self.seen = {"list": rows["list"].values, "near": rows["near"], "far": rows["far"]}
        losses = (rows["near"] + rows["far"]).sum(1)
        return self.scale * losses.index_add(0, rows["list"].sample_ids(), rows["list"].values.sum(1))


def random_lists(rng: np.random.Generator, num_samples: int, high: int) -> Lists:
    return [rng.integers(-high, high, rng.integers(0, 6)).tolist() for _ in range(num_samples)]


def mixed(rank: int, world: int) -> Lists:
    return random_lists(np.random.default_rng([1, rank]), 7 + rank, 60)


def odd_ranks_are_empty(rank: int, world: int) -> Lists:
    return [] if rank % 2 else mixed(rank, world)


def only_the_last_rank_has_samples(rank: int, world: int) -> Lists:
    return mixed(rank, world) if rank == world - 1 else []


def no_keys(rank: int, world: int) -> Lists:
    return [[], [], []]


def all_keys_of_one_owner(rank: int, world: int) -> Lists:
    keys = [key for key in range(600) if owner_of(key, np.arange(world)) == world - 1]
    rng = np.random.default_rng([2, rank])
    return [rng.choice(keys, 5).tolist() for _ in range(6)]


def one_key_repeated(rank: int, world: int) -> Lists:
    return [[77] * 9, [77], []]


def extreme_keys(rank: int, world: int) -> Lists:
    low, high = -(2**63), 2**63 - 1
    return [[low, high, 0, -1], [high - rank, low + rank], [low], [1 << 62, -(1 << 62), 1 << 32, -(1 << 32)]]


CASES: list[Callable[[int, int], Lists]] = [
    mixed,
    odd_ranks_are_empty,
    only_the_last_rank_has_samples,
    no_keys,
    all_keys_of_one_owner,
    one_key_repeated,
    extreme_keys,
]


def fetch(owners: int | None) -> dict[str, dict[str, np.ndarray]]:
    model = Recorder()
    tables = [dataclasses.replace(table, owners=owners) for table in TABLES]
    trainer = Trainer(model, tables, FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, 0.0), seed=SEED)
    fetched = {}
    for case in CASES:
        keys = Jagged.from_lists(case(trainer.rank, trainer.world))
        model.seen = {name: torch.empty(0, DIM) for name in ("list", "near", "far")}
        before = trainer.rows("item", keys.values).numpy()
        trainer.step(Batch({name: keys for name in ("list", "near", "far")}))
        seen = {name: tensor.detach().numpy() for name, tensor in model.seen.items()}
        fetched[case.__name__] = {"before": before, "after": trainer.rows("item", keys.values).numpy(), **seen}
    return fetched


@pytest.fixture(
    scope="module",
    params=[(1, None), (2, None), (3, None), (5, None), (8, None), (2, 1), (3, 2), (5, 1)],
    ids=lambda param: f"{param[0]} workers, {param[1] or 'all'} of them owners",
)
def fetched(request: pytest.FixtureRequest, cluster: Cluster) -> list[dict[str, dict[str, np.ndarray]]]:
    world, owners = request.param
    return cluster.run(world, fetch, owners)


def first_values(table: Table, keys: list[int]) -> dict[int, np.ndarray]:
    distinct = np.unique(np.array(keys, np.int64))
    out = np.empty((len(distinct), DIM), np.float32)
    MemoryStore(table, seed=SEED).read(distinct, np.full(len(distinct), -1), out)
    return dict(zip(distinct.tolist(), out, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_rows_equal_a_plain_dictionary(
    fetched: list[dict[str, dict[str, np.ndarray]]], case: Callable[[int, int], Lists]
) -> None:
    world = len(fetched)
    lists = [case(rank, world) for rank in range(world)]
    every = [key for ours in lists for keys in ours for key in keys]
    item, near, far = (first_values(table, every) for table in TABLES)
    nothing = np.zeros(DIM, np.float32)
    for rank, ours in enumerate(lists):
        got = fetched[rank][case.__name__]
        rows = np.array([item[key] for keys in ours for key in keys], np.float32).reshape(-1, DIM)
        for when in ("before", "list", "after"):
            np.testing.assert_array_equal(got[when], rows, err_msg=f"rank {rank}, {when}")
        sums = [sum((near[key] for key in keys), nothing) for keys in ours]
        means = [sum((far[key] for key in keys), nothing) / max(1, len(keys)) for keys in ours]
        np.testing.assert_allclose(got["near"], np.reshape(sums, (-1, DIM)), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(got["far"], np.reshape(means, (-1, DIM)), rtol=1e-5, atol=1e-7)


# -- pooled at the source, at the owner --------------------------------------------------------------------------------


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(16, 1)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        logits = self.out(rows["bag"])[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")


def bags(kind: str, rank: int, step: int) -> Batch:
    rng = np.random.default_rng([4, rank, step])
    if kind == "long bags of keys that hardly repeat":
        keys = torch.from_numpy(rng.integers(0, 1 << 40, 32 * 20))
    elif kind == "few hot keys":
        keys = torch.from_numpy(rng.integers(0, 5, 32 * 20))
    else:
        high = 5 if rank == 0 else 1 << 40
        keys = torch.from_numpy(rng.integers(0, high, 32 * 20))
    weights = torch.from_numpy(rng.random(len(keys), np.float32) + 0.5)
    labels = torch.from_numpy(rng.integers(0, 2, 32)).float()
    return Batch({"bag": Jagged.from_lengths(keys, torch.full((32,), 20), weights)}, labels=labels)


def train_bags(kind: str, pooled_at: str) -> dict[str, Any]:
    table = Table("bag", 16, optimizer=Adagrad(lr=0.1), pooled_at=pooled_at)
    trainer = Trainer(
        Clicks(), [table], [Feature("bag", "bag", "mean")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    losses = [trainer.step(bags(kind, trainer.rank, step)).loss for step in range(4)]  # type: ignore[union-attr]
    sent = trainer.bytes_sent()
    keys = torch.cat([bags(kind, rank, 0).keys["bag"].values for rank in range(trainer.world)])
    rows = trainer.rows("bag", keys).numpy()
    return {"losses": losses, "rows": rows, "at_owner": trainer._worker.ops.plan.at_owner[0], "sent": sent}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("kind", "owner_is_cheaper"),
    [("long bags of keys that hardly repeat", True), ("few hot keys", False), ("each rank another", None)],
)
def test_auto_takes_the_cheaper_way_on_all_ranks_and_all_ways_agree(
    cluster: Cluster, world: int, kind: str, owner_is_cheaper: bool | None
) -> None:
    results = {how: cluster.run(world, train_bags, kind, how) for how in ("source", "owner", "auto")}
    auto = results["auto"]
    assert len({result["at_owner"] for result in auto}) == 1
    assert [results[how][0]["at_owner"] for how in ("source", "owner")] == [False, True]
    if owner_is_cheaper is not None:
        assert auto[0]["at_owner"] is owner_is_cheaper
    assert auto[0]["sent"] == min(results[how][0]["sent"] for how in ("source", "owner"))
    assert results["source"][0]["sent"] != results["owner"][0]["sent"]
    reference = results["source"][0]
    for how in ("owner", "auto"):
        for result in results[how]:
            assert result["losses"] == pytest.approx(reference["losses"], rel=1e-6)
            error = np.linalg.norm(result["rows"] - reference["rows"]) / np.linalg.norm(reference["rows"])
            assert error <= 1e-6


def train_whole_tables(owners: int | None) -> dict[str, Any]:
    tables = [Table(f"t{k}", 16, optimizer=Adagrad(lr=0.1), pooled_at="owner", owners=owners) for k in range(4)]
    features = [Feature(f"f{k}", f"t{k}", "sum") for k in range(4)]

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = Clicks()

        def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
            return self.out(batch, {"bag": sum(rows.values())})

    trainer = Trainer(Sum(), tables, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), micro_batches=2)
    for step in range(3):
        batch = bags("long bags of keys that hardly repeat", trainer.rank, step)
        trainer.step(Batch({f.name: batch.keys["bag"] for f in features}, labels=batch.labels))
    keys = torch.cat(
        [bags("long bags of keys that hardly repeat", r, 0).keys["bag"].values for r in range(trainer.world)]
    )
    return {
        "sent": trainer.bytes_sent(),
        "held": [len(store.directory) for store in trainer.stores],
        "rows": np.stack([trainer.rows(table.name, keys).numpy() for table in tables]),
        "told": trainer.describe(),
    }


def test_whole_tables_are_dealt_out_evenly_and_halve_the_vectors(cluster: Cluster) -> None:
    spread, whole = (cluster.run(2, train_whole_tables, owners) for owners in (None, 1))
    assert [[held > 0 for held in result["held"]] for result in whole] == [[True, False] * 2, [False, True] * 2]
    vectors = 3 * 2 * 4 * 32 * (2 * 16 * 4 + 4)  # steps, workers, tables, bags: a vector, its gradient, a length
    assert spread[0]["sent"] - whole[0]["sent"] == pytest.approx(vectors / 2, rel=0.02)
    error = np.linalg.norm(whole[0]["rows"] - spread[0]["rows"]) / np.linalg.norm(spread[0]["rows"])
    assert error <= 1e-6
    assert "held by worker 1, pooled at the owner" in whole[0]["told"][1]


def test_a_table_on_some_workers_takes_neighbours_that_have_least_to_do() -> None:
    tables = [
        Table("a", 8, owners=3),
        Table("b", 64, owners=1),
        Table("c", 8),
        Table("d", 8, owners=2),
        Table("e", 4, owners=9),
    ]
    features = [Feature(name, name) for name in "abcde"]
    assert [held.owners.tolist() for held in place(tables, features, Mesh.flat(4), 0)] == [
        [0, 1, 2],
        [3],
        [0, 1, 2, 3],
        [0, 1],
        [0, 1, 2, 3],
    ]


def test_auto_says_what_one_owner_would_save(cluster: Cluster) -> None:
    def tell(kind: str) -> str:
        return cluster.run(2, describe_bags, kind)[0]

    assert "declared owners=1" in tell("long bags of keys that hardly repeat")
    assert "declared owners=1" not in tell("few hot keys")


def describe_bags(kind: str) -> str:
    trainer = Trainer(
        Clicks(), [Table("bag", 16)], [Feature("bag", "bag", "mean")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    trainer.step(bags(kind, trainer.rank, 0))
    return trainer.describe()[0]


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_of_a_step(repetitions: int, micro_batches: int, schedule: str = "serial", window_cache: bool = True) -> int:
    model = Recorder()
    trainer = Trainer(
        model,
        TABLES,
        FEATURES,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.0),
        micro_batches=micro_batches,
        schedule=schedule,
        window_cache=window_cache,
        clustering="none",
    )
    sequence = Jagged.from_lists([list(range(40)) * repetitions, list(range(20, 60)) * repetitions])
    nothing = Jagged.from_lists([[], []])
    trainer.step(Batch({"list": sequence, "near": sequence, "far": nothing}))
    return trainer.bytes_sent()


def test_a_single_worker_sends_nothing(cluster: Cluster) -> None:
    assert cluster.run(1, bytes_of_a_step, 1, 1) == [0]


def test_bytes_do_not_grow_with_repetition_or_with_micro_batches(cluster: Cluster) -> None:
    once = cluster.run(3, bytes_of_a_step, 1, 1)
    assert len(set(once)) == 1
    # 60 distinct keys of two tables: each rank asks others for those that it does not own.
    asked = sum(owner_of(key, np.arange(3)) != rank for rank in range(3) for key in range(60)) * 2
    sizes = 3 * 2 * 8 * (1 + 4 * len(TABLES))
    assert once[0] == asked * (4 + 2 * 4 * DIM) + sizes
    assert cluster.run(3, bytes_of_a_step, 50, 1) == once
    assert cluster.run(3, bytes_of_a_step, 1, 2) == once


def bytes_without_pairs() -> int:
    pairs, transport.PAIRS = transport.PAIRS, 1
    try:
        return bytes_of_a_step(1, 2, "nested")
    finally:
        transport.PAIRS = pairs


def test_many_workers_send_the_same_bytes_through_the_backends_own_all_to_all(cluster: Cluster) -> None:
    assert cluster.run(3, bytes_without_pairs) == cluster.run(3, bytes_of_a_step, 1, 2, "nested")


@pytest.mark.parametrize("schedule", ["fwp", "nested"])
def test_a_frozen_window_sends_each_row_once_and_says_when_it_was_last_used(cluster: Cluster, schedule: str) -> None:
    once, window = (cluster.run(3, bytes_of_a_step, 1, n, schedule)[0] for n in (1, 2))
    pairs = [(rank, w) for rank in range(3) for w in range(3) if rank != w]
    keys = {pair: sum(owner_of(key, np.arange(3)) == pair[1] for key in range(60)) for pair in pairs}
    last_uses = sum(2 * 4 * -(-count // 4) for count in keys.values())  # a byte a key, in whole words, for two tables
    sizes = len(pairs) * 8 * len(TABLES)  # one more number for each table
    assert window == once + last_uses + sizes


@pytest.mark.parametrize("schedule", ["serial", "fwp", "nested"])
def test_without_the_window_cache_every_micro_batch_asks_again(cluster: Cluster, schedule: str) -> None:
    sent = cluster.run(3, bytes_of_a_step, 1, 2, schedule, False)[0]
    asked = (
        sum(owner_of(key, np.arange(3)) != rank for rank in range(3) for m in (range(40), range(20, 60)) for key in m)
        * 2
    )
    sizes = 3 * 2 * 8 * (1 + (4 if schedule == "serial" else 5) * len(TABLES))
    assert sent == asked * (4 + 2 * 4 * DIM) + sizes

"""Replicas of tables (2D): the result is that of one replica, to rounding; replicas and schedules agree to the bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe import (
    SGD,
    Adagrad,
    Batch,
    Eviction,
    Feature,
    Jagged,
    RowwiseAdagrad,
    ScaledRowwiseAdagrad,
    Table,
    Trainer,
)
from nestpipe.optim import RowOptimizer
from nestpipe.tables import Normal
from tests.behaviour.test_schedules import Case, batches, close, make, serial, train
from tests.cluster import Cluster

MESHES = [(2, 2), (2, 1), (4, 1), (3, 2)]  # replicas, shards


def together(parts: list[Batch]) -> Batch:
    def joined(name: str) -> Jagged:
        values = torch.cat([part.keys[name].values for part in parts])
        lengths = torch.cat([part.keys[name].lengths for part in parts])
        return Jagged.from_lengths(values, lengths)

    return Batch({name: joined(name) for name in parts[0].keys}, {}, torch.cat([part.labels for part in parts]))


def column(features: list[Feature], case: Case, shard: int, replicas: int, shards: int) -> Iterator[Batch]:
    """The batches of all workers of a mesh that hold one shard, as one worker would get them."""
    ranks = [group * shards + shard for group in range(replicas)]
    streams = [batches(features, case, rank, replicas * shards) for rank in ranks]
    for parts in itertools.zip_longest(*streams):
        yield together([part for part in parts if part is not None])


def rows_of(trainer: Any) -> dict[str, dict[int, np.ndarray]]:
    """Values and optimizer state by table and key, of what this worker alone, or first among replicas, holds."""
    held: dict[str, dict[int, np.ndarray]] = {}
    for k, store in enumerate(trainer.stores):
        table = held[store.table.name] = {}
        if trainer._worker.ops.plan.is_copy(k, trainer.rank):
            continue
        for shared in (False, True):
            for keys, words in store.blocks(shared=shared):
                if store.half:  # bfloat16 values
                    bits = np.ascontiguousarray(words[:, : store._value_words]).view(np.uint16).astype(np.uint32) << 16
                    words = np.concatenate([bits.view(np.float32), words[:, store._value_words :]], 1)
                table |= {(int(key), shared): row for key, row in zip(keys, words, strict=True)}
    return held


def train_rows(case: Case, replicas: int, shards: int) -> dict[str, dict[int, np.ndarray]]:
    """On a mesh, or on as many workers as it has shards, with the same batches."""
    trainer, features, folder = make(case)
    try:
        if case.replicas > 1:
            trainer.fit(batches(features, case, trainer.rank, trainer.world))
        else:
            trainer.fit(column(features, case, trainer.rank, replicas, shards))
        trainer.digest()  # raises if replicas differ
        return rows_of(trainer)
    finally:
        close(trainer, folder)


def united(parts: list[dict[str, dict[int, np.ndarray]]]) -> dict[str, dict[int, np.ndarray]]:
    return {name: {key: row for part in parts for key, row in part[name].items()} for name in parts[0]}


@pytest.mark.parametrize(
    ("mesh", "tier"), [*((mesh, "memory") for mesh in MESHES), ((2, 2), "disk"), ((2, 1), "disk")], ids=str
)
def test_exact_replicas_give_what_one_replica_gives(cluster: Cluster, mesh: tuple[int, int], tier: str) -> None:
    """Every row optimizer, pooling, admission, eviction; the same global batches."""
    replicas, shards = mesh
    case = Case("serial", tier, steps=50, replicas=replicas)
    expected = united(cluster.run(shards, train_rows, dataclasses.replace(case, replicas=1), replicas, shards))
    rows = united(cluster.run(replicas * shards, train_rows, case, replicas, shards))
    assert rows.keys() == expected.keys()
    for name, table in rows.items():
        assert table.keys() == expected[name].keys() and table
        mine, theirs = (np.stack([held[key] for key in sorted(held)]) for held in (table, expected[name]))
        rounding = 1e-2 if "adagrad 1" in name else 1e-6  # bfloat16
        np.testing.assert_allclose(mine, theirs, rtol=rounding, atol=rounding, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_every_schedule_equals_serial_with_replicas(cluster: Cluster, schedule: str, mesh: tuple[int, int]) -> None:
    """`make grid` has them all, with every split."""
    replicas, shards = mesh
    tier = ("memory", "disk")[(replicas + len(schedule)) % 2]
    case = Case(schedule, tier, steps=12, micro_batches=3, clustering="window", delays=1, replicas=replicas)
    world = replicas * shards
    assert set(cluster.run(world, train, case)) == {serial(cluster, world, case)}


# -- averaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
@pytest.mark.parametrize("every", [1, 3])
def test_every_schedule_equals_serial_with_replicas_that_are_averaged(
    cluster: Cluster, schedule: str, every: int
) -> None:
    tier, replicas, shards = {"dbp": ("disk", 2, 1), "fwp": ("memory", 2, 2), "nested": ("disk", 3, 1)}[schedule]
    case = Case(
        schedule,
        tier,
        steps=13,
        micro_batches=2,
        delays=every,
        replicas=replicas,
        averaged=every,
        check_freshness=every > 1,
    )
    world = replicas * shards
    assert set(cluster.run(world, train, case)) == {serial(cluster, world, case)}


class Fixed(nn.Module):
    """Nothing to train but rows: each sample's rows add up to its label."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return ((rows["item"] * torch.tensor([1.0, -2.0, 0.5])).sum(1) - batch.labels) ** 2


def clicks(rank: int, steps: int) -> list[Batch]:
    rng = np.random.default_rng([3, rank])
    made = []
    for _ in range(steps):
        lengths = rng.integers(0, 5, 4 + rank)  # groups of different weight
        keys = torch.from_numpy(rng.integers(0, 30, int(lengths.sum())))
        labels = torch.from_numpy(rng.standard_normal(len(lengths)).astype(np.float32))
        made.append(Batch({"item": Jagged.from_lengths(keys, torch.from_numpy(lengths))}, {}, labels))
    return made


def train_averaged(optimizer: RowOptimizer, replicas: int, every: int, steps: int, near: str) -> dict[int, np.ndarray]:
    table = Table("item", 3, optimizer=optimizer, init=Normal(0.0), sync="average", sync_every=every)
    trainer = Trainer(
        Fixed(),
        [table],
        [Feature("item", "item", "sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        replicas=replicas,
        near=near,
        schedule="nested",
        micro_batches=2,
    )
    with trainer:
        trainer.fit(clicks(trainer.rank, steps))
        return {key: row for (key, _), row in rows_of(trainer)["item"].items()}


def by_hand(optimizer: RowOptimizer, groups: list[list[int]], every: int, steps: int) -> dict[int, np.ndarray]:
    """Whole tables, one for each group; all of each is averaged. float64, [30, values and state]."""
    state = optimizer.state_floats(3)
    tables = np.zeros((len(groups), 30, 3 + state))
    data = {rank: clicks(rank, steps) for group in groups for rank in group}
    for step in range(steps):
        weight = sum(batches[step].size for batches in data.values())
        for table, group in zip(tables, groups, strict=True):
            values = torch.tensor(table[:, :3], requires_grad=True)
            used = np.zeros(30, bool)
            for rank in group:
                batch = data[rank][step]
                keys, offsets = batch.keys["item"].values, batch.keys["item"].offsets
                used[keys.numpy()] = True
                rows = nn.functional.embedding_bag(keys, values, offsets[:-1], mode="sum")
                Fixed()(batch, {"item": rows}).sum().backward()
            grad = values.grad.numpy() * len(groups) / weight
            table[used] = applied(optimizer, table[used], grad[used])
        if (step + 1) % every == 0:
            tables[:] = tables.mean(axis=0)
    return dict(enumerate(tables[0]))


def applied(optimizer: RowOptimizer, rows: np.ndarray, grad: np.ndarray) -> np.ndarray:
    values, sums = rows[:, :3], rows[:, 3:]
    if isinstance(optimizer, SGD):
        return values - optimizer.lr * grad
    sums = sums + (grad**2 if isinstance(optimizer, Adagrad) else (grad**2).mean(axis=1, keepdims=True))
    return np.concatenate([values - optimizer.lr * grad / (np.sqrt(sums) + 1e-10), sums], 1)


@pytest.mark.parametrize(("every", "near"), [(1, "shards"), (4, "replicas")])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.3), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1)], ids=repr)
def test_averaging_rows_used_since_equals_averaging_whole_tables(
    cluster: Cluster, optimizer: RowOptimizer, every: int, near: str
) -> None:
    steps = 24
    groups = [[0, 1], [2, 3]] if near == "shards" else [[0, 2], [1, 3]]
    parts = cluster.run(4, train_averaged, optimizer, 2, every, steps, near)
    rows = {key: row for part in parts for key, row in part.items()}
    expected = by_hand(optimizer, groups, every, steps)
    assert len(rows) == 30
    for key, row in rows.items():
        np.testing.assert_allclose(row, expected[key], rtol=1e-5, atol=1e-6)


def test_averaging_every_step_with_sgd_is_training_one_replica(cluster: Cluster) -> None:
    parts = cluster.run(4, train_averaged, SGD(lr=0.3), 2, 1, 24, "shards")
    whole = by_hand(SGD(lr=0.3), [[0, 1, 2, 3]], 1, 24)
    for key, row in ((key, row) for part in parts for key, row in part.items()):
        np.testing.assert_allclose(row, whole[key], rtol=1e-6, atol=1e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def train_and_save(case: Case, folder: str, steps: int) -> str:
    """Digest at the end; saved on the way, in the foreground and in the background."""
    trainer, features, storage = make(case)
    try:
        source = batches(features, case, trainer.rank, trainer.world)
        trainer.fit(source, steps=steps)
        trainer.save(Path(folder) / "whole")
        into = trainer.checkpoints(Path(folder) / "parts", full_every=2)
        trainer.checkpoint(into)
        trainer.fit(source, steps=3)
        trainer.checkpoint(into)  # what changed since
        trainer.fit(source)
        into.wait()
        return trainer.digest()
    finally:
        close(trainer, storage)


def loaded(case: Case, path: str, *, goes_on: bool = False) -> str:
    trainer, features, storage = make(case)
    try:
        trainer.load(path)
        if goes_on:
            rest = itertools.islice(batches(features, case, trainer.rank, trainer.world), trainer.position, None)
            trainer.fit(rest)
        return trainer.digest()
    finally:
        close(trainer, storage)


def saved_and_kept(case: Case, path: str, folder: str) -> str:
    """Loads and saves again, on other workers."""
    trainer, _, storage = make(case)
    try:
        trainer.load(path)
        trainer.save(folder)
        return trainer.digest()
    finally:
        close(trainer, storage)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_checkpoint_of_replicas_is_loaded_by_any_others_and_back(cluster: Cluster, tier: str, tmp_path: Path) -> None:
    case = Case("nested", tier, steps=14, micro_batches=2, replicas=2)
    end = cluster.run(4, train_and_save, case, str(tmp_path), 6)[0]
    for path, steps in ((tmp_path / "whole", 6), (tmp_path / "parts" / "step-000000009", 9)):
        digests = set()
        for world, replicas in ((4, 2), (1, 1), (2, 1), (3, 1), (4, 4), (4, 1), (8, 2)):
            other = dataclasses.replace(case, replicas=replicas)
            digests |= set(cluster.run(world, loaded, other, str(path)))
        assert len(digests) == 1, steps
        assert set(cluster.run(4, functools.partial(loaded, goes_on=True), case, str(path))) == {end}, steps
    for world, replicas in ((3, 1), (4, 4)):
        other, again = dataclasses.replace(case, replicas=replicas), str(tmp_path / f"again-{world}-{replicas}")
        digest = cluster.run(world, saved_and_kept, other, str(tmp_path / "whole"), again)[0]
        assert set(cluster.run(4, loaded, case, again)) == {digest}


def test_averaged_replicas_are_settled_before_they_are_saved(cluster: Cluster, tmp_path: Path) -> None:
    """In the middle of a window too: who goes on and who resumes end alike."""
    case = Case("nested", "disk", steps=14, micro_batches=2, replicas=2, averaged=4)
    end = cluster.run(2, train_and_save, case, str(tmp_path), 6)[0]
    path = tmp_path / "parts" / "step-000000009"
    assert set(cluster.run(2, functools.partial(loaded, goes_on=True), case, str(path))) == {end}


def digests_of_parts(case: Case) -> list[tuple[int, int]]:
    trainer, features, folder = make(case)
    try:
        trainer.fit(batches(features, case, trainer.rank, trainer.world))
        return [store.digest() for store in trainer.stores]
    finally:
        close(trainer, folder)


@pytest.mark.parametrize("steps", [12, 14])
def test_after_an_average_replicas_are_alike_and_between_two_they_are_not(cluster: Cluster, steps: int) -> None:
    """With rare keys that get rows of their own, and rows that are given up, meanwhile."""
    for tier in ("memory", "disk"):
        case = Case("nested", tier, steps=steps, micro_batches=2, replicas=3, averaged=4)
        parts = cluster.run(3, digests_of_parts, case)
        alike = [len(set(of_table)) == 1 for of_table in zip(*parts, strict=True)]
        assert alike == ([True] * 5 if steps == 12 else [True, False, False, False, False])


# -- mistakes, and what others have tried ------------------------------------------------------------------------------


def small(tables: list[Table], model: nn.Module | None = None, **options: Any) -> Trainer:
    features = [Feature(table.name, table.name, "sum") for table in tables]
    return Trainer(
        Summed() if model is None else model,
        tables,
        features,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        **options,
    )


class Summed(nn.Module):
    """A sample's rows add up to its label; where all labels are above 100, nothing is to be learned."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        if batch.size and bool((batch.labels > 100).all()):
            return torch.zeros(batch.size)
        return (sum(values.sum(1) for values in rows.values()) - batch.labels) ** 2


def bags(names: list[str], rank: int, steps: int, *, blind: tuple[int, ...] = (), keys: int = 300) -> Iterator[Batch]:
    """blind: batches of rank 1 from which nothing is to be learned."""
    rng = np.random.default_rng([8, rank])
    for step in range(steps):
        lists = {}
        for name in names:
            lengths = rng.integers(1, 8, 8)
            values = torch.from_numpy(rng.integers(0, keys, int(lengths.sum())))
            lists[name] = Jagged.from_lengths(values, torch.from_numpy(lengths))
        labels = torch.from_numpy(rng.standard_normal(8).astype(np.float32))
        yield Batch(lists, {}, labels + 1000 if rank == 1 and step in blind else labels)


def owners_beside_replicas(replicas: int | str) -> tuple[list[list[int]], list[set[int]]]:
    with small([Table("small", 4, replicas=replicas), *(Table(name, 4, owners="auto") for name in "ab")]) as trainer:
        trainer.fit(bags(["small", "a", "b"], trainer.rank, 4))
        return [s.owners.tolist() for s in trainer.stores[1:]], [set(s.items()[0].tolist()) for s in trainer.stores[1:]]


def test_workers_decide_the_owners_of_a_table_alike_beside_one_with_replicas(cluster: Cluster) -> None:
    for replicas in ("all", 1):
        (owners, held), (others, held_there) = cluster.run(2, owners_beside_replicas, replicas)
        assert owners == others
        assert all(not (here & there) for here, there in zip(held, held_there, strict=True))


def rows_after_blind_batches(replicas: int | str | None, pooled_at: str) -> dict[int, list[float]]:
    table = Table("a", 4, optimizer=SGD(lr=0.05), pooled_at=pooled_at, replicas=replicas)
    with small([table], replicas=2 if replicas is None else 1) as trainer:
        trainer.fit(bags(["a"], trainer.rank, 6, blind=(2, 4), keys=60))
        return dict(enumerate(trainer.rows("a", list(range(60))).tolist()))


@pytest.mark.parametrize(
    ("replicas", "pooled_at"), [(1, "owner"), (None, "source"), (None, "owner"), ("all", "auto")], ids=str
)
def test_a_batch_that_teaches_nothing_leaves_nothing_behind_in_the_gradients(
    cluster: Cluster, replicas: int | str | None, pooled_at: str
) -> None:
    expected = cluster.run(2, rows_after_blind_batches, 1, "source")[0]
    for rows in cluster.run(2, rows_after_blind_batches, replicas, pooled_at):
        np.testing.assert_allclose(list(rows.values()), list(expected.values()), atol=1e-6)


def saved_in_on_step(case: Case, folder: str, at: int) -> str:
    trainer, features, storage = make(case)
    try:
        source = batches(features, case, trainer.rank, trainer.world)
        trainer.fit(source, on_step=lambda result: trainer.save(folder) if result.step == at else None)
        return trainer.digest()
    finally:
        close(trainer, storage)


@pytest.mark.parametrize("schedule", ["serial", "fwp"])
def test_a_save_in_the_middle_of_a_run_is_seen_by_the_next_batch(
    cluster: Cluster, schedule: str, tmp_path: Path
) -> None:
    case = Case(schedule, "disk", steps=12, micro_batches=2, replicas=2, averaged=4, overlap=0.5)
    end = cluster.run(2, saved_in_on_step, case, str(tmp_path / "saved"), 6)[0]
    assert set(cluster.run(2, functools.partial(loaded, goes_on=True), case, str(tmp_path / "saved"))) == {end}


def saved_with_replicas(folder: str) -> None:
    with small([Table("a", 4)], replicas=2) as trainer:
        trainer.fit(bags(["a"], trainer.rank, 3))
        trainer.save(folder)


def gone_on_with_auto(folder: str) -> tuple[list[int], int]:
    with small([Table("a", 4, owners="auto")]) as trainer:
        trainer.load(folder)
        trainer.fit(bags(["a"], trainer.rank, 3))
        return trainer.stores[0].owners.tolist(), trainer.table_stats()["a"].rows


def test_a_checkpoint_of_replicas_is_gone_on_with_by_owners_that_were_to_be_decided(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    cluster.run(2, saved_with_replicas, folder)
    results = cluster.run(2, gone_on_with_auto, folder)
    assert {tuple(owners) for owners, _ in results} == {(0, 1)} and results[0][1] <= 300


def looked_at_by_one() -> int:
    table = Table("a", 4, eviction=Eviction(ttl=4), sync="average", sync_every=16)
    with small([table], replicas=2) as trainer:
        look = (lambda _: trainer.stores[0].stats()) if trainer.rank == 0 else None
        trainer.fit(bags(["a"], trainer.rank, 32, keys=3000), on_step=look)
        return trainer.steps


def test_rows_past_their_time_are_averaged_by_nobody_whoever_has_looked(cluster: Cluster) -> None:
    assert cluster.run(2, looked_at_by_one) == [32, 32]


def moves(replicas: int, folder: str, steps: int, *, resumes: bool) -> list[float]:
    """How far a row moves in each step, with the same gradient everywhere."""
    optimizer = ScaledRowwiseAdagrad(lr=1.0, scale="row")
    table = Table("a", 4, optimizer=optimizer, init=Normal(0.0), sync="average")
    places = [0.0]
    with small([table], Pulled(), replicas=replicas) as trainer:
        if resumes:
            trainer.load(folder)
        places[0] = float(trainer.rows("a", [5])[0, 0])
        keys = {"a": Jagged.from_lengths(torch.tensor([5]), torch.ones(1, dtype=torch.int64))}
        for _ in range(steps):
            trainer.step(Batch(keys, {}, torch.zeros(1)))
            places.append(float(trainer.rows("a", [5])[0, 0]))
        if not resumes:
            trainer.save(folder)
    return np.abs(np.diff(places)).tolist()


class Pulled(nn.Module):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return rows["a"].sum(1)


@pytest.mark.parametrize("saved_by", [1, 2])
def test_scales_of_rows_are_right_on_another_number_of_replicas(
    cluster: Cluster, saved_by: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    cluster.run(2, functools.partial(moves, resumes=False), saved_by, folder, 50)
    one, two = (cluster.run(2, functools.partial(moves, resumes=True), replicas, folder, 3)[0] for replicas in (1, 2))
    np.testing.assert_allclose(two, one, rtol=0.02)

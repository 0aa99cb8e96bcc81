"""Replicas of tables (2D): the result is that of one replica, to rounding; replicas and schedules agree to the bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe import Batch, Feature, Jagged
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


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
@pytest.mark.parametrize("tier", ["memory", "disk"])
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
    replicas, shards = mesh
    for number, tier in enumerate(["memory", "disk"]):
        case = Case(schedule, tier, steps=12, micro_batches=3, clustering="window", delays=number, replicas=replicas)
        world = replicas * shards
        assert set(cluster.run(world, train, case)) == {serial(cluster, world, case)}

"""Saving and loading: nothing lost, nothing twice, on any number of workers; nothing half-written is ever loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Adam, Batch, Eviction, Feature, Jagged, ScaledRowwiseAdagrad, Table, Trainer
from nestpipe.checkpoint import loading, saving
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore
from tests.cluster import Cluster
from tests.kernels.cases import one_each

TABLES = [
    Table("plain", 4, optimizer=Adam(lr=0.01)),
    Table("half/odd name", 5, optimizer=Adagrad(lr=0.05), dtype=torch.bfloat16),
    Table("rare", 4, optimizer=Adagrad(lr=0.05), admit_after=3),
    Table("short", 4, optimizer=SGD(lr=0.05), eviction=Eviction(ttl=2)),
    Table("busy", 4, optimizer=Adagrad(lr=0.05), eviction=Eviction(max_rows=160, policy="lfu")),
]
FEATURES = [Feature(table.name, table.name, "sum") for table in TABLES]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.out = nn.Linear(sum(table.dim for table in TABLES), 1)
        self.tied = self.out.weight  # the same parameter under two names

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return self.out(torch.cat([rows[table.name] for table in TABLES], 1))[:, 0].square()


def make_trainer(tables: list[Table] = TABLES) -> Trainer:
    return Trainer(Model(), tables, FEATURES, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2))


def train(trainer: Trainer, first: int, last: int) -> None:
    for step in range(first, last):
        rng = np.random.default_rng([6, step, trainer.rank])
        keys = {table.name: Jagged.from_lists([rng.integers(0, 150, 3).tolist() for _ in range(8)]) for table in TABLES}
        trainer.step(Batch(keys))


def contents(trainer: Trainer) -> dict[str, Any]:
    """Everything that the stores of all workers hold, by key: each key must be there once."""
    every: dict[str, dict[str, dict[int, Any]]] = {}
    for store in trainer.stores:
        parts = {
            "rows": _by_key(store, *store.items()),
            "shared": _by_key(store, *store.shared_items()),
            "sightings": dict(zip(*(array.tolist() for array in store.sightings()), strict=True)),
        }
        merged: dict[str, dict[int, Any]] = {}
        for name, part in parts.items():
            gathered = trainer._worker.rows.gather_objects(part)
            merged[name] = {key: value for of_worker in gathered for key, value in of_worker.items()}
            assert len(merged[name]) == sum(map(len, gathered)), "a key has two owners"
        every[store.table.name] = merged
    return {"tables": every, "updates": [store.updates for store in trainer.stores], "step": trainer.steps}


def _by_key(store: MemoryStore | DiskStore, keys: np.ndarray, positions: np.ndarray) -> dict[int, bytes]:
    # Values, optimizer state and counters, as bits.
    return dict(zip(keys.tolist(), [record.tobytes() for record in store.records(positions)], strict=True))


def train_and_save(path: Path) -> dict[str, Any]:
    trainer = make_trainer()
    train(trainer, 0, 9)
    digest = trainer.digest()
    trainer.save(path)
    saved = {"contents": contents(trainer), "digest": digest, "after": trainer.digest()}
    train(trainer, 9, 14)
    return {**saved, "later": trainer.digest(), "later_contents": contents(trainer)}


def load(path: Path, go_on: bool) -> dict[str, Any]:
    trainer = make_trainer()
    trainer.load(path)
    loaded: dict[str, Any] = {"contents": contents(trainer), "digest": trainer.digest()}
    if go_on:
        train(trainer, 9, 14)
        loaded |= {"later": trainer.digest(), "later_contents": contents(trainer)}
    return loaded


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of three workers, and what was in them."""
    path = tmp_path_factory.mktemp("checkpoints") / "step-9"
    results = cluster.run(3, train_and_save, path)
    assert all(result["digest"] == results[0]["digest"] == result["after"] for result in results)
    return path, results[0]


def test_the_run_has_something_of_every_kind_to_save(saved: tuple[Path, dict[str, Any]]) -> None:
    tables = saved[1]["contents"]["tables"]
    assert all(table["rows"] for table in tables.values())
    assert tables["rare"]["shared"] and set(tables["rare"]["sightings"].values()) == {1, 2}
    assert len(tables["short"]["rows"]) < len(tables["plain"]["rows"]) and len(tables["busy"]["rows"]) > 0
    assert set(saved[1]["contents"]["updates"]) == {9}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_three_workers_saved_is_whole_on_another_number(
    cluster: Cluster, saved: tuple[Path, dict[str, Any]], world: int
) -> None:
    path, before = saved
    for loaded in cluster.run(world, load, path, False):
        assert loaded["digest"] == before["digest"]
        assert loaded["contents"] == before["contents"]


def test_training_goes_on_with_the_same_bits_on_the_same_number_of_workers(
    cluster: Cluster, saved: tuple[Path, dict[str, Any]]
) -> None:
    path, before = saved
    for loaded in cluster.run(3, load, path, True):
        assert loaded["contents"] == before["contents"]
        assert loaded["later"] == before["later"]
        # Sightings and the counters of eviction have no part in the digest.
        assert loaded["later_contents"] == before["later_contents"]


def test_only_the_finished_folder_is_there(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    names = {file.name for file in path.iterdir()}
    assert {"manifest.json", "dense.safetensors", "table-half%2Fodd%20name.2-of-3.safetensors"} <= names


def test_a_folder_without_manifest_is_not_loaded(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "manifest.json").unlink()
    nowhere = tmp_path / "nowhere"
    for path, message in ((copy, r"is not a checkpoint: it has no manifest\.json"), (nowhere, "does not exist")):
        with pytest.raises(ValueError, match=message):
            make_trainer().load(path)


def test_a_format_of_the_future_is_refused(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        make_trainer().load(copy)


def test_a_missing_file_is_an_error_and_names_it(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "table-rare.1-of-3.safetensors").unlink()
    with pytest.raises(ValueError, match=r"table-rare\.1-of-3\.safetensors cannot be read: No such file"):
        make_trainer().load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 6}, "table 'plain': dim is 6 here but 4"),
        ({"optimizer": Adagrad()}, "table 'plain': optimizer is 'Adagrad' here but 'Adam'"),
        ({"dtype": torch.bfloat16}, "table 'plain': dtype is 'torch.bfloat16' here but 'torch.float32'"),
        ({"eviction": Eviction(ttl=5)}, "table 'plain': counters"),
        ({"name": "plein"}, "has no table 'plein'"),
    ],
)
def test_a_table_declared_otherwise_is_refused(
    saved: tuple[Path, dict[str, Any]], change: dict[str, Any], message: str
) -> None:
    tables = [dataclasses.replace(TABLES[0], **change), *TABLES[1:]]
    features = [Feature(table.name, table.name, "sum") for table in tables]
    trainer = Trainer(Model(), tables, features, dense_optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match=message):
        trainer.load(saved[0])


def test_a_scale_for_each_row_is_another_state_and_another_number_is_not() -> None:
    def name(scale: Any) -> str:
        table = Table("item", 4, optimizer=ScaledRowwiseAdagrad(scale=scale))
        return saving.declared(MemoryStore(table, seed=0))["optimizer"]

    assert name("row") != name("replicas") == name(2.0) == "ScaledRowwiseAdagrad"


def test_a_trainer_that_has_trained_does_not_load(saved: tuple[Path, dict[str, Any]]) -> None:
    trainer = make_trainer()
    train(trainer, 0, 1)
    with pytest.raises(ValueError, match="has not trained yet"):
        trainer.load(saved[0])


def test_an_existing_path_is_not_overwritten(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "one")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="exists already"):
        trainer.save(tmp_path / "one")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_an_interrupted_save_left_is_neither_loaded_nor_kept(tmp_path: Path) -> None:
    partial = tmp_path / ".one.partial"
    partial.mkdir()
    (partial / "table-stale.0-of-9.safetensors").write_text("half")
    with pytest.raises(ValueError, match="not a checkpoint"):
        make_trainer().load(partial)
    make_trainer().save(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert not list((tmp_path / "one").glob("*stale*"))


def save_with_trouble(path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 0, 2)
    if trainer.rank == 1:

        def fail(**_: Any) -> None:
            raise OSError("no space left")

        trainer.stores[0].saved_blocks = fail  # type: ignore[assignment,method-assign,return-value]
    trainer.save(path)


def test_trouble_of_one_worker_ends_the_save_of_all_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    for kind, value in cluster.outcomes(2, save_with_trouble, tmp_path / "one"):
        assert kind == "failed" and value[0] == "TrainingError"
        assert "rank 1, checkpoint: OSError: no space left" in value[1]
    assert list(tmp_path.iterdir()) == []


class Bare(nn.Module):
    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return rows["bag"].square().sum(1)


def test_a_model_without_parameters_is_saved_too(tmp_path: Path) -> None:
    def make() -> Trainer:
        return Trainer(
            Bare(), [Table("bag", 3)], [Feature("bag", "bag", "sum")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
        )

    trainer, other = make(), make()
    trainer.step(Batch({"bag": Jagged.from_lists([[1, 2], [3]])}))
    trainer.save(tmp_path / "one")
    other.load(tmp_path / "one")
    assert other.digest() == trainer.digest() and other.steps == 1


def test_learning_rates_and_the_way_tables_travel_survive_and_another_seed_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 0, 2)
    trainer.scale_lr(0.25)
    trainer.save(tmp_path / "saved")
    again = make_trainer()
    again.load(tmp_path / "saved")
    assert [store.lr for store in again.stores] == [store.lr for store in trainer.stores]
    assert again._worker.ops.plan.at_owner == trainer._worker.ops.plan.at_owner
    assert again.digest() == trainer.digest()
    for trained in (trainer, again):
        train(trained, 2, 4)
    assert again.digest() == trainer.digest()
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    manifest["tables"][0]["seed"] += 1
    text = json.dumps(manifest)
    (tmp_path / "saved" / "manifest.json").write_text(text)
    (tmp_path / "saved" / "manifest.sum").write_text(f"{zlib.crc32(text.encode()):08x}\n")
    with pytest.raises(ValueError, match="seed is"):
        make_trainer().load(tmp_path / "saved")


# -- tables larger than memory ---------------------------------------------------------------------------------------


class Alone(NamedTuple):
    """As much of a Transport as a table needs to know which keys are its own."""

    rank: int = 0
    world: int = 1


def trained_on_disk(folder: Path, **settings: Any) -> DiskStore:
    table = Table(**{"name": "item", "dim": 4, "optimizer": Adagrad(lr=0.05), "tier": "disk"} | settings)
    store = DiskStore(table, seed=3, folder=folder, hot_rows=20)
    for step in range(6):
        positions = np.unique(store.resolve(np.arange(step * 20, step * 20 + 100), step))
        records = np.empty((len(positions), store.record_words), np.float32)
        store.fill(positions, records, np.arange(len(positions)))
        grads = one_each(np.full((len(positions), table.dim), step + 1, np.float32))
        store.update(np.arange(len(positions)), grads, 1.0, store.rows_in(records))
        store.write_back(positions, records)
    return store


@pytest.mark.parametrize("block_bytes", [1, 300, 8 << 20])
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": torch.bfloat16, "dim": 5}, {"admit_after": 3, "eviction": Eviction(max_rows=150)}],
    ids=["plain", "half", "rare and evicting"],
)
def test_a_table_on_disk_is_saved_and_loaded_in_blocks_into_either_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], block_bytes: int
) -> None:
    monkeypatch.setattr(loading, "BLOCK_BYTES", block_bytes)
    store = trained_on_disk(tmp_path / "one", **settings)
    saving._save_table(tmp_path / "saved", stores=[store], since=None)
    arrays = load_arrays(tmp_path / "saved")  # the library reads it
    assert sorted(arrays["keys"].tolist()) == sorted(store.items()[0].tolist())
    assert bool(len(arrays["shared"])) == bool(len(arrays["seen"])) == store.shares_rows
    in_memory = dataclasses.replace(store.table, tier="memory")
    others: list[DiskStore | MemoryStore] = [
        DiskStore(store.table, seed=3, folder=tmp_path / "two", hot_rows=20),
        MemoryStore(in_memory, seed=3),
    ]
    for other in others:
        loading._load_table(tmp_path / "saved", loading.Held(other, None, Alone()))  # type: ignore[arg-type]
        other.resume(updates=store.updates, step=5)
        assert other.digest() == store.digest()
        assert _by_key(other, *other.items()) == _by_key(store, *store.items())
        assert _by_key(other, *other.shared_items()) == _by_key(store, *store.shared_items())
        assert [a.tolist() for a in other.sightings()] == [a.tolist() for a in store.sightings()]
    parts = [MemoryStore(in_memory, seed=3, owners=np.arange(3)) for _ in range(3)]
    for rank, part in enumerate(parts):
        loading._load_table(tmp_path / "saved", loading.Held(part, None, Alone(rank, 3)))  # type: ignore[arg-type]
    sums = [sum(halves) % 2**64 for halves in zip(*(part.digest() for part in parts), strict=True)]
    assert tuple(sums) == store.digest()
    for disk_store in (store, others[0]):
        assert isinstance(disk_store, DiskStore)
        disk_store.close()


def test_saving_loading_and_digest_take_the_memory_of_a_few_blocks(tmp_path: Path) -> None:
    table = Table("item", 256, optimizer=SGD(), tier="disk")
    store = DiskStore(table, seed=3, folder=tmp_path / "one", hot_rows=2000)
    for start in range(0, 80_000, 2000):
        positions = store.resolve(np.arange(start, start + 2000), 0)
        store.write_back(positions, np.full((2000, 256), start, np.float32))
    other = DiskStore(table, seed=3, folder=tmp_path / "two", hot_rows=2000)
    tracemalloc.start()
    try:
        digest = store.digest()
        saving._save_table(tmp_path / "saved", stores=[store], since=None)
        loading._load_table(tmp_path / "saved", loading.Held(other, None, Alone()))  # type: ignore[arg-type]
        assert other.digest() == digest
        assert tracemalloc.get_traced_memory()[1] < 42_000_000 < (tmp_path / "saved").stat().st_size / 1.9
    finally:
        tracemalloc.stop()
        store.close()
        other.close()

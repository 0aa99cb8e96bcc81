"""Hot rows: every worker holds them, and nothing else changes: digests equal those without, to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe import Batch, Eviction, Feature, Jagged, Table, Trainer
from nestpipe.arena import Arena
from nestpipe.checkpoint.manifest import complete
from nestpipe.errors import TrainingError
from nestpipe.exchange.hot import HotKeys, choose, most_used
from nestpipe.exchange.mesh import Mesh
from nestpipe.exchange.plan import ExchangePlan, place, with_twins
from nestpipe.exchange.requests import Requests
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator
from nestpipe.tables import HotRows
from tests.behaviour.test_schedules import Case, batches, close, make, serial, train
from tests.cluster import Cluster


def test_the_keys_used_most_by_all_workers_are_hot() -> None:
    batch = Batch({"a": Jagged.from_lists([[5, 5, 7], [9]]), "b": Jagged.from_lists([[], [7, 5]])})
    keys, counts = most_used(batch, [Feature("a", "t"), Feature("b", "t")], 2)
    assert keys.tolist() == [5, 7, 9] and counts.tolist() == [3, 2, 1]
    others = np.array([9, 8, 4]), np.array([4, 2, 1])
    assert choose([(keys, counts), others], 3).keys.tolist() == [5, 7, 9]
    assert choose([(keys, counts), others], 2).keys.tolist() == [5, 9]
    assert choose([(keys, counts), others], 9).keys.tolist() == [5, 7, 8, 9], "a key that was used once is not hot"


def test_hot_keys_are_found_among_any_others() -> None:
    hot = HotKeys([2**62, -5, 7])
    assert hot.contains(np.array([7, 6, -5, 2**62, 0])).tolist() == [True, False, True, True, False]
    assert not HotKeys().contains(np.array([0, 1])).any()


@pytest.mark.parametrize(
    ("world", "schedule", "tier"),
    [(2, "serial", "disk"), (2, "dbp", "memory"), (2, "fwp", "disk"), (2, "nested", "memory"), (3, "nested", "disk")],
)
def test_hot_rows_change_no_bit(cluster: Cluster, world: int, schedule: str, tier: str) -> None:
    """`make grid` has more of them."""
    case = Case(schedule, tier, steps=12, micro_batches=3, delays=2, hot=12, check_freshness=True)
    assert set(cluster.run(world, train, case)) == {serial(cluster, world, dataclasses.replace(case, hot=0))}


def test_on_one_worker_no_row_is_hot(cluster: Cluster) -> None:
    case = Case("nested", steps=8, micro_batches=4, hot=12)
    assert cluster.run(1, train, case)[0] == serial(cluster, 1, dataclasses.replace(case, hot=0))


def test_without_a_window_cache_schedules_agree(cluster: Cluster) -> None:
    """(Each worker adds up its own gradients first then, so that other last bits come out than without hot rows.)"""
    case = Case("nested", steps=8, micro_batches=4, window_cache=False, hot=12)
    assert set(cluster.run(4, train, case)) == {serial(cluster, 4, case)}


def test_clustering_knows_that_hot_rows_do_not_travel_and_schedules_agree_on_it(cluster: Cluster) -> None:
    """(Another split than without hot rows, so other last bits.)"""
    case = Case("nested", steps=12, micro_batches=3, clustering="window", delays=2, hot=12)
    assert set(cluster.run(2, train, case)) == {serial(cluster, 2, case)}


def test_hot_rows_with_replicas_are_the_same_in_every_schedule(cluster: Cluster) -> None:
    case = Case("nested", "memory", steps=12, micro_batches=3, delays=1, replicas=2, hot=12)
    assert set(cluster.run(4, train, case)) == {serial(cluster, 4, case)}


def held(case: Case) -> tuple[list[Any], list[str], dict[str, int]]:
    trainer, features, folder = make(case)
    trainer.fit(batches(features, case, trainer.rank, trainer.world))
    twins = [sorted(store.items()[0].tolist()) for store in trainer.stores if isinstance(store.table, HotRows)]
    told, stats = trainer.describe(), trainer.table_stats()
    close(trainer, folder)
    return twins, told, {name: of_table.rows for name, of_table in stats.items()}


def test_every_worker_holds_the_same_hot_rows_and_they_count_once(cluster: Cluster) -> None:
    case = Case(steps=8, hot=12)
    ((twins, told, rows), *others) = cluster.run(3, held, case)
    assert all(other[0] == twins for other in others)
    assert len(twins) == 5 and all(0 < len(keys) <= 12 for keys in twins)
    assert sum("hot rows on every worker" in line for line in told) == 5
    assert rows == cluster.run(3, held, dataclasses.replace(case, hot=0))[0][2]


def saved_and_loaded(case: Case, then: Case, folder: str, changes: bool) -> tuple[str, str]:
    """The digest of a run, and of one that was saved in the middle and went on with other settings."""
    first, features, place = make(case)
    stream = list(batches(features, case, first.rank, first.world))
    if changes:
        checkpoints = first.checkpoints(folder, full_every=3)
        for part in (stream[:3], stream[3:5]):
            first.fit(iter(part))
            first.checkpoint(checkpoints)
        checkpoints.wait()
        path = str(complete(Path(folder))[0])
    else:
        first.fit(iter(stream[:5]))
        path = f"{folder}/saved"
        first.save(path)
    steps = first.steps
    first.fit(iter(stream[5:]))
    expected = first.digest()
    close(first, place)
    second, _, place = make(then)
    second.load(path)
    assert second.steps == steps
    keys = np.arange(50)
    table = second.stores[0].table.name
    before = second.rows(table, keys)
    second.fit(iter(stream[5:]))
    assert before.shape == (50, second.stores[0].table.dim)
    digest = second.digest()
    close(second, place)
    return expected, digest


@pytest.mark.parametrize(
    ("before", "after", "changes"), [(12, 12, False), (12, 12, True), (12, 0, True), (0, 12, False), (12, 30, False)]
)
def test_a_run_goes_on_from_a_checkpoint_with_or_without_hot_rows(
    cluster: Cluster, tmp_path: Path, before: int, after: int, changes: bool
) -> None:
    case = Case(steps=10, hot=before)
    then = dataclasses.replace(case, hot=after)
    for expected, digest in cluster.run(2, saved_and_loaded, case, then, str(tmp_path), changes):
        assert digest == expected


def first_batches(way: str, folder: str) -> list[list[int] | None]:
    """Hot keys after something else came before the first batch that has keys."""
    tables, features = [Table("item", 4, hot=3)], [Feature("history", "item")]

    def trainer() -> Trainer:
        return Trainer(Sum(), tables, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))

    def batch(keys: list[list[int]]) -> Batch:
        return Batch({"history": Jagged.from_lists(keys)}, labels=torch.zeros(len(keys)))

    def fails() -> Iterator[Batch]:
        if made.rank == 1:
            raise RuntimeError("no data here")
        yield batch([[90, 90], [91, 91]])

    made = trainer()
    if way == "saved before":
        made.save(f"{folder}/none")
        made = trainer()
        made.load(f"{folder}/none")
    elif way == "no keys":
        made.step(batch([[], []]))
    elif way == "a batch that fails":
        with pytest.raises(TrainingError, match="no data here"):
            made.fit(fails())
    elif way == "a batch that fails, then a checkpoint":
        other = trainer()
        other.step(batch([[1, 1], [2, 2]]))
        other.save(f"{folder}/some")
        with pytest.raises(TrainingError, match="no data here"):
            made.fit(fails())
        made.load(f"{folder}/some")
    made.step(batch([[5, 5, 6], [6, 7, 7]]))
    plan = made._worker.ops.plan
    return [None if hot is None else hot.keys.tolist() for hot in plan.hot]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: Batch, rows: dict[str, Jagged]) -> torch.Tensor:
        return (rows["history"].sum() @ self.weight) ** 2


@pytest.mark.parametrize(
    ("way", "keys"),
    [
        ("saved before", [5, 6, 7]),
        ("no keys", [5, 6, 7]),
        ("a batch that fails", [5, 6, 7]),
        ("a batch that fails, then a checkpoint", [1, 2]),
    ],
)
def test_hot_keys_are_those_of_the_first_batch_that_has_any(
    cluster: Cluster, tmp_path: Path, way: str, keys: list[int]
) -> None:
    for hot in cluster.run(2, first_batches, way, str(tmp_path)):
        assert hot[0] == keys


def test_a_checkpoint_with_hot_rows_has_a_format_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """A program from before would read each worker's file alone, and miss hot rows that another has written."""
    for hot, number in ((12, 4), (0, 3)):
        cluster.run(2, save, Case(steps=4, hot=hot), str(tmp_path / str(hot)))
        assert json.loads((tmp_path / str(hot) / "manifest.json").read_text())["format"] == number


def save(case: Case, path: str) -> str:
    trainer, features, folder = make(case)
    trainer.fit(batches(features, case, trainer.rank, trainer.world))
    trainer.save(path)
    digest = trainer.digest()
    close(trainer, folder)
    return digest


def load(case: Case, path: str) -> tuple[str, list[list[float]]]:
    trainer, _, folder = make(case)
    trainer.load(path)
    digest, rows = trainer.digest(), trainer.rows(trainer.stores[0].table.name, np.arange(40)).tolist()
    close(trainer, folder)
    return digest, rows


def test_hot_rows_are_read_on_any_number_of_workers(cluster: Cluster, tmp_path: Path) -> None:
    case = Case(steps=8, hot=12)
    digest = cluster.run(3, save, case, str(tmp_path / "saved"))[0]
    read = [
        result
        for world, hot in ((1, 12), (2, 12), (3, 12), (4, 0))
        for result in cluster.run(world, load, dataclasses.replace(case, hot=hot), str(tmp_path / "saved"))
    ]
    assert {of_worker[0] for of_worker in read} == {digest}
    assert all(of_worker[1] == read[0][1] for of_worker in read)


def test_hot_rows_are_asked_of_nobody_else() -> None:
    tables, features = with_twins([Table("item", 4, hot=2)], Mesh.flat(3)), [Feature("history", "item")]
    plan = ExchangePlan(tables, features, place(tables, features, Mesh.flat(3), 1))
    plan.hot[0] = HotKeys([7, 8])
    batch = Batch({"history": Jagged.from_lists([[1, 7, 2, 3], [], [8, 4, 7, 5, 6, 9]])})
    requests = Requests(batch, plan, Window([0, 3]), 3, Deduplicator(), Arena())
    assert requests.tables[0].keys.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert requests.tables[0].offsets.tolist() == [0, 3, 3, 7]
    assert requests.tables[1].keys.tolist() == [7, 8, 7] and requests.tables[1].offsets.tolist() == [0, 1, 1, 3]
    assert requests.rows[1].counts.tolist() == [[0, 2, 0]], "of worker 1 itself"
    assert requests.rows[0].counts.sum() == 7 and (requests.rows[0].counts > 0).sum() > 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"replicas": "all"}, "holds all of it anyway"),
        ({"sync": "average"}, "exactly together"),
        ({"pooled_at": "owner"}, "pooled at the source"),
        ({"admit_after": 2}, "admit_after=2"),
        ({"eviction": Eviction(ttl=3)}, "an eviction"),
        ({"hot": -1}, "number of keys"),
        ({"hot": True}, "number of keys"),
    ],
)
def test_what_does_not_go_together_with_hot_rows_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Table("item", 4, **{"hot": 5, **settings})

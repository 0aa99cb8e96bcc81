"""owners="auto": which tables one worker holds whole, that all workers and schedules agree on it, and that it lasts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Adagrad, Batch, Eviction, Feature, Jagged, Table, Trainer
from nestpipe.errors import TrainingError
from nestpipe.exchange.placement import EVEN, deal
from tests.cluster import Cluster

SAMPLES, KEYS, STEPS = 12, 6, 6
WHOLE = {"owners": 1, "pooled_at": "owner"}
AUTO: dict[str, Any] = {"owners": "auto"}


class Sum(nn.Module):
    def __init__(self, features: list[Feature]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.ModuleDict({f.name: nn.Linear(8, 1) for f in features})

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        total = torch.zeros(batch.size)
        for name, values in rows.items():
            if isinstance(values, Jagged):
                total = total.index_add(0, values.sample_ids(), self.out[name](values.values)[:, 0])
            else:
                total = total + self.out[name](values)[:, 0]
        return (total - batch.labels) ** 2


def declare(num_bags: int, settings: dict[str, Any]) -> tuple[list[Table], list[Feature]]:
    """Bags whose keys hardly repeat, bags of a few hot keys, and a sequence: the first are worth a worker of their own."""
    names = [*(f"bags{k}" for k in range(num_bags)), "hot", "list"]
    tables = [Table(name, 8, optimizer=Adagrad(lr=0.1), **(settings if "bags" in name else AUTO)) for name in names]
    return tables, [Feature(name, name, None if name == "list" else "sum") for name in names]


def batches(features: list[Feature], rank: int, *, first: int = 0, samples: int = SAMPLES) -> Iterator[Batch]:
    for step in range(first, STEPS):
        draw = np.random.default_rng([7, rank, step])
        keys = {}
        for feature in features:
            high = 4 if feature.name == "hot" else 3_000
            values = torch.from_numpy(draw.integers(0, high, samples * KEYS))
            keys[feature.name] = Jagged.from_lengths(values, torch.full((samples,), KEYS))
        yield Batch(keys, labels=torch.from_numpy(draw.standard_normal(samples).astype(np.float32)))


def make(num_bags: int, settings: dict[str, Any], schedule: str = "serial") -> tuple[Trainer, list[Feature]]:
    tables, features = declare(num_bags, settings)
    options: dict[str, Any] = {} if schedule == "serial" else {"schedule": schedule}
    trainer = Trainer(
        Sum(features), tables, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.01), micro_batches=3, **options
    )
    return trainer, features


def report(trainer: Trainer) -> dict[str, Any]:
    return {
        "owners": [owners.tolist() for owners in trainer._worker.ops.plan.owners],
        "held": [len(store) > 0 for store in trainer.stores],
        "told": trainer.describe(),
        "digest": trainer.digest(),
        "sent": trainer.bytes_sent(),
    }


def train(
    num_bags: int, settings: dict[str, Any], schedule: str = "serial", look_first: bool = False
) -> dict[str, Any]:
    trainer, features = make(num_bags, settings, schedule)
    if look_first:
        trainer.rows("bags0", torch.arange(50))
        trainer.evaluate(batches(features, trainer.rank, first=STEPS - 1), {})
        assert trainer._worker.ops.plan.unplaced == list(range(num_bags + 1)), "only training decides"
    trainer.fit(batches(features, trainer.rank))
    return report(trainer)


@pytest.mark.parametrize("world", [2, 3])
def test_tables_of_bags_go_to_one_worker_each_and_every_schedule_ends_in_the_bits_of_the_same_declared_by_hand(
    cluster: Cluster, world: int
) -> None:
    by_hand = cluster.run(world, train, world, WHOLE)
    spread = cluster.run(world, train, world, {})
    for schedule in ("serial", "dbp", "fwp", "nested"):
        auto = cluster.run(world, train, world, AUTO, schedule)
        owners = auto[0]["owners"]
        assert [result["owners"] for result in auto] == [owners] * world
        assert sorted(owners[:world]) == [[w] for w in range(world)]
        assert owners[world:] == [list(range(world))] * 2
        assert [[[rank] == some for some in owners[:world]] for rank in range(world)] == [
            result["held"][:world] for result in auto
        ]
        assert {result["digest"] for result in auto} == {by_hand[0]["digest"]}
    assert auto[0]["sent"] < spread[0]["sent"]
    told = auto[0]["told"]
    assert f"held by worker {owners[0][0]} [auto: first batch: " in told[0] and "pooled at the owner [as one" in told[0]
    assert "MB if one does], rows to the source" in told[world]
    assert "[auto: its rows are sent one by one" in told[world + 1]


def test_looking_up_rows_before_training_decides_nothing(cluster: Cluster) -> None:
    assert cluster.run(2, train, 2, AUTO, "nested", True)[0]["digest"] == cluster.run(2, train, 2, AUTO)[0]["digest"]


def test_a_table_that_has_no_counterpart_for_the_other_workers_stays_with_all(cluster: Cluster) -> None:
    (result, _) = cluster.run(2, train, 1, AUTO)
    assert result["owners"][0] == [0, 1]
    assert "held by workers 0, 1 [auto: first batch" in result["told"][0] and "uneven parts" in result["told"][0]
    (three, _) = cluster.run(2, train, 3, AUTO)
    assert sorted(map(len, three["owners"][:3])) == [1, 1, 2]


def test_one_worker_holds_everything_and_a_table_on_disk_stays_with_all(cluster: Cluster, tmp_path: Path) -> None:
    (alone,) = cluster.run(1, train, 2, AUTO)
    assert "held by worker 0 [auto: there is one worker]" in alone["told"][0]
    assert "[auto: a table on disk is shared by all]" in cluster.run(2, describe_disk, str(tmp_path))[0]


def describe_disk(folder: str) -> str:
    table = Table("bags0", 8, tier="disk", memory="20MB", owners="auto")
    features = [Feature("bags0", "bags0", "sum")]
    trainer = Trainer(
        Sum(features), [table], features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.01), storage=folder
    )
    told = trainer.describe()[0]
    trainer.close()
    return told


# -- what is dealt -----------------------------------------------------------------------------------------------------


def loads(*pairs: tuple[float, float]) -> dict[int, np.ndarray]:
    return {k: np.array(pair, np.float64) for k, pair in enumerate(pairs)}


NOBODY = np.zeros((2, 2))


@pytest.mark.parametrize(
    ("tables", "declared", "expected"),
    [
        (loads((5, 5), (5, 5)), NOBODY, {0: 0, 1: 1}),
        (loads((5, 5), (4, 4), (1, 1), (2, 2)), NOBODY, {0: 0, 1: 1, 2: 0, 3: 1}),
        (loads((5, 5)), NOBODY, {}),  # the other worker would have nothing
        (loads((50, 50), (5, 5), (5, 5)), NOBODY, {1: 0, 2: 1}),  # one that is too large is left out
        (loads((5, 5), (5, 5), (5, 5)), NOBODY, {0: 0, 1: 1}),  # one too many as well
        (loads((5, 90), (5, 5)), NOBODY, {}),  # as many bytes, but far more rows
        (loads((5, 5)), np.array([[5, 0], [5, 0]]), {0: 1}),  # beside one that was declared
        ({}, NOBODY, {}),
    ],
)
def test_tables_are_dealt_evenly_or_not_at_all(
    tables: dict[int, np.ndarray], declared: np.ndarray, expected: dict[int, int]
) -> None:
    assert deal(tables, declared) == expected


def test_no_worker_is_ever_dealt_more_than_a_quarter_over_its_even_part() -> None:
    draw = np.random.default_rng(3)
    dealt_any = 0
    for _ in range(300):
        world, tables = int(draw.integers(2, 9)), loads(*draw.lognormal(0, 1, (int(draw.integers(1, 30)), 2)))
        dealt = deal(tables, np.zeros((2, world)))
        has = np.zeros((2, world))
        for k, worker in dealt.items():
            has[:, worker] += tables[k]
        assert (has.max(axis=1) <= has.mean(axis=1) * EVEN + 1e-9).all()
        dealt_any += bool(dealt)
    assert dealt_any > 150


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_and_go_on(folder: str, schedule: str) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer, features = make(3, AUTO, schedule)
    trainer.save(f"{folder}/before")
    trainer.fit(batches(features, trainer.rank), steps=3)
    trainer.save(f"{folder}/saved")
    trainer.fit(batches(features, trainer.rank, first=3))
    return report(trainer), resume(f"{folder}/saved", 3, schedule)


def resume(path: str, first: int, schedule: str = "serial", settings: dict[str, Any] = AUTO) -> dict[str, Any]:
    trainer, features = make(3, settings, schedule)
    trainer.load(path)
    loaded = trainer.digest()
    trainer.fit(batches(features, trainer.rank, first=first))
    return {**report(trainer), "loaded": loaded}


@pytest.fixture(scope="module")
def saved(cluster: Cluster) -> Iterator[tuple[Path, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), cluster.run(3, save_and_go_on, folder, "nested")


def test_a_resumed_run_goes_on_with_the_same_owners_and_ends_in_the_same_bits(saved: Any) -> None:
    for whole, resumed in saved[1]:
        assert sorted(map(len, whole["owners"])) == [1, 1, 1, 3, 3]
        assert resumed["owners"] == whole["owners"] and resumed["held"] == whole["held"]
        assert resumed["digest"] == whole["digest"]
        assert "[auto: as the checkpoint says]" in resumed["told"][0]


def test_a_checkpoint_from_before_the_decision_leaves_it_open(cluster: Cluster, saved: Any) -> None:
    folder, reports = saved
    again = cluster.run(3, resume, str(folder / "before"), 0, "dbp")
    assert again[0]["owners"] == reports[0][0]["owners"] and again[0]["digest"] == reports[0][0]["digest"]


def test_with_another_number_of_workers_or_other_declarations_all_hold_what_is_loaded(
    cluster: Cluster, saved: Any
) -> None:
    folder, _ = saved
    same = cluster.run(3, resume, str(folder / "saved"), STEPS)[0]
    fewer = cluster.run(2, resume, str(folder / "saved"), 3)
    spread = cluster.run(3, resume, str(folder / "saved"), 3, "serial", {})
    assert {result["loaded"] for result in (*fewer, *spread)} == {same["loaded"]}
    assert fewer[0]["owners"] == [[0, 1]] * 5 and spread[0]["owners"] == [[0, 1, 2]] * 5
    # Pooled by one worker is no guide for how it travels best from all: that is decided anew.
    assert all("[first batch: " in line for results in (fewer, spread) for line in results[0]["told"][:3])


# -- trouble -----------------------------------------------------------------------------------------------------------


def first_batch_fails(schedule: str) -> str:
    trainer, features = make(2, AUTO, schedule)

    def source() -> Iterator[Batch]:
        if trainer.rank == 1:
            raise OSError("the feed broke")
        yield from batches(features, trainer.rank)

    with pytest.raises(TrainingError) as caught:
        trainer.fit(source())
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_a_first_batch_that_cannot_be_read_ends_all_workers(cluster: Cluster, schedule: str) -> None:
    assert all(
        "rank 1, batch 0: OSError: the feed broke" in text for text in cluster.run(2, first_batch_fails, schedule)
    )


def one_without_data() -> dict[str, Any]:
    trainer, features = make(2, AUTO)
    trainer.fit([])
    assert trainer.steps == 0 and trainer._worker.ops.plan.unplaced, "nobody had a batch: nothing to decide from"
    trainer.fit(batches(features, trainer.rank) if trainer.rank == 0 else [])
    return {**report(trainer), "steps": trainer.steps, "position": trainer.position}


def test_a_worker_without_data_takes_part_in_the_decision(cluster: Cluster) -> None:
    reports = cluster.run(2, one_without_data)
    assert [report["steps"] for report in reports] == [STEPS, STEPS]
    assert [report["position"] for report in reports] == [STEPS, 0]
    assert reports[0]["owners"] == reports[1]["owners"] and sorted(reports[0]["owners"][:2]) == [[0], [1]]


def budgets() -> list[int | None]:
    trainer, features = make(2, {**AUTO, "eviction": Eviction(max_rows=1000)})
    before = [store.directory._budget for store in trainer.stores[:2]]
    trainer.fit(batches(features, trainer.rank), steps=1)
    return [*before, *(store.directory._budget for store in trainer.stores[:2])]


def test_one_owner_has_the_whole_budget_of_rows(cluster: Cluster) -> None:
    assert cluster.run(2, budgets)[0] == [500, 500, 1000, 1000]

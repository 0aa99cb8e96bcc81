"""The dense part in a checkpoint: schedulers, learning rates that are tensors, extra state; loads that fail change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe import SGD, Batch, Eviction, Feature, Table, Trainer, TrainingError
from nestpipe.checkpoint import loading
from nestpipe.checkpoint.manifest import Damaged
from tests.cluster import Cluster
from tests.engine.test_dense import FEATURE, TABLE, Tower, batch, weights_of


def made(model: nn.Module | None = None, *, lr: Any = 0.5, tables: Any = None, **options: Any) -> Trainer:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=0.9)

    return Trainer(model or Tower(), tables or TABLE, FEATURE, dense_optimizer=sgd, **options)


def data(first: int, last: int, trainer: Trainer) -> list[Batch]:
    return [batch(step, trainer.rank, trainer.world) for step in range(first, last)]


def lr_of(trainer: Trainer) -> float:
    return float(trainer._worker.dense.optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]


def test_what_a_scheduler_of_torch_has_set_survives_a_load(tmp_path: Path) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def with_scheduler() -> tuple[Trainer, Any]:
        def sgd(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(torch.optim.SGD(parameters, 0.5))
            return optimizers[-1]

        trainer = Trainer(Tower(), TABLE, FEATURE, dense_optimizer=sgd)
        return trainer, torch.optim.lr_scheduler.StepLR(optimizers[-1], step_size=1, gamma=0.1)

    trainer, scheduler = with_scheduler()
    trainer.fit(data(0, 2, trainer), on_step=lambda _: scheduler.step())
    assert lr_of(trainer) == pytest.approx(0.005)
    trainer.save(tmp_path / "saved")
    again, _ = with_scheduler()
    again.load(tmp_path / "saved")
    assert lr_of(again) == pytest.approx(0.005)


def test_learning_rates_that_were_scaled_survive_a_load(tmp_path: Path) -> None:
    trainer = made()
    trainer.scale_lr(0.25)
    trainer.fit(data(0, 1, trainer))
    trainer.save(tmp_path / "saved")
    again = made()
    again.load(tmp_path / "saved")
    assert lr_of(again) == 0.125 and again.stores[0].lr == pytest.approx(0.1 * 0.25)
    again.scale_lr(1.0)
    assert lr_of(again) == 0.5


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_a_factor_that_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="the factor must be a number of at least 0"):
        made().scale_lr(factor)


class Counting(Tower):
    """Keeps a number of its own with the model."""

    calls = 0
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept or {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def save_and_load(folder: str) -> tuple[int, float, bool]:
    trainer = made(model := Counting(), lr=torch.tensor(0.5))
    model.calls = 7
    trainer.fit(data(0, 2, trainer))
    trainer.save(folder)
    again = made(other := Counting(), lr=torch.tensor(0.1))
    again.load(folder)
    lr = again._worker.dense.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
    assert isinstance(lr, torch.Tensor) and again.digest() == trainer.digest()
    return other.calls, float(lr), weights_of(again) == weights_of(trainer)


def test_extra_state_and_a_learning_rate_that_is_a_tensor_are_saved(cluster: Cluster, tmp_path: Path) -> None:
    for world in (1, 2):
        assert cluster.run(world, save_and_load, str(tmp_path / str(world))) == [(7, 0.5, True)] * world


def save_what_cannot_be(folder: str, kept: Any) -> list[str]:
    trainer = made(model := Counting())
    model.kept = kept
    told = []
    background = trainer.checkpoints(folder)
    trainer.checkpoint(background)  # tells, and goes on
    background.wait()
    try:
        trainer.save(folder + "-final")
    except TrainingError as error:
        told.append(str(error))
    return [*told, str(sorted(path.name for path in Path(folder).glob("*")))]


@pytest.mark.parametrize(
    ("kept", "what"),
    [({1, 2}, "a set"), ({"a": [{1: 2}]}, "a key 1"), ({"a": (1, 2)}, "a tuple"), ({"a": 1, 2: 3}, "a key 2")],
)
def test_extra_state_that_would_not_come_back_as_it_is_is_refused_on_every_rank(
    cluster: Cluster, tmp_path: Path, kept: Any, what: str
) -> None:
    for told in cluster.run(2, save_what_cannot_be, str(tmp_path / "folder"), kept):
        assert f"rank 0, checkpoint: the model's _extra_state ({what})" in told[0] and "what JSON holds" in told[0]
        assert told[1] == "[]"


def test_extra_state_that_has_no_digest_is_told() -> None:
    trainer = made(model := Counting())
    model.kept = {"a": 1, 2: 3}
    with pytest.raises(ValueError, match=r"the model's _extra_state has no digest .*get_extra_state"):
        trainer.digest()


# -- all or nothing ----------------------------------------------------------------------------------------------------


def load_that_fails(folder: str, tier: str) -> list[Any]:
    """Reading the rows fails on one rank, after the first table is there; then the same trainer loads it after all."""
    tables = [Table("item", 4, optimizer=SGD(lr=0.1), tier=tier), Table("tag", 4, tier=tier)]
    features = [*FEATURE, Feature("tag", "tag", "sum")]

    def trainer_of(storage: str) -> Trainer:
        return Trainer(
            Tower(),
            tables,
            features,
            dense_optimizer=lambda p: torch.optim.Adam(p, 0.1),
            storage=Path(folder) / storage,
        )

    def tagged(trainer: Trainer, first: int, last: int) -> list[Batch]:
        batches = data(first, last, trainer)
        return [Batch({**b.keys, "tag": b.keys["item"]}, {}, b.labels) for b in batches]

    trainer = trainer_of("one")
    trainer.fit(tagged(trainer, 0, 3))
    trainer.save(Path(folder) / "saved")
    again = trainer_of("two")
    again.scale_lr(0.25)
    checkpoints = again.checkpoints(Path(folder) / "checkpoints", full_every=3)
    before, load_table, calls = weights_of(again), loading._load_table, 0

    def fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        load_table(*args)
        if again.rank == again.world - 1 and calls == 2:
            raise OSError("the disk is gone")

    loading._load_table = fails
    try:
        again.load(Path(folder) / "saved")
        told = ""
    except TrainingError as error:
        told = str(error)
    finally:
        loading._load_table = load_table
    unchanged = weights_of(again) == before and all(stats.rows == 0 for stats in again.table_stats().values())
    unchanged &= all(store.lr == store.table.optimizer.lr * 0.25 and store.tracks_changes for store in again.stores)
    checkpoints.close()
    again.load(Path(folder) / "saved")
    result = [told, unchanged, again.digest() == trainer.digest()]
    trainer.close()
    again.close()
    return result


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_load_that_fails_leaves_the_trainer_as_it_was(cluster: Cluster, tmp_path: Path, tier: str) -> None:
    for world in (1, 2):
        for told, unchanged, same in cluster.run(world, load_that_fails, str(tmp_path / f"{world}"), tier):
            assert f"rank {world - 1}, checkpoint: OSError: the disk is gone" in told
            assert unchanged and same


class Refusing(Counting):
    """Fails on the last rank when it gets its extra state, which torch gives it after its weights."""

    refuses = False

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if self.refuses:
            raise KeyError("no such thing")


class StubbornSGD(torch.optim.SGD):
    refuses = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.refuses:
            raise OSError("of no use")


def load_what_fails(folder: str, where: str) -> list[Any]:
    optimizers: list[Any] = []

    def stubborn(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(StubbornSGD(parameters, 0.5, momentum=0.9))
        return optimizers[-1]

    trainer = Trainer(first := Refusing(), TABLE, FEATURE, dense_optimizer=stubborn)
    first.calls = 7
    trainer.scale_lr(0.25)
    trainer.fit(data(0, 2, trainer))
    trainer.save(folder)
    again = Trainer(model := Refusing(), TABLE, FEATURE, dense_optimizer=stubborn)
    before, generator, is_last = again.digest(), torch.get_rng_state(), again.rank == again.world - 1
    read_dense, read_states = loading._read_dense, loading.base64.b64decode

    def fails(*_: Any) -> Any:
        raise OSError("of no use")

    if is_last and where == "reading":
        loading._read_dense = fails
    if is_last and where == "generator":
        loading.base64.b64decode = lambda text: b"short"  # type: ignore[assignment]
    model.refuses, optimizers[-1].refuses = is_last and where == "model", is_last and where == "optimizer"
    try:
        again.load(folder)
        told = "loaded"
    except (TrainingError, ValueError) as error:
        told = str(error)
    finally:
        loading._read_dense, loading.base64.b64decode = read_dense, read_states
        model.refuses = optimizers[-1].refuses = False
    unchanged = again.digest() == before and model.calls == 0 and lr_of(again) == 0.5 and not optimizers[-1].state
    unchanged &= torch.equal(torch.get_rng_state(), generator)
    again.load(folder)
    return [told, unchanged, again.digest() == trainer.digest() and model.calls == 7 and lr_of(again) == 0.125]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reading", "checkpoint: OSError: of no use"),
        ("generator", "the random state of the checkpoint is of another version of torch"),
        ("model", "checkpoint: KeyError: 'no such thing'"),
        ("optimizer", "checkpoint: OSError: of no use"),
    ],
)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(
    cluster: Cluster, tmp_path: Path, where: str, message: str
) -> None:
    for world in (1, 2):
        for told, unchanged, same in cluster.run(world, load_what_fails, str(tmp_path / f"{world}"), where):
            assert message in told and unchanged and same


def test_a_trainer_whose_first_batch_failed_is_not_loaded_into(tmp_path: Path) -> None:
    trainer = made()
    trainer.fit(data(0, 1, trainer))
    trainer.save(tmp_path / "saved")
    for tables in (TABLE, [Table("item", 4, optimizer=SGD(lr=0.1), eviction=Eviction(max_rows=99))]):
        again = made(tables=tables)
        bad = batch(0, 0, 1)
        bad.labels[0] = 3e38  # type: ignore[index]
        with pytest.raises(TrainingError, match="the loss of sample 0"):
            again.fit([bad])
        with pytest.raises(ValueError, match="but has rows already"):
            again.load(tmp_path / "saved")


def test_an_optimizer_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    trainer = made()
    trainer.save(tmp_path / "saved")
    model = Tower()

    def in_groups(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model.below.parameters()}, {"params": model.above.parameters()}], 0.1)

    again = Trainer(model, TABLE, FEATURE, dense_optimizer=in_groups)
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, the one here has \[2, 2\]") as caught:
        again.load(tmp_path / "saved")
    assert not isinstance(caught.value, Damaged)

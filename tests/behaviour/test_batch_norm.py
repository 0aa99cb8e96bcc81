"""Batch norm: statistics of the samples of all workers, the same on each; refused where that cannot be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Normal, Table, Trainer
from nestpipe.errors import TrainingError
from nestpipe.models import SyncBatchNorm
from tests.cluster import Cluster

DIM, ITEMS, SIZE, STEPS, LR, DENSE_LR = 5, 30, 16, 6, 0.3, 0.1


class Normed(nn.Module):
    """Two batch norms, one of them on three dimensions; `trouble` comes on one rank in one step."""

    def __init__(self, *, trouble: str = "", rank: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(DIM), nn.BatchNorm1d(4, momentum=None)
        self.middle, self.out = nn.Linear(DIM, 12), nn.Linear(12, 1)
        self.trouble, self.rank = trouble, rank

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        trouble = self.trouble if self.rank == 1 and float(batch.dense["step"][0]) == 2 else ""
        x = rows["item"]
        if trouble == "not finite":
            x = x * torch.tensor([torch.nan] + [1.0] * (batch.size - 1))[:, None]
        x = self.middle(self.first(x)).relu()
        if trouble == "failure":
            raise RuntimeError("in the middle")
        if trouble != "leaves one out":
            x = self.second(x.view(-1, 4, 3)).reshape(-1, 12)
        if trouble == "failure in the backward":
            x.register_hook(fail)
        if trouble == "a gradient that is not finite":
            x = x + (0 * x.sum(1, keepdim=True)).sqrt()
        losses = (self.out(x)[:, 0] - batch.labels).square()
        return losses / 0 if trouble == "bad loss" else losses


def fail(grad: Tensor) -> None:
    raise RuntimeError("on the way back")


def samples(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    keys = torch.randint(0, ITEMS, (SIZE,), generator=draw)
    return keys, torch.randn(SIZE, generator=draw)


def batches(rank: int, world: int, *, uneven: bool = False) -> Iterator[Batch]:
    for step in range(STEPS):
        keys, labels = samples(step)
        cut = [5, 0, 11][step % 3] if uneven else SIZE // 2
        mine = slice(0, SIZE) if world == 1 else slice(0, cut) if rank == 0 else slice(cut, SIZE)
        each = torch.ones(len(keys[mine]), dtype=torch.int64)
        dense = {"step": torch.full((len(each),), float(step))}
        yield Batch({"item": Jagged.from_lengths(keys[mine], each)}, dense, labels=labels[mine])


def make(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(
        model,
        [Table("item", DIM, optimizer=SGD(lr=LR), init=Normal(1.0))],
        [Feature("item", "item", "sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, DENSE_LR),
        **options,
    )


def seeded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return SyncBatchNorm.convert(Normed(**options))


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    rows = {"rows": trainer.rows("item", torch.arange(ITEMS)).numpy().copy()}
    return {**{name: value.numpy().copy() for name, value in trainer.model.state_dict().items()}, **rows}


def train(schedule: str, uneven: bool) -> tuple[str, list[float], dict[str, np.ndarray]]:
    losses: list[float] = []
    with make(seeded(), schedule=schedule) as trainer:
        trainer.fit(
            batches(trainer.rank, trainer.world, uneven=uneven), on_step=lambda result: losses.append(result.loss)
        )
        return trainer.digest(), losses, state(trainer)


def plain() -> tuple[list[float], dict[str, np.ndarray]]:
    """The same with torch's own batch norms, in one process, with nothing of ours."""
    torch.manual_seed(0)
    model = Normed()
    with make(copy.deepcopy(model)) as trainer:
        table = nn.Embedding.from_pretrained(trainer.rows("item", torch.arange(ITEMS)).clone(), freeze=False)
    optimizers = [torch.optim.SGD(table.parameters(), LR), torch.optim.SGD(model.parameters(), DENSE_LR)]
    losses = []
    for step, batch in enumerate(batches(0, 1)):
        loss = model(batch, {"item": table(samples(step)[0])}).mean()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    numbers = {name: value.numpy() for name, value in model.state_dict().items()}
    return losses, {**numbers, "rows": table.weight.detach().numpy()}


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "uneven"), [(1, False), (2, False), (2, True)])
def test_it_equals_torchs_batch_norm_of_one_process(cluster: Cluster, world: int, uneven: bool) -> None:
    losses, expected = plain()
    results = cluster.run(world, train, "serial", uneven)
    for digest, our_losses, ours in results:
        np.testing.assert_allclose(our_losses, losses, atol=1e-6)
        assert set(ours) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(ours[name], values, atol=2e-6, err_msg=name)
            np.testing.assert_array_equal(ours[name], results[0][2][name], err_msg=name)  # the same bits on every rank
        assert digest == results[0][0]


@pytest.mark.parametrize("uneven", [False, True])
def test_every_schedule_gives_the_same_bits(cluster: Cluster, uneven: bool) -> None:
    digests = {cluster.run(2, train, schedule, uneven)[0][0] for schedule in ("serial", "dbp", "fwp", "nested")}
    assert len(digests) == 1


def train_in_two(folder: str) -> tuple[str, str, float, float]:
    with make(seeded(), schedule="nested") as whole:
        whole.fit(batches(whole.rank, whole.world))
        expected = whole.digest()
        loss = whole.evaluate(batches(whole.rank, whole.world), {})["loss"]
        assert whole.digest() == expected  # evaluation reads running statistics and changes none
    with make(seeded(), schedule="nested") as first:
        first.fit(batches(first.rank, first.world), steps=2)
        first.save(folder)
    with make(seeded(), schedule="nested") as second:
        second.load(folder)
        second.fit(itertools.islice(batches(second.rank, second.world), 2, None))
        return expected, second.digest(), loss, second.evaluate(batches(second.rank, second.world), {})["loss"]


def test_running_statistics_are_saved_and_a_run_goes_on_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    expected, resumed, loss, again = cluster.run(2, train_in_two, str(tmp_path / "saved"))[0]
    assert resumed == expected and loss == again


# -- trouble -----------------------------------------------------------------------------------------------------------


def in_trouble(trouble: str, schedule: str, on_nonfinite: str) -> tuple[str, int, int, bool]:
    rank = torch.distributed.get_rank()
    with make(seeded(trouble=trouble, rank=rank), schedule=schedule, on_nonfinite=on_nonfinite) as trainer:
        message = ""
        try:
            trainer.fit(batches(rank, 2))
        except TrainingError as error:
            message = str(error)
        finite = all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
        return message, trainer.steps, trainer.skipped, finite


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("failure", "rank 1, batch 2: RuntimeError: in the middle"),
        ("failure in the backward", "rank 1, batch 2: RuntimeError: on the way back"),
        ("not finite", "rank 1, batch 2: a value that comes to batch norm 'first' is not finite"),
        (
            "a gradient that is not finite",
            "rank 1, batch 2: a gradient that comes to batch norm 'second' is not finite",
        ),
        ("bad loss", "rank 1, batch 2: the loss of sample 0 is inf"),
        ("leaves one out", "rank 0: second, forward; rank 1: done"),
    ],
)
@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_trouble_of_one_worker_ends_all_with_its_cause(
    cluster: Cluster, schedule: str, trouble: str, told: str
) -> None:
    (message, steps, _, finite), other = cluster.run(2, in_trouble, trouble, schedule, "raise")
    assert other[0] == message and steps == other[1] == 2 and finite
    assert told in message
    assert message.startswith("rank 0") == (trouble == "leaves one out")


@pytest.mark.parametrize("trouble", ["not finite", "bad loss", "a gradient that is not finite"])
def test_a_batch_that_is_not_finite_on_one_worker_is_skipped_on_all_and_spoils_no_statistics(
    cluster: Cluster, trouble: str
) -> None:
    assert cluster.run(2, in_trouble, trouble, "nested", "skip") == [("", STEPS, 1, True)] * 2


# -- refused, and not --------------------------------------------------------------------------------------------------


def test_one_that_trains_is_refused_with_micro_batches_and_a_frozen_one_is_not() -> None:
    with pytest.raises(ValueError, match=r"first is a batch norm.*micro_batches=1.*LayerNorm.*eval\(\)"):
        make(seeded(), micro_batches=2)
    model = seeded()
    model.first.eval()
    model.second.eval()
    with make(model, micro_batches=2) as trainer:
        before = model.first.running_mean.clone()
        trainer.fit(batches(0, 1))
        assert torch.equal(model.first.running_mean, before)
        model.first.train()
        with pytest.raises(TrainingError, match="first is a batch norm"):
            trainer.fit(batches(0, 1))


def refused_on_several() -> str:
    with pytest.raises(ValueError, match="first is a batch norm") as told:
        make(Normed())
    return str(told.value)


def test_torchs_own_is_refused_on_several_workers_with_what_to_write_instead(cluster: Cluster) -> None:
    assert "nestpipe.models.SyncBatchNorm.convert(model)" in cluster.run(2, refused_on_several)[0]


def test_converting_keeps_names_parameters_and_settings() -> None:
    plain = Normed()
    plain.second.eval()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    weight = plain.first.weight
    model = SyncBatchNorm.convert(plain)
    assert isinstance(model.first, SyncBatchNorm) and model.first.weight is weight
    assert not model.second.training and model.second.momentum is None
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert SyncBatchNorm.convert(model) is model and model.first is SyncBatchNorm.convert(model).first


def test_outside_of_training_it_is_torchs_own() -> None:
    x = torch.randn(7, DIM)
    ours, theirs = SyncBatchNorm(DIM), nn.BatchNorm1d(DIM)
    np.testing.assert_array_equal(ours(x).detach(), theirs(x).detach())
    with make(seeded()) as trainer:
        trainer.fit(batches(0, 1))
        copied = copy.deepcopy(trainer.model)  # it meets nobody
        copied.train()
        copied(next(batches(0, 1)), {"item": torch.randn(SIZE, DIM)})

"""Losses that mix samples: what is declared is refused, what is not is found."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer

TABLES = [Table("item", 4, optimizer=SGD(lr=0.1))]
FEATURES = [Feature("item", "item", "sum"), Feature("list", "item")]


class Alone(nn.Module):
    """Every sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        total = self.out(rows["item"])[:, 0]
        return total.index_add(0, rows["list"].sample_ids(), rows["list"].values.sum(1)) ** 2


class InBatchNegatives(Alone):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        scores = rows["item"] @ rows["item"].T + self.out.weight.sum()
        return nn.functional.cross_entropy(scores, torch.arange(batch.size), reduction="none")


class Declared(InBatchNegatives):
    mixes_samples = True


class MeantSo(InBatchNegatives):
    mixes_samples = False


class Noisy(Alone):
    """Draws in its forward: two runs of it differ, whatever the samples."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, rows) + torch.rand(batch.size)


class Dropped(Alone):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, {**rows, "item": nn.functional.dropout(rows["item"], 0.5, self.training)})


def trainer_of(model: nn.Module, **options: Any) -> Trainer:
    options.setdefault("micro_batches", 2)
    return Trainer(model, TABLES, FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)


def batch() -> Batch:
    keys = Jagged.from_lists([[1, 2], [3], [4, 5], [6], [7], [8, 1], [2], [9]])
    return Batch({"item": keys, "list": keys})


@pytest.mark.parametrize("micro_batches", [2, "auto"])
def test_a_declared_mix_is_refused_where_the_batch_is_split(micro_batches: int | str) -> None:
    with pytest.raises(ValueError, match=r"mixes_samples = True.*use micro_batches=1"):
        trainer_of(Declared(), micro_batches=micro_batches)


def test_a_declared_mix_trains_with_one_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(Declared(), micro_batches=1, schedule="dbp").fit([batch()] * 3).steps == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "micro_batches", "warned"),
    [
        (InBatchNegatives, 2, True),
        (InBatchNegatives, 1, False),
        (MeantSo, 2, False),
        (Alone, 2, False),
        (Dropped, 2, False),
        (Noisy, 2, False),
    ],
)
def test_an_undeclared_mix_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, kind: type[nn.Module], micro_batches: int, warned: bool
) -> None:
    trainer_of(kind(), micro_batches=micro_batches).fit([batch()] * 3)
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(texts) == warned
    assert all("depends on the other samples" in text and "mixes_samples = False" in text for text in texts)


def test_looking_for_a_mix_changes_nothing() -> None:
    """Not the random numbers that training draws, nor whether the model is in training."""

    def trained(model: nn.Module) -> str:
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        trainer = trainer_of(model)
        trainer.fit([batch()] * 3)
        return trainer.digest()

    class Trusted(Dropped):
        mixes_samples = False

    assert trained(Dropped()) == trained(Trusted())

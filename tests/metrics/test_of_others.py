"""Metrics of torchmetrics, and of one's own without a word of workers: the number of all workers' samples, on each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Output, Table, Trainer, TrainingError
from nestpipe.metrics import AUC, GAUC, LogLoss
from tests.cluster import Cluster

SIZE = 60


class Given(nn.Module):
    """Predicts what the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        return Output(rows["user"].sum(1) + self.weight, predictions=batch.dense["prediction"])


class Mean:
    """Of predictions of clicked samples; knows nothing of workers."""

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.sum += float(predictions[labels == 1].sum())
        self.count += int((labels == 1).sum())

    def compute(self) -> float:
        return self.sum / self.count


def everything() -> Batch:
    draw = torch.Generator().manual_seed(3)
    users = torch.randint(0, 7, (SIZE,), generator=draw)
    predictions = (torch.rand(SIZE, generator=draw) * 20).round() / 20
    labels = (torch.rand(SIZE, generator=draw) < 0.3 + 0.4 * predictions).float()
    keys = Jagged.from_lengths(users, torch.ones(SIZE, dtype=torch.int64))
    return Batch({"user": keys}, {"prediction": predictions, "group": users}, labels)


def make() -> Trainer:
    return Trainer(
        Given(),
        [Table("user", 2)],
        [Feature("user", "user", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )


def judge() -> dict[str, float]:
    """Of several workers the last has no samples."""
    with make() as trainer:
        workers, batch = max(1, trainer.world - 1), everything()
        cut = [SIZE * min(rank, workers) // workers for rank in (trainer.rank, trainer.rank + 1)]
        mine = batch.slice(*cut)
        batches = [mine.slice(start, min(start + 9, mine.size)) for start in range(0, mine.size, 9)]
        metrics = {
            "AUROC": torchmetrics.AUROC("binary"),
            "accuracy": torchmetrics.classification.BinaryAccuracy(),
            "precision": torchmetrics.classification.BinaryAveragePrecision(),
            "error": torchmetrics.MeanSquaredError(),
            "mean": Mean(),
            "AUC": AUC(),
            "LogLoss": LogLoss(),
            "by feature": GAUC("user"),
            "by input": GAUC("group"),
        }
        trainer.evaluate(batches, metrics)
        return trainer.evaluate(batches, metrics)  # they are reset


def test_metrics_of_others_are_of_all_workers(cluster: Cluster) -> None:
    batch = everything()
    predictions, labels = batch.dense["prediction"], batch.labels
    assert isinstance(predictions, Tensor) and isinstance(labels, Tensor)
    positive, negative = predictions[labels == 1], predictions[labels == 0]
    won = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    expected = {
        "AUROC": float(won) / (len(positive) * len(negative)),
        "accuracy": float(((predictions > 0.5).float() == labels).float().mean()),
        "error": float(((predictions - labels) ** 2).mean()),
        "mean": float(positive.mean()),
    }
    (alone,) = cluster.run(1, judge)
    assert alone["by feature"] == alone["by input"] != alone["AUC"] == pytest.approx(alone["AUROC"], rel=1e-6)
    for of_worker in (alone, *cluster.run(3, judge)):
        assert of_worker == pytest.approx(alone, rel=1e-6)
        assert {name: of_worker[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert of_worker["by feature"] == alone["by feature"]


def test_what_is_no_number_and_what_is_no_group_are_told() -> None:
    batch = everything()
    with make() as trainer:
        with pytest.raises(ValueError, match=r"metric 'ROC' .* takes one number of each metric"):
            trainer.evaluate([batch], {"ROC": torchmetrics.ROC("binary")})
        with pytest.raises(TrainingError, match=r"group 'usr' of the batch, .*did you mean 'user'"):
            trainer.evaluate([batch], {"GAUC": GAUC("usr")})
        with pytest.raises(TrainingError, match=r"batch.dense\['prediction'\] must be whole numbers \[B\]"):
            trainer.evaluate([batch], {"GAUC": GAUC("prediction")})
        batch.keys["user"] = Jagged.from_lists([[1, 2], *([[3]] * (SIZE - 1))])
        with pytest.raises(TrainingError, match="sample 0 has 2 keys of 'user'; a group is one key per sample"):
            trainer.evaluate([batch], {"GAUC": GAUC("user")})


class Judge:
    """Knows nothing of workers; keeps what it is fed."""

    def __init__(self, **asks: Any) -> None:
        vars(self).update(asks)
        self.fed: list[Any] = []

    def reset(self) -> None:
        self.fed = []

    def update(self, *given: Any) -> None:
        self.fed.append(given)

    def compute(self) -> float:
        return float(len(self.fed))


class Lists(nn.Module):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        assert isinstance(batch.labels, Jagged)
        return Output(rows["user"].mean()[:, 0], predictions=batch.labels.like(0.5 * batch.labels.values))


def fed_with_lists_and_groups() -> list[Any]:
    """One batch for each worker, of as many samples as its rank and one more."""
    with Trainer(
        Lists(), [Table("user", 2)], [Feature("user", "user")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    ) as trainer:
        size, rank = trainer.rank + 1, trainer.rank
        keys = Jagged.from_lists([[7, 7]] * size)
        labels = Jagged.from_lists([[float(rank), 0.0, 1.0]] * size, dtype=torch.float32)
        batch = Batch({"user": keys}, {"who": torch.full((size,), 10 + rank)}, labels)
        metrics = {"lists": Judge(takes_lists=True), "plain": Judge(), "groups": Judge(group="who")}
        trainer.evaluate([batch], metrics)
        return [metric.fed for metric in metrics.values()]


def test_metrics_of_others_get_lists_and_groups_where_they_ask_for_them(cluster: Cluster) -> None:
    for lists, plain, groups in cluster.run(3, fed_with_lists_and_groups):
        assert [labels.to_lists() for _, labels in lists] == [[[r, 0.0, 1.0]] * (r + 1) for r in range(3)]
        assert [scores.to_lists() for scores, _ in lists] == [[[r / 2, 0.0, 0.5]] * (r + 1) for r in range(3)]
        assert [labels.tolist() for _, labels in plain] == [[r, 0.0, 1.0] * (r + 1) for r in range(3)]
        assert [given[2].tolist() for given in groups] == [[10 + r] * 3 * (r + 1) for r in range(3)]
        # Ratings stay what they are, also those of a worker that has only 0 and 1.
        assert {labels.dtype for _, labels in plain} == {torch.float32}

"""A model with a table of every kind, trained a little, and what its trainer says: what a bundle must say too, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Adam, Batch, Bundle, Eviction, Feature, Jagged, Normal, Output, Table, Uniform

if TYPE_CHECKING:  # a plain process that imports this must not have it
    from nestpipe import Trainer

TABLES = [
    Table("plain", 4, optimizer=Adam(lr=0.05), init=Uniform(-0.5, 0.5)),
    Table("half/odd name", 5, optimizer=Adagrad(lr=0.1), dtype=torch.bfloat16, init=Normal(0.3)),
    Table("rare", 4, optimizer=Adagrad(lr=0.1), admit_after=3, init=Normal(0.3)),
    Table("short", 4, optimizer=SGD(lr=0.5), eviction=Eviction(ttl=2)),
    Table("disk", 6, optimizer=SGD(lr=0.5), tier="disk", memory="8MB", eviction=Eviction(max_rows=120)),
]
FEATURES = [
    Feature("sum", "plain", "sum"),
    Feature("mean", "plain", "mean"),
    Feature("half", "half/odd name", "mean"),
    Feature("rare", "rare", "sum"),
    Feature("short", "short", "sum"),
    Feature("sequence", "disk"),
]
NAMES = [table.name for table in TABLES]
# Keys that were trained on, that nearly were, that never were; the ends of int64.
KEYS = torch.tensor([*range(-20, 230), 2**63 - 1, -(2**63), 2**40])


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.out = nn.Linear(4 + 4 + 5 + 4 + 4 + 6, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        logits_B = self.out(torch.cat([self._vector(rows[feature.name]) for feature in FEATURES], 1))[:, 0]
        labels_B = torch.zeros_like(logits_B) if batch.labels is None else batch.labels
        losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return Output(losses_B, predictions=logits_B.detach())

    @staticmethod
    def _vector(rows: Tensor | Jagged) -> Tensor:
        return rows.mean() if isinstance(rows, Jagged) else rows


def make_trainer(storage: Path, tables: Sequence[Table] = TABLES) -> Trainer:
    from nestpipe import Trainer

    return Trainer(Ranker(), tables, FEATURES, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2), storage=storage)


def make_batch(seed: int, *, size: int = 16) -> Batch:
    """Keys 0 to 149 and a few at the ends of int64, with lists that are empty; weights at two of the features."""
    rng = np.random.default_rng([8, seed])
    keys = {}
    for feature in FEATURES:
        lengths = rng.integers(0, 5, size)
        values = rng.integers(0, 150, lengths.sum())
        values[rng.random(len(values)) < 0.02] = rng.choice([-(2**63), 2**63 - 1, -7])
        weights = torch.from_numpy(rng.random(len(values))) if feature.name in ("sum", "mean") else None
        keys[feature.name] = Jagged.from_lengths(torch.from_numpy(values), torch.from_numpy(lengths), weights)
    return Batch(keys, labels=torch.from_numpy(rng.integers(0, 2, size)).float())


def train(trainer: Trainer, first: int, last: int) -> None:
    for step in range(first, last):
        trainer.step(make_batch(step))


# With keys of the training, and of batches that come after it.
JUDGED = [make_batch(seed, size=size) for seed, size in ((2, 16), (300, 33), (301, 1))]


class Kept:
    """A metric that keeps the predictions."""

    def __init__(self) -> None:
        self.predictions: list[Tensor] = []

    def reset(self) -> None:
        self.predictions = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.predictions.append(predictions.clone())

    def compute(self, group: Any = None) -> float:
        return 0.0


def evaluated(trainer: Trainer, batches: list[Batch]) -> list[Tensor]:
    kept = Kept()
    trainer.evaluate(batches, {"kept": kept})
    return kept.predictions


def said_by(trainer: Trainer) -> dict[str, Any]:
    """What a bundle of it must say."""
    return {
        "predictions": evaluated(trainer, JUDGED),
        "rows": {name: trainer.rows(name, KEYS).clone() for name in NAMES},
        "num_keys": {name: stats.rows for name, stats in trainer.table_stats().items()},
    }


def assert_says(bundle: Bundle, expected: dict[str, Any]) -> None:
    for batch, predictions in zip(JUDGED, expected["predictions"], strict=True):
        assert torch.equal(bundle.predict(batch), predictions)
    for name in NAMES:
        assert torch.equal(bundle.rows(name, KEYS), expected["rows"][name]), name
        assert bundle.num_keys(name) == expected["num_keys"][name], name


class Exported(NamedTuple):
    """checkpoints: of steps 6, 8 and 11, full, incremental and incremental. bundles: of the first, and deltas one on the other.
    said: by the trainer at each of these."""

    checkpoints: list[Path]
    bundles: list[Path]
    said: list[dict[str, Any]]


def export_all(folder: Path) -> Exported:
    from nestpipe.export import export_bundle

    checkpoints, bundles, said = [], [], []
    with make_trainer(folder / "storage") as trainer:
        saving = trainer.checkpoints(folder / "checkpoints", keep=3, full_every=3)
        for first, last in ((0, 6), (6, 8), (8, 11)):
            train(trainer, first, last)
            said.append(said_by(trainer))
            trainer.checkpoint(saving)
            saving.wait()
            checkpoints.append(folder / "checkpoints" / f"step-{last:09d}")
    for number, checkpoint in enumerate(checkpoints):
        bundles.append(folder / f"bundle-{number}")
        export_bundle(checkpoint, bundles[-1], since=bundles[-2] if number else None)
    return Exported(checkpoints, bundles, said)

"""A ranker in one file: `python examples/script.py`, or on two workers `torchrun --nproc-per-node 2 examples/script.py`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nestpipe import Batch, Feature, Jagged, LRSchedule, Output, RowwiseAdagrad, Table, Trainer
from nestpipe.metrics import AUC

tables = [
    Table("item", dim=64, optimizer=RowwiseAdagrad(lr=0.05)),
    Table("user", dim=32, optimizer=RowwiseAdagrad(lr=0.05)),
]
features = [
    Feature("history", table="item"),  # a sequence: one row per key
    Feature("liked", table="item", pooling="sum"),  # a bag: one pooled vector per sample
    Feature("user", table="user", pooling="sum"),
]


class Ranker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64 + 32, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        history = rows["history"].mean()  # [B, 64], of each sample by itself
        match = history * rows["liked"]
        logits = self.out(torch.cat([match, rows["user"]], 1))[:, 0] + match.sum(1)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return Output(losses, predictions=torch.sigmoid(logits))


def clicks(rank: int, *, steps: int, size: int = 256) -> Iterator[Batch]:
    """Users like items of their own parity; stands for your data."""
    draw = np.random.default_rng(rank)
    for _ in range(steps):
        user = draw.integers(0, 5_000, size)
        item = draw.integers(0, 2_000, size)
        history = (draw.integers(0, 1_000, (size, 8)) * 2 + user[:, None] % 2).reshape(-1)
        yield Batch(
            keys={
                "history": Jagged.from_lengths(torch.from_numpy(history), torch.full((size,), 8)),
                "liked": Jagged.from_lengths(torch.from_numpy(item), torch.ones(size, dtype=torch.int64)),
                "user": Jagged.from_lengths(torch.from_numpy(user), torch.ones(size, dtype=torch.int64)),
            },
            labels=torch.from_numpy((user + item) % 2 == 0).float(),
        )


def main() -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        Ranker(),
        tables,
        features,
        dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3),
        lr_schedule=LRSchedule(warmup=20),
        clip_norm=10.0,
        schedule="nested",
        micro_batches=2,
    )
    result = trainer.fit(clicks(trainer.rank, steps=300))
    metrics = trainer.evaluate(clicks(1000 + trainer.rank, steps=10), {"AUC": AUC()})
    scores = trainer.predict(clicks(1000 + trainer.rank, steps=1))  # of this worker's samples, in their order
    stats = trainer.table_stats()
    if trainer.rank == 0:
        print(f"loss {result.first_loss:.3f} -> {result.last_loss:.3f}, AUC {metrics['AUC']:.3f}")
        print(f"{result.samples_per_second:,.0f} samples/s; first scores {scores[:3].tolist()}")
        for name, one in stats.items():
            print(f"table {name}: {one.rows:,} rows, {one.bytes_per_row:.0f} bytes each")


if __name__ == "__main__":
    main()

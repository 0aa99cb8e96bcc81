"""Balance: what each worker holds and does, gathered; one that has more than the others is seen."""

from __future__ import annotations

import itertools

import torch

from nestpipe import Batch, Feature, Jagged, Table, Trainer
from nestpipe.engine.balance import Balance
from tests.cluster import Cluster


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch, rows):
        return self.out(rows["user"])[:, 0] ** 2


def fitted(owners: int | None) -> tuple[Balance, list[str]]:
    table = Table("user", 4, owners=owners, pooled_at="source")
    make = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    trainer = Trainer(Model(), [table], [Feature("user", "user", "sum")], dense_optimizer=make)
    keys = torch.arange(64) + 64 * trainer.rank
    batch = Batch({"user": Jagged.from_lengths(keys, torch.ones(64, dtype=torch.int64))})
    result = trainer.fit(itertools.repeat(batch), steps=3)
    assert result.balance is not None
    return result.balance, trainer.describe()


def test_a_table_of_one_worker_is_seen_as_uneven_and_one_of_all_as_nearly_even(cluster: Cluster) -> None:
    (one, told), (one_again, _) = cluster.run(2, fitted, 1)
    assert one == one_again  # known to all
    assert one.keys == [3 * 128, 0] and one.rows == [128, 0] and one.ratios["keys"] == one.ratios["rows"] == 2
    assert min(one.bytes) > 0 and f"the most of a worker over the mean: {one}" in "\n".join(told)
    (spread, _), _ = cluster.run(2, fitted, None)
    assert sum(spread.keys) == 3 * 128 and sum(spread.rows) == 128 and all(r < 1.4 for r in spread.ratios.values())


def test_nothing_at_all_is_even() -> None:
    assert Balance([0, 0], [0, 0], [0, 0]).ratios == {"keys": 1.0, "rows": 1.0, "bytes": 1.0}

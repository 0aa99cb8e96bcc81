"""Models of long histories, whole: every exact schedule gives the same bits, with samples dealt over workers."""

from __future__ import annotations

import pytest
import torch

from nestpipe import Feature, RowwiseAdagrad, Table, Trainer
from nestpipe.data import KuaiRandLike
from nestpipe.models import HSTU, FuXi
from tests.cluster import Cluster

MODELS = {"hstu": HSTU, "fuxi": FuXi}


def train(model: str, schedule: str, micro_batches: int, balance: str | float) -> tuple[str, int]:
    """The digest, and the longest history that was trained on."""
    log = KuaiRandLike(num_users=60, num_items=300, mean_length=160, max_length=2_048, num_negatives=4, seed=6)
    torch.manual_seed(0)
    with Trainer(
        MODELS[model](dim=8, num_layers=1, max_length=2_048, num_time_buckets=16, dropout=0.0, input_dropout=0.0),
        [Table("item", 8, optimizer=RowwiseAdagrad(lr=0.1))],
        [Feature("history", "item"), Feature("negatives", "item")],
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        schedule=schedule,
        micro_batches=micro_batches,
        clustering="window",
        balance=balance,
    ) as trainer:
        batches = log.batches("train", batch_size=10, rank=trainer.rank, world=trainer.world, seed=0)
        trainer.fit(batches, steps=3)
        return trainer.digest(), int(log.lengths().max())


@pytest.mark.parametrize(
    ("micro_batches", "schedules"), [(1, ("dbp", "nested")), (4, ("fwp", "nested")), (16, ("fwp", "nested"))]
)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_gives_the_same_bits_on_histories_of_thousands(
    cluster: Cluster, model: str, micro_batches: int, schedules: tuple[str, ...]
) -> None:
    runs = [
        result
        for schedule in ("serial", *schedules)
        for result in cluster.run(2, train, model, schedule, micro_batches, 1e-3)
    ]
    assert len(set(runs)) == 1
    assert runs[0][1] == 2_048

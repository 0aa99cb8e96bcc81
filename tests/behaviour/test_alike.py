"""Workers that were told different things hear of it at once, on every rank, with the first difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer, TrainingError
from nestpipe.metrics import AUC
from tests.cluster import Cluster


class Sum(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> torch.Tensor:
        return self.out(rows["a"] + rows["b"])[:, 0] ** 2


def tables(rank: int, **first: Any) -> list[Table]:
    return [Table("a", 4, **{"optimizer": SGD(lr=0.1), **(first if rank else {})}), Table("b", 4)]


FEATURES = [Feature("a", "a", "sum"), Feature("b", "b", "sum")]


def make(declare: Callable[[int], dict[str, Any]]) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(0)
    options = {"tables": tables(rank), "features": FEATURES, "model": Sum(), "lr": 0.1, **declare(rank)}
    lr = options.pop("lr")
    optimizer = options.pop("dense_optimizer", lambda p: torch.optim.SGD(p, lr))
    try:
        with Trainer(
            options.pop("model"),
            options.pop("tables"),
            options.pop("features"),
            dense_optimizer=optimizer,
            **options,
        ):
            return "made"
    except TrainingError as error:
        return str(error)


def other_order(rank: int) -> dict[str, Any]:
    return {"tables": tables(rank)[:: 1 - 2 * rank]}


def other_features(rank: int) -> dict[str, Any]:
    return {"features": FEATURES[:: 1 - 2 * rank]}


def other_seed(rank: int) -> dict[str, Any]:
    return {"seed": rank}


def other_row_lr(rank: int) -> dict[str, Any]:
    return {"tables": tables(rank, optimizer=SGD(lr=0.2))}


def other_dtype(rank: int) -> dict[str, Any]:
    return {"tables": tables(rank, dtype=torch.bfloat16)}


def other_admission(rank: int) -> dict[str, Any]:
    return {"tables": tables(rank, admit_after=2)}


def other_pooling_place(rank: int) -> dict[str, Any]:
    return {"tables": tables(rank, pooled_at="owner")}


def other_dense_lr(rank: int) -> dict[str, Any]:
    return {"lr": 0.1 + rank}


def other_tensor_lr(rank: int) -> dict[str, Any]:
    return {"lr": torch.tensor(0.00100001 if rank == 0 else 0.00100004)}


def other_betas(rank: int) -> dict[str, Any]:
    betas = (torch.tensor(0.9), torch.tensor(0.99 if rank == 0 else 0.9900004))
    return {"dense_optimizer": lambda p: torch.optim.Adam(p, torch.tensor(0.1), betas=betas, capturable=True)}


def other_groups(rank: int) -> dict[str, Any]:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters[:: 1 - 2 * rank]
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.5}])

    return {"dense_optimizer": grouped}


def other_model(rank: int) -> dict[str, Any]:
    return {"model": Sum(4 + rank)}


def other_schedule(rank: int) -> dict[str, Any]:
    return {"schedule": ["dbp", "nested"][rank]}


def other_micro_batches(rank: int) -> dict[str, Any]:
    return {"micro_batches": 1 + rank}


DIFFERENCES = [
    (other_order, "table 0: name is 'a' on rank 0 and 'b' on rank 1"),
    (other_features, "feature 0: name is 'a' on rank 0 and 'b' on rank 1"),
    (other_seed, "seed is 0 on rank 0 and 1 on rank 1"),
    (other_row_lr, "table 0: optimizer is SGD(lr=0.1"),
    (other_dtype, "table 0: dtype is torch.float32 on rank 0 and torch.bfloat16 on rank 1"),
    (other_admission, "table 0: admit_after is 1 on rank 0 and 2 on rank 1"),
    (other_pooling_place, "table 0: pooled_at is 'auto' on rank 0 and 'owner' on rank 1"),
    (other_dense_lr, "dense_optimizer: lr of group 0 is 0.1 on rank 0 and 1.1 on rank 1"),
    (other_tensor_lr, "dense_optimizer: lr of group 0 is 0.00100000"),
    (other_betas, "dense_optimizer: betas of group 0 is (0.89999997"),
    (other_groups, "dense_optimizer: parameter 0 of group 0 is 'out.weight' on rank 0 and 'out.bias' on rank 1"),
    (other_model, "model: out.weight is ((1, 4), torch.float32, True) on rank 0 and ((1, 5)"),
    (other_schedule, "schedule is 'dbp' on rank 0 and 'nested' on rank 1"),
    (other_micro_batches, "micro_batches is 1 on rank 0 and 2 on rank 1"),
]


@pytest.mark.parametrize(("declare", "message"), DIFFERENCES, ids=[declare.__name__ for declare, _ in DIFFERENCES])
def test_a_difference_between_workers_is_refused_and_named(cluster: Cluster, declare: Any, message: str) -> None:
    for told in cluster.run(2, make, declare):
        assert message in told and "give every worker the same" in told


def nothing_else(rank: int) -> dict[str, Any]:
    return {}


def test_workers_that_were_told_the_same_are_not_bothered(cluster: Cluster) -> None:
    assert cluster.run(3, make, nothing_else) == ["made"] * 3


def optimizer_fails_on_one(rank: int) -> dict[str, Any]:
    return {"lr": -1.0 if rank else 0.1}


def test_a_dense_optimizer_that_fails_on_one_rank_ends_all(cluster: Cluster) -> None:
    for told in cluster.run(2, make, optimizer_fails_on_one):
        assert "rank 1, model and dense_optimizer: Invalid learning rate" in told


def call_differently(what: str) -> str:
    trainer = Trainer(Sum(), tables(0), FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    keys = Jagged.from_lists([[1], [2]])
    data = [Batch({"a": keys, "b": keys}, labels=torch.ones(2))] * 4
    try:
        if what == "steps":
            trainer.fit(data, steps=2 + trainer.rank)
        elif what == "pauses":
            trainer.fit(data, pause_every=1 + trainer.rank)
        elif what == "rates":
            trainer.scale_lr(0.5 if trainer.rank else 1.0)
            trainer.fit(data)
        elif what == "tables":
            trainer.load("nowhere", tables=["b" if trainer.rank else "a"])
        else:
            trainer.evaluate(data, {"AUC": AUC()} if trainer.rank else {})
    except TrainingError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("steps", "fit(steps) is 2 on rank 0 and 3 on rank 1"),
        ("pauses", "fit(pause_every) is [1] on rank 0 and [2] on rank 1"),
        ("rates", "row learning rates, of what was declared is 1.0 on rank 0 and 0.5 on rank 1"),
        ("tables", "load(tables) is ['a'] on rank 0 and ['b'] on rank 1"),
        ("metrics", "metric 'AUC' is nothing of the kind on rank 0 and 'AUC' on rank 1"),
    ],
)
def test_calls_that_differ_between_workers_are_refused_and_named(cluster: Cluster, what: str, message: str) -> None:
    for told in cluster.run(2, call_differently, what):
        assert message in told

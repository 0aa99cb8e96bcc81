"""ScaledRowwiseAdagrad in training: replicas, sharers and averaging arrive at its kernels as its formulas want them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.kernels import reference
from tests.behaviour.test_replicas import Fixed, by_hand, clicks, train_averaged
from tests.cluster import Cluster

NUM_KEYS, DIM, STEPS, GROUPS = 30, 3, 24, [[0, 1], [2, 3]]


def gradient(values: Tensor, group: list[int], step: int) -> tuple[Tensor, Tensor]:
    """Of a group's samples of a step by key, and which keys they use."""
    values = values.double().requires_grad_()
    used = torch.zeros(NUM_KEYS, dtype=torch.bool)
    for rank in group:
        batch = clicks(rank, STEPS)[step]
        keys, offsets = batch.keys["item"].values, batch.keys["item"].offsets
        used[keys] = True
        rows = nn.functional.embedding_bag(keys, values, offsets[:-1], mode="sum")
        Fixed()(batch, {"item": rows}).sum().backward()
    assert values.grad is not None
    return values.grad.float(), used


def by_reference(optimizer: ScaledRowwiseAdagrad, every: int) -> np.ndarray:
    """Values of all keys after the steps, from the references of the kernels."""
    replicas = len(GROUPS)
    rows = torch.zeros(replicas, NUM_KEYS, DIM)
    state = torch.zeros(replicas, NUM_KEYS, optimizer.state_floats(DIM))
    for step in range(STEPS):
        weight = sum(clicks(rank, STEPS)[step].size for group in GROUPS for rank in group)
        grads = [gradient(replica, group, step) for replica, group in zip(rows, GROUPS, strict=True)]
        sharers = torch.stack([used for _, used in grads]).sum(0)
        for m, (grad, used) in enumerate(grads):
            common: dict[str, Any] = {"lr": optimizer.lr, "scale": replicas / weight, "eps": optimizer.eps}
            if optimizer.is_by_row:
                own = {"num_replicas": replicas, "sharers": sharers[used], "updates": step + 1}
                after = reference.row_scaled_adagrad(rows[m, used], state[m, used], grad[used], **common, **own)
            else:
                c = optimizer.divisor(replicas)
                after = reference.scaled_rowwise_adagrad(rows[m, used], state[m, used], grad[used], **common, c=c)
            rows[m, used], state[m, used] = after
        if (step + 1) % every == 0:
            average = reference.average_row_scaled if optimizer.is_by_row else reference.average
            rows, state = (part.repeat(replicas, 1, 1) for part in average(rows, state))
    return rows[0].numpy()


def trained(cluster: Cluster, optimizer: Any, every: int) -> np.ndarray:
    parts = cluster.run(4, train_averaged, optimizer, len(GROUPS), every, STEPS, "shards")
    rows = {key: row[:DIM] for part in parts for key, row in part.items()}
    return np.stack([rows[key] for key in range(NUM_KEYS)])


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("scale", ["replicas", "row"])
def test_training_follows_the_formulas(cluster: Cluster, scale: str, every: int) -> None:
    optimizer = ScaledRowwiseAdagrad(lr=0.1, scale=scale)
    np.testing.assert_allclose(trained(cluster, optimizer, every), by_reference(optimizer, every), rtol=1e-3, atol=1e-4)


def test_a_scale_for_each_row_comes_nearest_to_one_table(cluster: Cluster) -> None:
    whole = by_hand(RowwiseAdagrad(lr=0.1), [[rank for group in GROUPS for rank in group]], 1, STEPS)
    one_table = np.stack([whole[key][:DIM] for key in range(NUM_KEYS)])
    optimizers = {str(scale): ScaledRowwiseAdagrad(lr=0.1, scale=scale) for scale in (1, "replicas", "row")}
    far = {name: np.abs(trained(cluster, own, 1) - one_table).mean() for name, own in optimizers.items()}
    assert far["row"] < min(far["1"], far["replicas"]), far

"""Dense gradients: sums over workers in buckets, whatever part of the model a worker uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged
from nestpipe.engine import reducer
from nestpipe.engine.dense import Dense
from tests.cluster import Cluster


class Branches(nn.Module):
    """Which branch is taken is the batch's choice; one is never taken."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))  # rank 0's weights are everybody's
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.score = nn.Linear(width, 1, dtype=torch.float64)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        x = batch.dense["x"]
        assert isinstance(x, Tensor)
        for branch in batch.dense["branches"][0].tolist():  # type: ignore[index]
            x = torch.tanh(self.branches[branch](x))
        return self.score(x.double())[:, 0].float()


def batch(width: int, branches: tuple[int, ...], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, width, generator=generator)
    return Batch({"k": Jagged.from_lists([[], []])}, {"x": x, "branches": torch.tensor([branches] * 2)})


def connected(model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Dense:
    dense = Dense(model, optimizer)
    dense.connect(dist.group.WORLD)
    return dense


# By rank: the branches of its micro-batches; a rank without any has no samples.
TAKEN: list[list[tuple[int, ...]]] = [[(0, 1), (1,)], [(2,), (0, 1, 2)], []]


def train(bucket_bytes: int, steps: int) -> dict[str, Any]:
    rank, reducer.BUCKET_BYTES = dist.get_rank(), bucket_bytes
    dense = connected(Branches(8), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1))
    for step in range(steps):
        for m, branches in enumerate(TAKEN[rank]):
            loss = dense.forward(batch(8, branches, 100 * step + 10 * rank + m), {}).losses.sum()
            dense.backward(loss, last=m == len(TAKEN[rank]) - 1)
        dense.reduce()
        dense.update(0.5)
    return {name: tensor.clone() for name, tensor in dense.model.state_dict().items()}


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_training_on_three_workers_is_training_on_one_with_all_their_samples(
    cluster: Cluster, bucket_bytes: int
) -> None:
    steps = 4
    model = Branches(8)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, weight_decay=0.1)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(steps):
        optimizer.zero_grad()
        for rank, micro_batches in enumerate(TAKEN):
            for m, branches in enumerate(micro_batches):
                model(batch(8, branches, 100 * step + 10 * rank + m), {}).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        optimizer.step()
    for weights in cluster.run(3, train, bucket_bytes, steps):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-7)
        # Nobody used it: no weight decay either, as with one worker.
        assert torch.equal(weights["branches.3.weight"], first["branches.3.weight"])
        assert not torch.equal(weights["branches.2.weight"], first["branches.2.weight"])


def reentrant() -> str:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
            x = torch.ones(2, 4, requires_grad=True)
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True).sum(1)

    dense = connected(Twice(), lambda p: torch.optim.SGD(p, 0.1))
    dense.backward(dense.forward(batch(4, (0,), 1), {}).losses.sum(), last=True)
    try:
        dense.reduce()
    except ValueError as error:
        return str(error)
    return ""


def test_a_gradient_that_comes_after_its_sum_has_begun_is_refused(cluster: Cluster) -> None:
    for told in cluster.run(2, reentrant):
        assert "'layer." in told and "use_reentrant=False" in told


def is_forgotten() -> bool:
    model = nn.Linear(3, 1)
    one = reducer.Reducer(list(model.named_parameters()), dist.group.WORLD)
    one.backward(model(torch.ones(2, 3)).sum(), last=True)
    one.finish()
    gone = weakref.ref(one)
    del one, model
    gc.collect()
    return gone() is None


def test_nothing_holds_a_reducer_that_nobody_uses_any_more(cluster: Cluster) -> None:
    """Its group would live on, and with it a thread that wakes up a hundred times a second."""
    assert cluster.run(2, is_forgotten) == [True, True]

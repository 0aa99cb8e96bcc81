"""Training on 1 to 4 workers against a plain PyTorch program on one: weights, optimizer state and dense parameters."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Adam, Batch, Feature, Jagged, Output, RowwiseAdagrad, Table, Trainer
from nestpipe.optim import RowOptimizer
from tests.cluster import Cluster

STEPS, NUM_KEYS, GLOBAL_BATCH = 30, 40, 13
DIMS = {"seq": 8, "sum": 6, "mean": 8, "both": 5}
FEATURES = [
    Feature("seq", "seq"),
    Feature("sum", "sum", "sum"),
    Feature("weighted", "sum", "sum"),
    Feature("mean", "mean", "mean"),
    Feature("bag", "both", "mean"),
    Feature("list", "both"),
]


class Ranker(nn.Module):
    """Reads a sequence, sums, means and a table shared by a bag and a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.out = nn.Linear(8 + 6 + 6 + 8 + 5 + 5, 1)
        self.attention = nn.Linear(8, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        seq, listed = rows["seq"], rows["list"]
        scaled = seq.values * torch.sigmoid(self.attention(seq.values))
        parts = [
            torch.zeros(batch.size, 8).index_add(0, seq.sample_ids(), scaled),
            rows["sum"], rows["weighted"], rows["mean"], rows["bag"],
            torch.zeros(batch.size, 5).index_add(0, listed.sample_ids(), torch.tanh(listed.values)),
        ]  # fmt: skip
        logits = self.out(torch.cat(parts, 1))[:, 0]
        tokens = 1.0 + seq.lengths
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return Output(losses * tokens, tokens)


def global_batch(step: int) -> Batch:
    rng = np.random.default_rng([7, step])
    size = GLOBAL_BATCH if step % 7 else 5  # now and then a small one, so that some ranks get nothing

    def lists(weighted: bool = False) -> Jagged:
        lengths = torch.from_numpy(rng.integers(0, 5, size))
        keys = torch.from_numpy(rng.zipf(1.3, int(lengths.sum())) % NUM_KEYS)
        weights = torch.from_numpy(rng.random(len(keys), np.float32) + 0.5) if weighted else None
        return Jagged.from_lengths(keys, lengths, weights)

    keys = {feature.name: lists(feature.name in ("weighted", "bag")) for feature in FEATURES}
    return Batch(keys, labels=torch.from_numpy(rng.integers(0, 2, size)).float())


def train(optimizer: RowOptimizer, pooled_at: str, micro_batches: int) -> dict[str, Any]:
    """Runs on every rank; each takes its slice of the global batch."""
    tables = [
        Table(name, dim, optimizer=optimizer, pooled_at=pooled_at if name in ("sum", "mean") else "auto")
        for name, dim in DIMS.items()
    ]
    trainer = Trainer(
        Ranker(), tables, FEATURES, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2), micro_batches=micro_batches
    )
    everything = torch.arange(NUM_KEYS)
    first = {name: trainer.rows(name, everything).clone() for name in DIMS}
    losses = []
    for step in range(STEPS):
        batch = global_batch(step)
        cut = [batch.size * rank // trainer.world for rank in (trainer.rank, trainer.rank + 1)]
        result = trainer.step(batch.slice(*cut))
        assert result is not None and result.samples == batch.size
        losses.append(result.loss)
    states = {}
    for store in trainer.stores:
        keys, positions = store.items()
        states[store.table.name] = (keys, store.records(positions)[:, store.table.dim :])
    return {
        "first": first,
        "losses": losses,
        "rows": {name: trainer.rows(name, everything).clone() for name in DIMS},
        "states": states,
        "dense": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        "digest": trainer.digest(),
    }


class Plain:
    """The same model on nn.Embedding and nn.EmbeddingBag, one process, torch's own optimizers where it has them."""

    def __init__(self, optimizer: RowOptimizer, first: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.model = Ranker()
        self.dense_optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.tables = {name: nn.Parameter(rows.clone()) for name, rows in first.items()}
        if isinstance(optimizer, SGD):
            self.row_optimizer: Any = torch.optim.SGD(self.tables.values(), optimizer.lr)
        elif isinstance(optimizer, Adagrad):
            self.row_optimizer = torch.optim.Adagrad(self.tables.values(), optimizer.lr, eps=optimizer.eps)
        elif isinstance(optimizer, Adam):
            self.row_optimizer = torch.optim.SparseAdam(list(self.tables.values()), optimizer.lr, eps=optimizer.eps)
        self.sums = {name: torch.zeros(len(rows)) for name, rows in first.items()}

    def lookup(self, name: str, batch: Batch) -> Any:
        feature = next(f for f in FEATURES if f.name == name)
        jagged, weight = batch.keys[name], self.tables[feature.table]
        if feature.pooling is None:
            return Jagged(nn.functional.embedding(jagged.values, weight), jagged.offsets)
        if feature.pooling == "mean" and jagged.weights is not None:  # EmbeddingBag has no weighted mean
            totals = torch.zeros(len(jagged)).index_add(0, jagged.sample_ids(), jagged.weights)
            scaled = nn.functional.embedding_bag(
                jagged.values, weight, jagged.offsets[:-1], mode="sum", per_sample_weights=jagged.weights
            )
            return scaled / torch.where(totals == 0, 1.0, totals)[:, None]
        return nn.functional.embedding_bag(
            jagged.values, weight, jagged.offsets[:-1], mode=feature.pooling, per_sample_weights=jagged.weights
        )

    def step(self, batch: Batch) -> float:
        output = self.model(batch, {feature.name: self.lookup(feature.name, batch) for feature in FEATURES})
        loss = output.losses.sum() / output.weights.sum()
        loss.backward()
        touched = {
            name: torch.cat([batch.keys[f.name].values for f in FEATURES if f.table == name]).unique() for name in DIMS
        }
        if isinstance(self.optimizer, RowwiseAdagrad):
            for name, rows in self.tables.items():
                grad = rows.grad
                self.sums[name] += grad.square().mean(1)
                with torch.no_grad():
                    rows -= self.optimizer.lr * grad / (self.sums[name].sqrt() + self.optimizer.eps)[:, None]
        else:
            if isinstance(self.optimizer, Adam):
                for name, rows in self.tables.items():
                    keys = touched[name]
                    rows.grad = torch.sparse_coo_tensor(keys[None], rows.grad[keys], rows.shape, is_coalesced=True)
            self.row_optimizer.step()
        for rows in self.tables.values():
            rows.grad = None
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad()
        return float(loss.detach())

    def state(self, name: str) -> Tensor:
        if isinstance(self.optimizer, SGD):
            return torch.empty(NUM_KEYS, 0)
        if isinstance(self.optimizer, RowwiseAdagrad):
            return self.sums[name][:, None]
        state = self.row_optimizer.state[self.tables[name]]
        if isinstance(self.optimizer, Adagrad):
            return state["sum"]
        return torch.cat([state["exp_avg"], state["exp_avg_sq"]], 1)


def assert_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30))
    assert error <= 1e-6, f"{what}: relative error {error:.2e}"


@functools.cache
def plain_training(optimizer: RowOptimizer, first: tuple[bytes, ...]) -> tuple[Plain, list[float]]:
    """From these first rows of every table; once for all numbers of workers."""
    rows = {name: torch.frombuffer(bytearray(one), dtype=torch.float32).view(NUM_KEYS, dim) for (name, dim), one in
            zip(DIMS.items(), first, strict=True)}  # fmt: skip
    plain = Plain(optimizer, rows)
    return plain, [plain.step(global_batch(step)) for step in range(STEPS)]


OPTIMIZERS = [SGD(lr=0.1), Adagrad(lr=0.05), RowwiseAdagrad(lr=0.05), Adam(lr=0.01)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("pooled_at", ["source", "owner"])
def test_training_equals_plain_torch(cluster: Cluster, world: int, optimizer: RowOptimizer, pooled_at: str) -> None:
    results = cluster.run(world, train, optimizer, pooled_at, 1)
    plain, plain_losses = plain_training(optimizer, tuple(results[0]["first"][name].numpy().tobytes() for name in DIMS))
    assert results[0]["losses"] == pytest.approx(plain_losses, rel=1e-6)
    for name in DIMS:
        assert not torch.equal(results[0]["first"][name], results[0]["rows"][name])
        assert_close(f"rows of {name}", results[0]["rows"][name], plain.tables[name].detach())
        keys = np.concatenate([result["states"][name][0] for result in results])
        states = torch.from_numpy(np.concatenate([result["states"][name][1] for result in results]))
        assert len(set(keys.tolist())) == len(keys), "a key has two owners"
        if states.shape[1]:
            assert_close(f"state of {name}", states, plain.state(name)[torch.from_numpy(keys)])
    # As one vector: a bias that happens to cross zero has no relative accuracy of its own.
    dense = [torch.cat([state[name].flatten() for name in sorted(state)]) for state in
             (results[0]["dense"], plain.model.state_dict())]  # fmt: skip
    assert_close("dense parameters", *dense)
    for result in results[1:]:
        assert result["digest"] == results[0]["digest"]
        assert all(torch.equal(result["dense"][name], tensor) for name, tensor in results[0]["dense"].items())


@pytest.mark.parametrize("world", [1, 3])
def test_two_runs_of_one_configuration_give_the_same_digest(cluster: Cluster, world: int) -> None:
    digests = {cluster.run(world, train, RowwiseAdagrad(lr=0.05), "auto", 2)[0]["digest"] for _ in range(2)}
    assert len(digests) == 1
    assert cluster.run(world, train, RowwiseAdagrad(lr=0.06), "auto", 2)[0]["digest"] not in digests


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> dict[str, Any]:
    return cluster.run(2, train, Adagrad(lr=0.05), "auto", 1)[0]


@pytest.mark.parametrize("micro_batches", [2, 3, 20])
def test_micro_batches_change_nothing_but_rounding(cluster: Cluster, whole: dict[str, Any], micro_batches: int) -> None:
    split = cluster.run(2, train, Adagrad(lr=0.05), "auto", micro_batches)[0]
    assert split["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    for name in DIMS:
        assert_close(name, split["rows"][name], whole["rows"][name])

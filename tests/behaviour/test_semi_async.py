"""Rows one update behind, dense weights synchronous: semi_async against a plain PyTorch program on one process."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Batch, Feature, Jagged, Output, Table, Trainer
from nestpipe.engine.context import StepResult
from tests.behaviour.test_schedules import random_delays
from tests.cluster import Cluster

STEPS, NUM_KEYS, GLOBAL_BATCH, DIM = 24, 60, 12, 6
SPOILED = 9  # the batch whose loss is not finite
TABLES = {"list": SGD(lr=0.3), "bag": Adagrad(lr=0.2)}
FEATURES = [Feature("list", "list"), Feature("bag", "bag", "sum")]


@dataclasses.dataclass(frozen=True)
class Case:
    tier: str = "memory"
    micro_batches: int = 1
    delays: int | None = None  # seed
    schedule: str = "semi_async"
    replicas: int = 1
    check_freshness: bool = True


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden, self.out = nn.Linear(DIM, DIM), nn.Linear(2 * DIM, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        listed = torch.tanh(self.hidden(rows["list"].values))
        summed = torch.zeros(batch.size, DIM).index_add(0, rows["list"].sample_ids(), listed)
        scores = self.out(torch.cat([summed, rows["bag"]], 1))[:, 0]
        assert batch.labels is not None
        spoiled = batch.labels > 50
        return Output(torch.where(spoiled, torch.inf, (scores - batch.labels) ** 2))


def global_batch(step: int) -> Batch:
    """Few keys: neighbours share most of them."""
    rng = np.random.default_rng([4, step])
    lengths = [torch.from_numpy(rng.integers(0, 5, GLOBAL_BATCH)) for _ in FEATURES]
    keys = [torch.from_numpy(rng.zipf(1.4, int(of.sum())) % NUM_KEYS) for of in lengths]
    labels = torch.from_numpy(rng.standard_normal(GLOBAL_BATCH).astype(np.float32))
    if step == SPOILED:
        labels[3] = 99.0
    jagged = [Jagged.from_lengths(*pair) for pair in zip(keys, lengths, strict=True)]
    return Batch({feature.name: of for feature, of in zip(FEATURES, jagged, strict=True)}, labels=labels)


def lr_factor(step: int) -> float:
    """Of batch `step`: another for each."""
    return 1.0 / (1 + step % 5)


def train(case: Case) -> dict[str, Any]:
    """Runs on every rank; each takes its slice of the global batch."""
    tables = [Table(name, DIM, optimizer=optimizer, tier=case.tier) for name, optimizer in TABLES.items()]  # type: ignore[arg-type]
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        Scorer(),
        tables,
        FEATURES,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        replicas=case.replicas,
        storage=folder,
        on_nonfinite="skip",
        check_freshness=case.check_freshness,
    )
    if case.delays is not None:
        trainer.around = random_delays(case.delays, trainer.rank, case.micro_batches)

    def own() -> Iterator[Batch]:
        for step in range(STEPS):
            cut = [GLOBAL_BATCH * rank // trainer.world for rank in (trainer.rank, trainer.rank + 1)]
            yield global_batch(step).slice(*cut)

    losses = []

    def on_step(result: StepResult) -> None:
        """Told while rows of this batch may not have been updated yet."""
        losses.append(result.loss)
        trainer.scale_lr(lr_factor(result.step))

    everything = torch.arange(NUM_KEYS)
    first = {name: trainer.rows(name, everything).clone() for name in TABLES}
    trainer.scale_lr(lr_factor(0))
    fitted = trainer.fit(own(), on_step=on_step)
    result = {
        "first": first,
        "losses": losses,
        "skipped": fitted.skipped,
        "rows": {name: trainer.rows(name, everything).clone() for name in TABLES},
        "dense": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        "digest": trainer.digest(),
    }
    trainer.close()
    shutil.rmtree(folder)
    return result


def by_hand(first: dict[str, Tensor], *, stale_by: int) -> dict[str, Any]:
    """One process, no schedule: batch t reads each row without the last `stale_by` updates."""
    model, rows = Scorer(), {name: values.clone() for name, values in first.items()}
    dense = torch.optim.Adam(model.parameters(), 1e-2)
    sums = {name: torch.zeros_like(values) for name, values in rows.items()}  # of Adagrad
    as_read = [rows] * (stale_by + 1)  # before the updates of the last batches, the oldest first
    losses = []
    for step in range(STEPS):
        batch = global_batch(step)
        read = {name: values.clone().requires_grad_() for name, values in as_read[0].items()}
        of_list, of_bag = batch.keys["list"], batch.keys["bag"]
        bags = torch.zeros(batch.size, DIM).index_add(0, of_bag.sample_ids(), read["bag"][of_bag.values])
        output = model(batch, {"list": Jagged(read["list"][of_list.values], of_list.offsets), "bag": bags})
        loss = output.losses.mean()
        losses.append(float(loss.detach()))
        rows = {name: values.clone() for name, values in rows.items()}
        if torch.isfinite(loss):
            dense.param_groups[0]["lr"] = 1e-2 * lr_factor(step)
            dense.zero_grad()
            loss.backward()
            dense.step()
            for name, optimizer in TABLES.items():
                grad, lr = read[name].grad, optimizer.lr * lr_factor(step)
                assert grad is not None
                if isinstance(optimizer, Adagrad):
                    sums[name] += grad.square()
                    grad = grad / (sums[name].sqrt() + optimizer.eps)
                rows[name] -= lr * grad
        as_read = [*as_read[1:], rows]
    return {"losses": losses, "rows": rows, "dense": model.state_dict()}


def assert_close(result: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    for what in ("rows", "dense"):
        for name, values in expected[what].items():
            torch.testing.assert_close(result[what][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("world", "tier", "micro_batches"),
    [(1, "memory", 1), (1, "disk", 4), (2, "memory", 4), (2, "disk", 1), (3, "memory", 1), (3, "disk", 4)],
)
def test_semi_async_equals_a_plain_program_whose_rows_are_one_update_behind(
    cluster: Cluster, world: int, tier: str, micro_batches: int
) -> None:
    """Also with a batch that is left out, and learning rates that change with every batch."""
    case = Case(tier, micro_batches, delays=5)
    result = cluster.run(world, train, case)[0]
    assert result["skipped"] == 1 and not np.isfinite(result["losses"][SPOILED])
    assert_close(result, by_hand(result["first"], stale_by=1))
    # Timing changes nothing.
    undisturbed = dataclasses.replace(case, delays=None)
    assert cluster.run(world, train, undisturbed)[0]["digest"] == result["digest"]


def test_the_plain_program_tells_how_stale_rows_are(cluster: Cluster) -> None:
    """Else the test above would say little."""
    result = cluster.run(1, train, Case())[0]
    for stale_by in (0, 2):
        with pytest.raises(AssertionError):
            assert_close(result, by_hand(result["first"], stale_by=stale_by))
    fresh = cluster.run(1, train, Case(schedule="nested"))[0]
    assert_close(fresh, by_hand(fresh["first"], stale_by=0))


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_replicas_of_tables_are_one_update_behind_alike(cluster: Cluster, tier: str) -> None:
    case = Case(tier, 2, delays=6, replicas=2)
    result = cluster.run(2, train, case)[0]
    assert_close(result, by_hand(result["first"], stale_by=1))

"""What is counted, that counting changes nothing, and what is said where it cannot be done."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Output, Table, Trainer
from nestpipe.engine.flops import COUNTED, FlopCounter, Work
from tests.cluster import Cluster

DIM, WIDE = 8, 16


class Towers(nn.Module):
    """Per token one matrix product of DIM x WIDE, and one per sample of WIDE x 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.out = nn.Linear(DIM, WIDE), nn.Linear(WIDE, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        tokens = torch.relu(self.wide(nn.functional.dropout(rows["list"].values, 0.1)))
        summed = torch.zeros(batch.size, WIDE).index_add(0, rows["list"].sample_ids(), tokens)
        return Output(self.out(summed)[:, 0] ** 2)


class Declared(Towers):
    def flops(self, batch: Batch) -> float:
        return 1000.0 * batch.size


class Refused(Towers):
    """Cannot be watched, for a reason of its own."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return super().forward(batch, rows)


class NoProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return rows["list"].sum().sum(1) * self.scale


def fit(kind: type[nn.Module], micro_batches: int = 1) -> dict[str, Any]:
    trainer = Trainer(
        kind(),
        [Table("list", DIM)],
        [Feature("list", "list")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        micro_batches=micro_batches,
    )
    torch.manual_seed(7 + trainer.rank)
    lists = [[1, 2, 3], [4], [5, 6], [7, 8]]
    fitted = trainer.fit([Batch({"list": Jagged.from_lists(lists)}) for _ in range(COUNTED + 3)])
    result = {"fitted": fitted, "digest": trainer.digest()}
    trainer.close()
    return result


@pytest.mark.parametrize(("world", "micro_batches"), [(1, 1), (1, 2), (2, 2)])
def test_forward_and_backward_of_every_matrix_product_are_counted(
    cluster: Cluster, world: int, micro_batches: int
) -> None:
    result = cluster.run(world, fit, Towers, micro_batches)[0]["fitted"]
    assert result.tokens == 8 * (COUNTED + 3) * world and result.tokens_per_second > 0
    # Forward; gradients of the weights; gradients of what came in.
    expected = 3 * 2 * (8 * DIM * WIDE + 4 * WIDE)
    assert result.work.per_token == pytest.approx(expected / 8) and result.work.per_sample == pytest.approx(
        expected / 4
    )
    assert result.work.why_not is None and result.work.machine > 1e8 and result.work.memory > 1e6
    assert 0 < result.mfu < 1


def fit_uncounted(kind: type[nn.Module], micro_batches: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nestpipe.engine.flops.COUNTED", 0)
        return fit(kind, micro_batches)


@pytest.mark.parametrize("kind", [Towers, Refused])
def test_counting_does_not_change_a_bit(cluster: Cluster, kind: type[nn.Module]) -> None:
    """Nor does trying to; dropout draws the same numbers."""
    counted, not_counted = (cluster.run(2, run, kind, 2)[0]["digest"] for run in (fit, fit_uncounted))
    assert counted == not_counted


def test_a_model_may_declare_what_it_computes() -> None:
    work = fit(Declared)["fitted"].work
    assert work.per_sample == 1000.0 and work.per_token == 500.0


@pytest.mark.parametrize(
    ("kind", "why"), [(Refused, "could not be counted: .*not under a mode"), (NoProduct, "no matrix product was seen")]
)
def test_a_model_that_cannot_be_counted_trains_and_the_result_says_why(kind: type[nn.Module], why: str) -> None:
    fitted = fit(kind)["fitted"]
    assert fitted.steps == COUNTED + 3 and fitted.mfu is None
    assert re.search(why, fitted.work.why_not)


def test_utilization_is_by_tokens_or_else_by_samples() -> None:
    by_token = Work(per_token=10.0, per_sample=40.0, machine=1000.0, memory=0)
    assert by_token.utilization(tokens=100, samples=20, seconds=2.0) == pytest.approx(0.5)
    by_sample = Work(per_token=None, per_sample=40.0, machine=1000.0, memory=0)
    assert by_sample.utilization(tokens=0, samples=25, seconds=2.0) == pytest.approx(0.5)
    assert Work(None, None, 1000.0, 0, "why").utilization(tokens=1, samples=1, seconds=1.0) is None


class Attends(nn.Module):
    def __init__(self, *, with_lstm: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True) if with_lstm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.lstm is not None:
            return self.lstm(x)[0]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def counted(module: nn.Module) -> FlopCounter:
    counter = FlopCounter(module)
    x = torch.randn(2, 8, 4, requires_grad=True)
    counter.forward(lambda: Output(module(x).sum((1, 2))), Batch.empty(["x"]), tokens=16)
    return counter


def test_attention_of_torch_is_counted_and_what_cannot_be_seen_is_said() -> None:
    assert counted(Attends()).flops == 2 * 2 * 2 * 8 * 8 * 4
    assert "cannot be seen" in (counted(Attends(with_lstm=True)).why_not or "")


def test_a_model_whose_own_count_fails_runs_once() -> None:
    class Fails(nn.Module):
        runs = 0

        def flops(self, batch: Batch) -> float:
            raise RuntimeError("no idea")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x

    model = Fails()
    assert "no idea" in (counted(model).why_not or "") and model.runs == 1

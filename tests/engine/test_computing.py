"""bf16 and torch.compile: the same bits under every schedule, float32 where it is promised, errors that say what to do."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer
from nestpipe.metrics import AUC
from nestpipe.models import TwoTower
from tests.behaviour import test_batch_norm as batch_norm
from tests.behaviour import test_sharing as sharing
from tests.cluster import Cluster


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.above = nn.Linear(8, 16), nn.Linear(16, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
        hidden = torch.relu(self.below(rows["item"]))
        logits = self.above(hidden)[:, 0]
        if not torch.compiler.is_compiling():
            self.seen.append(logits.dtype)
        return Output((logits - batch.labels) ** 2, predictions=torch.sigmoid(logits))


def batches(steps: int) -> list[Batch]:
    lists = [[[(step + s) % 7, s] for s in range(8)] for step in range(steps)]
    return [Batch({"item": Jagged.from_lists(keys)}, labels=torch.arange(8) % 2.0) for keys in lists]


def made(model: nn.Module, **options: Any) -> Trainer:
    tables = [Table("item", 8, optimizer=SGD(lr=0.1))]
    features = [Feature("item", "item", "sum")]
    return Trainer(model, tables, features, dense_optimizer=lambda p: torch.optim.Adam(p, 0.01), **options)


def digest(schedule: str, **options: Any) -> str:
    with made(Tower(), schedule=schedule, micro_batches=2, **options) as trainer:
        trainer.fit(batches(4))
        return trainer.digest()


def test_bf16_has_the_same_bits_under_every_schedule_and_others_than_float32() -> None:
    (bits,) = {digest(schedule, precision="bf16") for schedule in ("serial", "dbp", "fwp", "nested")}
    assert bits != digest("serial")


def test_under_bf16_the_model_computes_in_bfloat16_and_all_else_is_float32() -> None:
    model = Tower()
    with made(model, precision="bf16") as trainer:
        trainer.fit(batches(2))
        trainer.evaluate(batches(1), {"AUC": AUC()})
        assert set(model.seen) == {torch.bfloat16} and len(model.seen) == 3  # in evaluations too
        output = trainer._worker.dense.forward(batches(1)[0], {"item": torch.ones(8, 8)})
        assert isinstance(output.predictions, Tensor)
        assert output.losses.dtype == output.predictions.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without a C++ compiler, which takes tens of seconds: traced, differentiated, run as it is."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def test_a_compiled_model_has_the_same_bits_under_every_schedule(traced: None) -> None:
    (bits,) = {digest(schedule, compile=True) for schedule in ("serial", "nested")}
    assert bits == digest("serial")  # this backend computes what the model does


def test_a_model_that_does_not_compile_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    with (
        made(Tower(), compile=True) as trainer,
        pytest.raises(Exception, match=r"torch.compile fails on Tower .*leave compile out"),
    ):
        trainer.fit(batches(1))


def test_without_a_compiler_it_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Exception, match=r"needs a C\+\+ compiler"):
        made(Tower(), compile=True)


# -- a loss over the samples of all workers ------------------------------------------------------------------------------


def train_towers(schedule: str, model: nn.Module | None = None, **options: Any) -> tuple[str, list[float]]:
    case, losses = sharing.Case(schedule, micro_batches=2), list[float]()
    with sharing.make(case, model, **options) as trainer:
        own = sharing.batches(trainer.rank, trainer.world, case)
        trainer.fit(own, on_step=lambda result: losses.append(result.loss))
        return trainer.digest(), losses


def towers_in_bf16() -> list[tuple[str, list[float]]]:
    return [train_towers(schedule, precision="bf16") for schedule in sharing.EXACT]


def test_in_bf16_a_loss_over_all_workers_is_that_of_one_worker_and_has_one_result_under_every_schedule(
    cluster: Cluster,
) -> None:
    _, exact = train_towers("serial")
    one, two = (cluster.run(world, towers_in_bf16) for world in (1, 2))
    for results in (one, two):
        assert len({digest for of_rank in results for digest, _ in of_rank}) == 1
    _, losses = two[0][0]
    assert losses == pytest.approx(one[0][0][1], rel=0.01)
    assert losses == pytest.approx(exact, rel=0.01) and losses != exact


def test_a_model_that_trains_by_embed_and_compare_is_not_left_uncompiled_in_silence(traced: None) -> None:
    with pytest.raises(Exception, match=r"TwoTower declares mixes_samples = 'global': .*Leave compile out, or compile"):
        train_towers("serial", compile=True)


def test_parts_of_such_a_model_may_be_compiled_as_the_message_says() -> None:
    def model() -> TwoTower:
        torch.manual_seed(0)
        return TwoTower(dim=sharing.DIM, hidden=(8,), temperature=0.3)

    in_parts = model()
    in_parts.item_tower.compile(dynamic=True, backend="aot_eager")
    assert train_towers("nested", in_parts) == train_towers("nested", model())


def train_norms(compiles: bool) -> str:
    whole = torch.compile
    torch.compile = functools.partial(whole, backend="aot_eager")
    try:
        with batch_norm.make(batch_norm.seeded(), compile=compiles) as trainer:
            trainer.fit(batch_norm.batches(trainer.rank, trainer.world))
            return trainer.digest()
    finally:
        torch.compile = whole


def norms_both_ways() -> tuple[str, str]:
    return train_norms(compiles=False), train_norms(compiles=True)


def test_batch_norms_of_a_compiled_model_meet_those_of_other_workers(cluster: Cluster) -> None:
    (as_it_is, compiled), other = cluster.run(2, norms_both_ways)
    assert as_it_is == compiled and other == (as_it_is, compiled)

"""Rankers, whole: every exact schedule gives the same bits, and lists of candidates go through all of training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe import Feature, Output, RowwiseAdagrad, Table, Trainer, TrainingError
from nestpipe.batch import Batch
from nestpipe.data import KuaiRandClicks
from nestpipe.data.reader import in_process
from nestpipe.metrics import AUC, GAUC, ListNDCG, NormalizedEntropy
from nestpipe.models import FuXiRanker, HSTURanker
from tests.cluster import Cluster

MODELS = {"hstu": HSTURanker, "fuxi": FuXiRanker}
HOW = {"batch_size": 10, "seed": 0}


def clicks(**options: Any) -> KuaiRandClicks:
    settings = {"num_users": 60, "num_items": 300, "mean_length": 60, "max_length": 400, "num_evaluated": 23, "seed": 6}
    return KuaiRandClicks(**(settings | options))


def make(model: str = "hstu", **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        MODELS[model](dim=8, num_layers=2, max_length=400, num_time_buckets=16, dropout=0.1, input_dropout=0.1),
        [Table("item", 8, optimizer=RowwiseAdagrad(lr=0.1))],
        [Feature("history", "item"), Feature("candidates", "item")],
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        **options,
    )


def train(model: str, schedule: str, micro_batches: int) -> str:
    with make(model, schedule=schedule, micro_batches=micro_batches, clustering="window", balance=1e-3) as trainer:
        trainer.fit(clicks().batches("train", rank=trainer.rank, world=trainer.world, **HOW), steps=3)
        return trainer.digest()


@pytest.mark.parametrize(("micro_batches", "schedules"), [(1, ("dbp", "nested")), (4, ("fwp", "nested"))])
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_gives_the_same_bits_with_lists_dealt_over_workers(
    cluster: Cluster, model: str, micro_batches: int, schedules: tuple[str, ...]
) -> None:
    runs = [
        digest
        for schedule in ("serial", *schedules)
        for digest in cluster.run(2, train, model, schedule, micro_batches)
    ]
    assert len(set(runs)) == 1


def judge(world_of_one: bool) -> dict[str, float]:
    with make() as trainer:
        metrics = {"AUC": AUC(), "NE": NormalizedEntropy(), "GAUC": GAUC(), "NDCG@4": ListNDCG(4)}
        data = clicks()
        assert (trainer.world == 1) == world_of_one
        return trainer.evaluate(data.batches("test", rank=trainer.rank, world=trainer.world, **HOW), metrics)


def test_lists_are_judged_the_same_on_one_worker_and_on_two(cluster: Cluster) -> None:
    (alone,) = cluster.run(1, judge, True)
    for result in cluster.run(2, judge, False):
        assert result == pytest.approx(alone, abs=1e-4)
    assert 0.2 < alone["AUC"] < 0.8 and 0.2 < alone["GAUC"] < 0.8 and 0 < alone["NDCG@4"] < 1


def test_lists_come_out_of_a_reader_process_as_they_were() -> None:
    reader = in_process(clicks().batches, "train", rank=0, world=1, **HOW)
    try:
        first, expected = next(reader), next(iter(clicks().batches("train", rank=0, world=1, **HOW)))
        assert first.labels.to_lists() == expected.labels.to_lists()
    finally:
        reader.close()


class Undeclared(HSTURanker):
    """As a user would write it: it does not say whether samples are mixed."""

    mixes_samples = None  # type: ignore[assignment]


class Mixed(Undeclared):
    """Candidates of all samples compete."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        output = super().forward(batch, rows)
        return Output(output.losses + output.losses.mean(), output.weights, output.predictions)


@pytest.mark.parametrize(("model", "mixes"), [(Undeclared, False), (Mixed, True)])
def test_samples_that_mix_are_found_behind_labels_that_are_lists(
    model: type[HSTURanker], mixes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(MODELS, "hstu", model)
    caplog.set_level("DEBUG", logger="nestpipe")
    with make(micro_batches=2) as trainer:
        batches = list(clicks().batches("train", rank=0, world=1, **HOW))[:2]
        if mixes:
            with pytest.raises(TrainingError, match="depends on the other samples of its micro-batch"):
                trainer.fit(batches)
        else:
            assert trainer.fit(batches).steps == 2
    assert not [line for line in caplog.messages if "not tried" in line or "could not be tried" in line]


class Flat(HSTURanker):
    """Predicts a number per sample where labels are lists."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        output = super().forward(batch, rows)
        return Output(output.losses, output.weights, output.losses)


@pytest.mark.parametrize("metric", [AUC(), GAUC()])
def test_predictions_that_are_no_lists_where_labels_are_are_refused(
    metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "hstu", Flat)
    with (
        make() as trainer,
        pytest.raises(TrainingError, match="metric 'it': predictions are a tensor, labels a Jagged"),
    ):
        trainer.evaluate(clicks().batches("test", rank=0, world=1, **HOW), {"it": metric})

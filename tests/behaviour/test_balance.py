"""Samples dealt over workers (balance): the global batch stays what it is, schedules agree to the bit, nobody hangs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer, TrainingError
from nestpipe.data import SyntheticSequences
from nestpipe.data.epoch import training_batches
from tests.behaviour.test_replicas import rows_of, united
from tests.behaviour.test_resume import CLICKS, SEQUENCES, assert_alike, configured, whole_and_resumed
from tests.behaviour.test_resume import train as train_config
from tests.behaviour.test_schedules import Case, batches, close, make, serial, train
from tests.cluster import Cluster


@pytest.mark.parametrize(
    ("world", "tier", "balance"), [(1, "memory", "tokens"), (2, "disk", 0.5), (3, "memory", "tokens")]
)
@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_every_schedule_equals_serial_with_samples_dealt(
    cluster: Cluster, schedule: str, world: int, tier: str, balance: str | float
) -> None:
    """Uneven and empty batches, ranks that run out of data, clustering and micro-batches, random delays in every lane."""
    case = Case(schedule, tier, steps=16, samples=20, micro_batches=3, clustering="window", delays=2, balance=balance)
    results = cluster.run(world, train, case)
    assert set(results) == {serial(cluster, world, case)}
    assert results[0][2] == 16
    undealt = serial(cluster, world, dataclasses.replace(case, balance="none"))
    assert (results[0] == undealt) == (world == 1), "else nothing has been dealt"


def train_rows(case: Case) -> dict[str, Any]:
    trainer, features, folder = make(case)
    try:
        trainer.fit(batches(features, case, trainer.rank, trainer.world))
        return rows_of(trainer)
    finally:
        close(trainer, folder)


def test_dealt_samples_give_what_undealt_ones_give_to_rounding(cluster: Cluster) -> None:
    """The global batch is the same set of samples, and losses are sums."""
    case = Case("nested", steps=30, samples=12, micro_batches=2)
    plain, dealt = (
        united(cluster.run(3, train_rows, dataclasses.replace(case, balance=balance))) for balance in ("none", 0.1)
    )
    for name, table in dealt.items():
        assert table.keys() == plain[name].keys() and table
        mine, theirs = (np.stack([held[key] for key in sorted(held)]) for held in (table, plain[name]))
        rounding = 1e-2 if "adagrad 1" in name else 1e-6  # bfloat16
        np.testing.assert_allclose(mine, theirs, rtol=rounding, atol=rounding, err_msg=name)


# -- a small model of sequences ----------------------------------------------------------------------------------------


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        nn.init.constant_(self.out.weight, 0.3)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        return Output((self.out(rows["history"].mean())[:, 0] - 1) ** 2)


def small(schedule: str = "nested", **options: Any) -> Trainer:
    return Trainer(
        Sums(),
        [Table("item", 4, optimizer=SGD(lr=0.1))],
        [Feature("history", "item")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        schedule=schedule,
        **{"balance": "tokens", **options},
    )


def histories(rank: int, steps: int, *, samples: int = 8) -> Iterator[Batch]:
    """Heavy-tailed, and longer on the last rank."""
    rng = np.random.default_rng([4, rank])
    for _ in range(steps):
        lengths = np.clip(np.exp(rng.normal(1 + rank, 1, samples)), 1, 60).astype(np.int64)
        keys = torch.from_numpy(rng.integers(0, 50, int(lengths.sum())))
        yield Batch({"history": Jagged.from_lengths(keys, torch.from_numpy(lengths))})


def fit_some(schedule: str, steps: int, counts: list[int]) -> tuple[str, int, Any]:
    with small(schedule) as trainer:
        fitted = trainer.fit(histories(trainer.rank, counts[trainer.rank]), steps=steps)
        return trainer.digest(), fitted.samples, fitted.waiting


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_a_rank_without_data_computes_samples_of_others(cluster: Cluster, schedule: str) -> None:
    told = cluster.run(3, fit_some, schedule, 10, [0, 6, 3])
    assert len({digest for digest, *_ in told}) == 1
    _, samples, waiting = told[0]
    assert samples == (6 + 3) * 8
    assert waiting.undealt > 0.5 and waiting.dealt < 0.1 and waiting.tokens < 1.2


def train_on(how: str) -> str:
    data = SyntheticSequences(num_items=200, lengths="lognormal", mean_length=20, num_samples=150, num_negatives=2)
    with small("nested", micro_batches=2, balance=0.01 if how == "travel" else "none") as trainer:
        source = training_batches(
            data,
            batch_size=None,
            batch_tokens=300,
            tokens="history",
            squares=0.01 if how == "by index" else None,
            rank=trainer.rank,
            world=trainer.world,
            seed=1,
        )
        trainer.fit(source)
        return trainer.digest()


def test_samples_dealt_by_index_and_samples_that_travel_give_the_same_bits(cluster: Cluster) -> None:
    digests = {how: cluster.run(3, train_on, how)[0] for how in ("by index", "travel", "undealt")}
    assert digests["by index"] == digests["travel"] != digests["undealt"]


# -- ends --------------------------------------------------------------------------------------------------------------


def stop_and_go_on(schedule: str, step: int | None) -> str:
    with small(schedule) as trainer:
        source = histories(trainer.rank, 12 - trainer.rank)

        def stop(result: Any) -> None:
            if result.step == step and trainer.rank == 1:
                trainer.stop()

        trainer.fit(source, on_step=stop)
        assert trainer.stopped == (step is not None)
        if step is not None:
            assert trainer.steps < 12
            trainer.fit(source)
        assert trainer.steps == 12
        return trainer.digest()


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_batches_given_back_after_a_stop_are_dealt_again_alike(cluster: Cluster, schedule: str) -> None:
    whole = cluster.run(2, stop_and_go_on, schedule, None)[0]
    assert set(cluster.run(2, stop_and_go_on, schedule, 3)) == {whole}


def stop_while_waiting() -> int:
    """Rank 0 has no data for a while and is asked to stop meanwhile; the others wait for it in DEAL."""
    with small() as trainer:

        def source() -> Iterator[Batch]:
            for number, batch in enumerate(histories(trainer.rank, 20)):
                if number == 5 and trainer.rank == 0:
                    trainer.stop()
                    time.sleep(0.5)
                yield batch

        trainer.fit(source())
        assert trainer.stopped
        return trainer.steps


def test_a_worker_that_stops_while_it_waits_for_data_stops_all(cluster: Cluster) -> None:
    steps = cluster.run(2, stop_while_waiting)
    assert len(set(steps)) == 1 and steps[0] <= 6


def with_trouble(schedule: str, kind: str) -> str:
    def source(rank: int) -> Iterator[Any]:
        for number, batch in enumerate(histories(rank, 9)):
            if number == 4 and rank == 1:
                if kind == "raises":
                    raise OSError("the tape is torn")
                if kind == "other parts":
                    batch.dense["age"] = torch.zeros(batch.size)
                if kind == "bad keys":
                    batch.keys["history"].values = batch.keys["history"].values.float()
            yield batch

    with small(schedule) as trainer:
        try:
            trainer.fit(source(trainer.rank))
        except TrainingError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", ["serial", "nested"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", "rank 1, batch 4: OSError: the tape is torn"),
        (
            "other parts",
            "rank 1, batch 4: samples cannot go from worker to worker, because batches differ: dense 'age'",
        ),
        ("bad keys", "rank 1, batch 4: feature 'history': keys must be a 1-d int64 tensor"),
    ],
)
def test_trouble_on_one_rank_is_raised_on_all(cluster: Cluster, schedule: str, kind: str, words: str) -> None:
    told = cluster.run(3, with_trouble, schedule, kind)
    assert len(set(told)) == 1 and told[0].startswith(words)


def in_different_calls() -> str:
    with small("serial") as trainer:
        batch = next(histories(trainer.rank, 1))
        trainer.step(batch)
        try:
            if trainer.rank == 0:
                trainer.step(batch)
            else:
                trainer.rows("item", [1, 2])
        except TrainingError as error:
            return str(error)
    return "no error"


def test_a_worker_in_another_call_is_met_where_samples_are_dealt(cluster: Cluster) -> None:
    told = cluster.run(2, in_different_calls)
    assert told[0] == told[1] and "workers make different calls (rank 0: train, rank 1: read rows)" in told[0]


class Diverges(Sums):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        losses = super().forward(batch, rows).losses
        return Output(torch.where(batch.dense["bad"] > 0, torch.inf, losses))  # type: ignore[arg-type]


def nan_of(sample: int) -> str:
    trainer = Trainer(
        Diverges(),
        [Table("item", 4, optimizer=SGD(lr=0.1))],
        [Feature("history", "item")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        balance="tokens",
        micro_batches=2,
    )
    with trainer:
        (batch,) = histories(trainer.rank, 1)
        batch.dense["bad"] = torch.zeros(batch.size)
        batch.dense["bad"][sample] = trainer.rank == 2
        try:
            trainer.fit([batch])
        except TrainingError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("sample", [0, 7])
def test_an_error_names_a_sample_by_the_batch_that_it_came_in(cluster: Cluster, sample: int) -> None:
    assert f"of sample {sample} of the batch that rank 2 has read is inf" in cluster.run(3, nan_of, sample)[0]


# -- what samples cost -------------------------------------------------------------------------------------------------


def measure_and_resume(folder: str) -> tuple[float | None, Any, float | None]:
    with small(balance="auto", micro_batches=1) as trainer:
        fitted = trainer.fit(histories(trainer.rank, 40))
        trainer.save(Path(folder) / "saved")
        measured = trainer._worker.ops.squares
    with small(balance="auto") as again:
        again.load(Path(folder) / "saved")
        return measured, fitted.waiting, again._worker.ops.squares


def test_auto_fits_what_the_square_of_a_token_costs_and_a_resumed_run_goes_on_with_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    told = cluster.run(2, measure_and_resume, str(tmp_path))
    measured, waiting, resumed = told[0]
    assert measured == told[1][0] == resumed and measured is not None
    assert 0 <= measured <= 1, "whatever it was: tests/engine/test_waiting.py has the fit"
    assert waiting.dealt < waiting.undealt


def save_and_resume(folder: str, at: int | None) -> str:
    if at is not None:
        with small() as trainer:
            trainer.fit(histories(trainer.rank, 12), steps=at)
            trainer.save(Path(folder) / "saved")
    with small() as trainer:
        source = histories(trainer.rank, 12)
        if at is not None:
            trainer.load(Path(folder) / "saved")
            for _ in range(trainer.position):
                next(source)
        trainer.fit(source)
        return trainer.digest()


def test_a_resumed_run_ends_with_the_digest_of_one_in_one_piece(cluster: Cluster, tmp_path: Path) -> None:
    whole, resumed = (cluster.run(2, save_and_resume, str(tmp_path), at)[0] for at in (None, 5))
    assert whole == resumed


BY_TOKENS = {"batch_size": None, "batch_tokens": 25}


@pytest.mark.parametrize("overlap", [None, 0.5], ids=["by index", "travel"])
def test_a_run_by_tokens_with_samples_dealt_is_resumed_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, overlap: float | None
) -> None:
    """Neighbouring batches that overlap cannot be read by index: there samples travel."""
    config = configured(
        SEQUENCES, data={"overlap": overlap}, schedule={"name": "nested", "balance": 0.05}, train=BY_TOKENS
    )
    for results in cluster.run(2, whole_and_resumed, config, tmp_path):
        assert_alike(results, steps=10)
        assert results["whole"]["waiting"]["dealt"] < results["whole"]["waiting"]["undealt"]


def test_data_without_a_sequence_cannot_be_cut_by_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.batch_tokens counts the keys of a sequence.*set train.batch_size"):
        train_config(configured(CLICKS, train=BY_TOKENS), tmp_path / "run")


def test_what_cannot_be_balanced_is_refused_with_the_fix() -> None:
    trainer = small(balance="auto")
    trainer._worker.training.measures_balance = True  # as with several workers
    with pytest.raises(ValueError, match=r"balance='auto' is measured by fit; give a number"):
        trainer.step(next(histories(0, 1)))
    with pytest.raises(
        ValueError, match=r"balance must be a finite number or 'none' or 'tokens' or 'auto', got 'even'"
    ):
        small(balance="even")
    with pytest.raises(ValueError, match=r"balance='tokens' counts the keys of a sequence.*pooling=None"):
        Trainer(
            Sums(),
            [Table("item", 4)],
            [Feature("history", "item", "sum")],
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
            balance="tokens",
        )

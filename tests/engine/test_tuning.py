"""micro_batches='auto': what it tries, what it picks, and that training goes on as if the number had been given."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer
from nestpipe.engine import tuning
from nestpipe.engine.context import StepResult
from nestpipe.engine.tuning import STEPS, Tuning
from nestpipe.exchange.transport import Transport
from tests.cluster import Cluster


def tuned(step_seconds: Callable[[int], float], samples: int, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    """A tuning of steps that take as long as they are said to."""
    now = 0.0
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now)
    one = Tuning()
    for _ in range(50):
        one.begin()
        for step in range(STEPS):
            now += step_seconds(one.micro_batches) * (5 if step < 2 else 1)  # the pipeline fills
            one.tick(StepResult(step, 0.0, samples, 1.0), 1)
        one.next(Transport())
        if one.done:
            return one
    raise AssertionError("never done")


@pytest.mark.parametrize(
    ("seconds", "samples", "best", "tried"),
    [
        (lambda n: 1 / n + 0.1 * n, 512, 4, [1, 2, 4, 8, 16]),
        (lambda n: 1.0 + n, 512, 1, [1, 2, 4]),  # no help
        (lambda n: 1.0, 512, 1, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),  # no difference: the simplest
        (lambda n: 1 / n, 20, 16, [1, 2, 4, 8, 16]),  # never more than there are samples
        (lambda n: 1 / n, 1, 1, [1]),
        (lambda n: 1.0 if n != 2 else 1.5, 4, 1, [1, 2, 4]),  # one that is slower does not end it
    ],
)
def test_the_fastest_number_is_found(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], samples: int, best: int, tried: list[int]
) -> None:
    one = tuned(seconds, samples, monkeypatch)
    assert one.micro_batches == best and list(one.seconds) == tried
    assert f"micro-batches: {best} [auto; a step took 1: " in str(one)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return (self.out(rows["item"])[:, 0] - 1) ** 2


def batches(rank: int) -> Iterator[Batch]:
    rng = np.random.default_rng(rank)
    for _ in itertools.count():
        keys = torch.from_numpy(rng.integers(0, 100, 32))
        yield Batch({"item": Jagged.from_lengths(keys, torch.full((8,), 4))})


def fit_auto(pause_every: int | None) -> dict[str, Any]:
    trainer = Trainer(
        Scorer(), [Table("item", 4, optimizer=SGD(lr=0.1))], [Feature("item", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), schedule="nested", micro_batches="auto",
    )  # fmt: skip
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("nestpipe")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    numbers: list[int] = []
    try:
        trainer.fit(batches(trainer.rank), steps=70, on_step=lambda r: numbers.append(r.step), pause_every=pause_every)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return {"digest": trainer.digest(), "count": trainer.micro_batches, "lines": lines, "numbers": numbers}


@pytest.mark.parametrize("pause_every", [None, 7, 2])
def test_auto_is_measured_in_the_first_steps_then_fixed_and_reported_the_same_on_all_ranks(
    cluster: Cluster, pause_every: int | None
) -> None:
    results = cluster.run(2, fit_auto, pause_every)
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["count"] == results[1]["count"] in (1, 2, 4, 8)
    assert results[0]["numbers"] == list(range(1, 71))
    lines = results[0]["lines"]
    (chosen,) = [line for line in lines if "[auto; a step took 1: " in line]
    assert chosen.startswith(f"micro-batches: {results[0]['count']} ")
    assert sum(line.startswith("schedule nested") for line in lines) == 1


def test_auto_is_refused_in_a_loop_of_ones_own() -> None:
    trainer = Trainer(
        Scorer(), [Table("item", 4)], [Feature("item", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), micro_batches="auto",
    )  # fmt: skip
    with pytest.raises(ValueError, match="measured by fit; give a number"):
        trainer.step(next(batches(0)))


def test_a_checkpoint_goes_on_with_the_number_that_was_measured(tmp_path: Any) -> None:
    def made() -> Trainer:
        return Trainer(
            Scorer(), [Table("item", 4)], [Feature("item", "item", "sum")],
            dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), schedule="fwp", micro_batches="auto",
        )  # fmt: skip

    trainer = made()
    trainer.fit(batches(0), steps=60)
    trainer._worker.training.cut_into(4)  # as if it had been measured
    trainer.save(tmp_path / "saved")
    other = made()
    other.load(tmp_path / "saved")
    assert other.micro_batches == 4 and other.step(next(batches(0))) is not None


def test_a_number_that_was_given_is_not_taken_for_a_measured_one(tmp_path: Any) -> None:
    def made(count: int | str) -> Trainer:
        return Trainer(
            Scorer(), [Table("item", 4)], [Feature("item", "item", "sum")],
            dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), micro_batches=count,
        )  # fmt: skip

    trainer = made(2)
    trainer.fit(batches(0), steps=2)
    trainer.save(tmp_path / "saved")
    other = made("auto")
    other.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="measured by fit"):
        other.step(next(batches(0)))

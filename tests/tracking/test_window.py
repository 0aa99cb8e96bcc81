"""Window: figures of the last steps are those that an evaluation of the same predictions gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe import Jagged, StepResult
from nestpipe.metrics import AUC, NormalizedEntropy
from nestpipe.tracking.window import SCORED, Window

APPROX = {"rel": 1e-6}


def drawn(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities, many of them the same, and labels that go with them."""
    rng = np.random.default_rng(seed)
    predictions = (rng.integers(1, 50, size) / 50).astype(np.float32)
    return torch.from_numpy(predictions), torch.from_numpy((rng.random(size) < predictions).astype(np.float32))


def step(*predicted: Any, loss: float = 1.0, weight: float = 8.0, **entries: Any) -> StepResult:
    return StepResult(1, loss, 8, weight, predicted=predicted, **entries)


def figures(*results: StepResult) -> dict[str, float]:
    window = Window()
    for result in results:
        window.add(result)
    return window.figures()


def judged(predictions: Tensor, labels: Tensor) -> dict[str, float]:
    found = {}
    for name, metric in (("AUC", AUC()), ("NE", NormalizedEntropy())):
        metric.update(predictions, labels)
        found[name] = metric.compute()
    return found


def test_the_loss_is_the_mean_by_weight_without_batches_that_were_left_out() -> None:
    found = figures(step(loss=1.0, weight=10), step(loss=3.0, weight=30), step(loss=float("nan"), skipped=True))
    assert found["loss"] == pytest.approx(2.5)


def test_auc_and_ne_are_those_of_the_metrics() -> None:
    predictions, labels = drawn(600)
    parts = list(zip(predictions.split(100), labels.split(100), strict=True))
    found = figures(step(*parts[:2]), step(*parts[2:]))
    assert {name: found[name] for name in ("AUC", "NE")} == pytest.approx(judged(predictions, labels), **APPROX)


def test_they_are_of_the_newest_predictions() -> None:
    predictions, labels = drawn(3 * 5000)
    found = figures(*(step(pair) for pair in zip(predictions.split(5000), labels.split(5000), strict=True)))
    newest = judged(predictions[-SCORED:], labels[-SCORED:])
    assert {name: found[name] for name in newest} == pytest.approx(newest, **APPROX)
    assert found["AUC"] != pytest.approx(judged(predictions, labels)["AUC"], **APPROX)


def test_tasks_are_judged_each_by_itself() -> None:
    click, like = drawn(200, 1), drawn(50, 2)  # not every sample has a label for both
    pair = {"click": click[0], "like": like[0]}, {"click": click[1], "like": like[1]}
    found = figures(step(pair, losses={"click": 0.5, "like": float("nan")}), step(losses={"click": 0.7, "like": 0.1}))
    expected = {f"click/{name}": value for name, value in judged(*click).items()}
    expected |= {f"like/{name}": value for name, value in judged(*like).items()}
    expected |= {"click/loss": 0.6, "like/loss": 0.1}
    assert {name: found[name] for name in found if "/" in name} == pytest.approx(expected, **APPROX)


def test_lists_of_candidates_count_end_to_end() -> None:
    predictions, labels = drawn(60)
    lengths = torch.tensor([10, 0, 50])
    found = figures(step((Jagged.from_lengths(predictions, lengths), Jagged.from_lengths(labels, lengths))))
    assert found["AUC"] == pytest.approx(judged(predictions, labels)["AUC"], **APPROX)


def test_what_is_no_probability_has_no_ne_and_what_is_no_click_no_auc() -> None:
    predictions, labels = drawn(50)
    assert {"AUC", "NE"} & figures(step((10 * predictions, labels))).keys() == {"AUC"}
    stars = labels * 4
    for wrong in ((predictions, stars), (predictions, torch.ones(50)), (predictions[:7], labels)):
        assert not {"AUC", "NE"} & figures(step(wrong)).keys()


def test_every_window_begins_anew_and_what_was_left_out_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("nestpipe.tracking.window.time", clock)
    window = Window()
    for now in (1.0, 2.0):
        clock.now = now
        window.add(step(drawn(50), tokens=30))
    assert window.seconds == 2.0
    found = window.figures()
    assert (found["samples_per_second"], found["tokens_per_second"]) == (8, 30)
    clock.now = 10.0
    window.leave_out()  # an evaluation
    clock.now = 10.5
    window.add(step(loss=0.25))
    assert window.figures() == {"loss": 0.25, "samples_per_second": 16}
    assert window.figures() == {}

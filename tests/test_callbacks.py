"""Callbacks: told in order of all that happens, refused if they would never be called, and able to end a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe import Batch, Callback, Feature, Jagged, Output, RowwiseAdagrad, StepResult, Table, Trainer, TrainingError
from nestpipe.checkpoint.manifest import folder_of
from tests.behaviour.test_tasks import TwoTasks, global_batch
from tests.behaviour.test_tasks import make as make_two_tasks
from tests.cluster import Cluster

SIZE = 8


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        logits = self.out(rows["item"])[:, 0]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return Output(losses, predictions=torch.sigmoid(logits))


def make(schedule: str = "serial", micro_batches: int = 1, **options: Any) -> Trainer:
    return Trainer(
        Clicks(),
        [Table("item", dim=4, optimizer=RowwiseAdagrad(lr=0.1))],
        [Feature("item", table="item", pooling="sum")],
        dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        schedule=schedule,
        micro_batches=micro_batches,
        **options,
    )


def batches(count: int, rank: int = 0, first: int = 0) -> Iterator[Batch]:
    for number in range(first, first + count):
        rng = np.random.default_rng([5, number, rank])
        keys = Jagged.from_lengths(torch.from_numpy(rng.integers(0, 40, SIZE)), torch.ones(SIZE, dtype=torch.int64))
        yield Batch({"item": keys}, labels=torch.from_numpy(rng.integers(0, 2, SIZE)).float())


class Told(Callback):
    def __init__(self, events: list[Any], name: str = "") -> None:
        self._events, self._name = events, name

    def on_begin(self) -> None:
        self._events.append(f"{self._name}begin")

    def on_step(self, result: StepResult) -> None:
        self._events.append(f"{self._name}step {result.step}")

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        self._events.append(f"{self._name}{split} {metrics['AUC']} after {step}")

    def on_checkpoint(self, path: Path, step: int) -> None:
        self._events.append(f"{self._name}{path.name} of {step}")

    def on_end(self) -> None:
        self._events.append(f"{self._name}end")


# -- what they are told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_all_are_told_of_everything_in_the_order_of_the_list(tmp_path: Path, schedule: str) -> None:
    events: list[str] = []

    def on_step(result: StepResult) -> None:
        events.append(f"on_step {result.step}")
        if result.step == 2:
            trainer.save(tmp_path / "saved")

    with make(schedule, 2) as trainer:
        trainer.fit(
            batches(3),
            on_step=on_step,
            evaluate=lambda: {"AUC": 0.5},
            evaluate_every=2,
            callbacks=[Told(events, "a "), Told(events, "b ")],
        )
        trainer.fit(batches(1))  # tells nobody
    once = ["begin", "step 1", "step 2", "valid 0.5 after 2", "saved of 2", "step 3", "end"]
    assert [event for event in events if not event.startswith("on_step")] == [
        f"{name} {event}" for event in once for name in ("a", "b")
    ]
    after_two = ["b step 2", "a valid 0.5 after 2", "b valid 0.5 after 2", "on_step 2", "a saved of 2"]
    assert events[events.index("b step 2") :][: len(after_two)] == after_two


def test_checkpoints_that_are_written_beside_the_training_are_told_when_they_are_complete(tmp_path: Path) -> None:
    events: list[str] = []
    with make() as trainer:
        into = trainer.checkpoints(tmp_path)
        trainer.fit(
            batches(5),
            pause_every=2,
            on_step=lambda result: trainer.checkpoint(into) if result.step % 2 == 0 else None,
            callbacks=[Told(events)],
        )
        assert [event for event in events if " of " in event] == [f"{folder_of(2)} of 2"]
        into.wait()  # the callbacks of a `fit` that is over are not told


def test_an_object_with_some_of_the_methods_will_do() -> None:
    class Counts:
        steps = 0

        def on_step(self, result: StepResult) -> None:
            self.steps += 1

    counts = Counts()
    with make() as trainer:
        trainer.fit(batches(3), evaluate=lambda: {"AUC": 1.0}, evaluate_every=1, callbacks=[counts])
    assert counts.steps == 3


# -- what is refused ---------------------------------------------------------------------------------------------------


class Misspelt:
    def on_evaluation(self, split: str, metrics: Mapping[str, float], step: int) -> None: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Misspelt(), "callback Misspelt: on_evaluation, which is not known; did you mean 'on_evaluate'"),
        (print, "callbacks: builtin_function_or_method is no callback; give an object with one or more of the methods"),
        (Told, "callbacks: the class Told is no callback"),
    ],
)
def test_what_would_never_be_called_is_refused_before_the_training(callback: Any, message: str) -> None:
    with make() as trainer:
        with pytest.raises(ValueError) as raised:
            trainer.fit(batches(3), callbacks=[callback])
        assert message in str(raised.value) and trainer.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_every": 3}, "give both or neither"),
        ({"evaluate": dict}, "give both or neither"),
        ({"evaluate": dict, "evaluate_every": 0}, "evaluate_every must be at least 1, got 0"),
    ],
)
def test_an_evaluation_needs_how_and_how_often(options: Any, message: str) -> None:
    with make() as trainer, pytest.raises(ValueError, match=message):
        trainer.fit(batches(1), **options)


# -- errors ------------------------------------------------------------------------------------------------------------


class Wrong(Callback):
    """On one worker."""

    def __init__(self, when: str, rank: int) -> None:
        def fail(*_: Any) -> None:
            if rank == 1:
                raise ArithmeticError("no such luck")

        setattr(self, when, fail)


def fit_with_wrong(when: str, schedule: str) -> tuple[str, list[str], str]:
    """What was raised, what another callback was told, and whether the trainer can go on."""
    events: list[str] = []
    with make(schedule, 2) as trainer:
        said = "nothing"
        try:
            trainer.fit(
                batches(6, trainer.rank),
                evaluate=lambda: {"AUC": 0.5},
                evaluate_every=2,
                callbacks=[Told(events), Wrong(when, trainer.rank)],
            )
        except (TrainingError, ArithmeticError) as error:
            said = f"{type(error).__name__}: {error}"
        trainer.fit(batches(2, trainer.rank))
        return said, events, trainer.digest()


@pytest.mark.parametrize(
    ("when", "schedule"), [("on_begin", "serial"), ("on_step", "nested"), ("on_evaluate", "serial")]
)
def test_one_that_raises_on_a_worker_ends_the_training_of_all_and_others_hear_the_end(
    cluster: Cluster, when: str, schedule: str
) -> None:
    for said, events, _ in (results := cluster.run(2, fit_with_wrong, when, schedule)):
        assert "no such luck" in said and events[-1] == "end"
    assert len({digest for *_, digest in results}) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


class EndsAfter(Callback):
    def __init__(self, trainer: Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step

    def on_begin(self) -> None:
        if self._step == 0:
            self._trainer.end_fit()

    def on_step(self, result: StepResult) -> None:
        if result.step == self._step and self._trainer.rank == self._trainer.world - 1:
            self._trainer.end_fit()


def fit_until(step: int, schedule: str) -> tuple[int, bool, bool, int, str]:
    with make(schedule, 2) as trainer:
        data = batches(9, trainer.rank)
        fitted = trainer.fit(data, pause_every=2, callbacks=[EndsAfter(trainer, step)])
        done = trainer.steps
        trainer.fit(data)  # goes on with what was not trained on
        return done, fitted.ended_early, trainer.stopped, trainer.steps, trainer.digest()


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_one_worker_ends_the_training_of_all_at_the_next_pause_and_no_batch_is_lost(
    cluster: Cluster, schedule: str
) -> None:
    whole = cluster.run(2, fit_until, 99, schedule)[0]
    assert whole[:4] == (9, False, False, 9)
    for step, done in ((0, 0), (3, 4), (4, 4)):
        for told in cluster.run(2, fit_until, step, schedule):
            assert told == (done, True, False, 9, whole[4])


# -- predictions -------------------------------------------------------------------------------------------------------


class Predicted(Callback):
    wants_predictions = True

    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def on_step(self, result: StepResult) -> None:
        self.pairs.append(result.predicted)


@pytest.mark.parametrize(("schedule", "micro_batches"), [("serial", 1), ("nested", 2)])
def test_predictions_are_of_forward_before_the_update(schedule: str, micro_batches: int) -> None:
    wanted, not_wanted = Predicted(), Predicted()
    not_wanted.wants_predictions = False
    (batch,) = batches(1)
    with make(schedule, micro_batches) as trainer:
        untrained = trainer.predict([batch])
        trainer.fit([batch, batch], callbacks=[wanted])
        trainer.fit([batch], callbacks=[not_wanted])
    first, second = ([torch.cat(parts) for parts in zip(*pairs, strict=True)] for pairs in wanted.pairs)
    assert len(wanted.pairs[0]) == micro_batches and not any(part.requires_grad for part in (*first, *second))
    torch.testing.assert_close(first[0], untrained)
    assert torch.equal(first[1], batch.labels) and not torch.equal(first[0], second[0])
    assert not_wanted.pairs == [()] or not_wanted.pairs == [[]]


def test_predictions_of_a_task_are_those_of_samples_that_have_a_label_for_it() -> None:
    wanted, batch = Predicted(), global_batch(0)
    with make_two_tasks(model=TwoTasks()) as trainer:
        untrained = trainer.predict([batch])
        trainer.fit([batch], callbacks=[wanted])
    ((predictions, labels),) = wanted.pairs[0]
    full = batch.dense["full"] > 0
    torch.testing.assert_close(predictions, {"click": untrained["click"], "like": untrained["like"][full]})
    torch.testing.assert_close(labels, {"click": batch.labels["click"], "like": batch.labels["like"][full]})


# -- what a callback wants to keep -------------------------------------------------------------------------------------


def extra_of_all(folder: Path) -> dict[str, Any]:
    with make() as trainer:
        trainer.extra["mine"] = {"seen": [1, 2], "mean": 0.1}
        trainer.fit(batches(2, trainer.rank))
        trainer.save(folder / "saved")
        trainer.extra["mine"]["seen"].append(3)  # after it
        told = {}
        for name, value in (("of each", trainer.rank), ("not JSON", {1, 2}), ("not a number", float("nan"))):
            trainer.extra["wrong"] = value
            try:
                trainer.save(folder / name)
            except (ValueError, TrainingError) as error:
                told[name] = str(error)
            del trainer.extra["wrong"]
    with make() as again:
        again.load(folder / "saved")
        return told | {"loaded": again.extra}


def test_extra_values_are_saved_with_a_checkpoint_if_workers_agree_on_them(cluster: Cluster, tmp_path: Path) -> None:
    for told in cluster.run(2, extra_of_all, tmp_path):
        assert told["loaded"] == {"mine": {"seen": [1, 2], "mean": 0.1}}
        assert "trainer.extra" in told["of each"] and "rank" in told["of each"]
        assert "trainer.extra cannot be saved" in told["not JSON"] and "JSON" in told["not a number"]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]

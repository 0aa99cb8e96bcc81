"""TensorBoard: what a run wrote is what TensorBoard reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nestpipe.tracking import tracker
from tests.behaviour.test_resume import configured, train


def test_its_files_have_the_curves_of_training_and_of_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "EVERY", 0.0)
    result = train(configured(train={"eval_every": 4}), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert list(curves["train/loss"]) == list(range(1, 13))
    assert curves["train/loss"][12] == pytest.approx(result["last_loss"], rel=1e-5)
    assert list(curves["valid/AUC"]) == [4, 8, 12] and {"train/samples_per_second", "train/NE"} <= curves.keys()
    assert curves["test/AUC"] == {12: pytest.approx(result["metrics"]["AUC"], rel=1e-5)}
    (told,) = events.Tensors("config/text_summary")
    assert b'"batch_size": 16' in told.tensor_proto.string_val[0]

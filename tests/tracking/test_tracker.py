"""Tracker: what it is told goes to its service, from the first worker, and nothing that the service does costs the training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nestpipe import StepResult, run
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.tracking import Tracker, tracker
from nestpipe.tracking.tracker import flat
from tests.behaviour.test_resume import configured, train
from tests.checkpoint.test_background import Patched
from tests.cluster import Cluster


class Recorded(Tracker):
    """Keeps what it is given; does something else at one of its moments."""

    service = "Recorder"
    calls: list[Any] = []  # noqa: RUF012
    trouble: Mapping[str, Any] = {}

    def open(self) -> None:
        self._note("open", self.remembered())
        self.remember("run-1")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._note("log", dict(values), step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._note("checkpoint", path.name, step)

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str, *values: Any) -> None:
        self.calls.append((what, *values))
        self.trouble.get(what, lambda: None)()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(tracker, "EVERY", 0.0)  # a point for every step
    monkeypatch.setattr(run, "tracker_class", lambda name: Recorded)


def logged(name: str) -> dict[int, float]:
    return {step: values[name] for what, values, step in (c for c in Recorded.calls if c[0] == "log") if name in values}


def test_it_gets_windows_evaluations_and_checkpoints_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    result = train(configured(train={"steps": 6, "eval_every": 4, "checkpoint_every": 3}), tmp_path)
    assert [call for call in Recorded.calls if call[0] == "open"] == [("open", None)]
    assert list(logged("train/loss")) == [1, 2, 3, 4, 5, 6] and list(logged("train/AUC")) == list(logged("train/NE"))
    assert list(logged("valid/AUC")) == [4] and logged("test/AUC") == {6: result["metrics"]["AUC"]}
    names = [call[1:] for call in Recorded.calls if call[0] == "checkpoint"]
    assert names == [(folder_of(3), 3), (folder_of(6), 6), ("final", 6)]
    assert Recorded.calls[-1] == ("close",)

    train(configured(train={"steps": 8, "eval_every": 4, "checkpoint_every": 3}), tmp_path, resume=True)
    assert [call for call in Recorded.calls if call[0] == "open"] == [("open", None), ("open", "run-1")]
    assert list(logged("valid/AUC")) == [4, 8]


def fail() -> None:
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize("when", ["open", "log", "checkpoint", "close"])
def test_one_that_fails_ends_its_curves_with_a_warning_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(Recorded, "trouble", {when: fail})
    result = train(configured(train={"steps": 6, "eval_every": 4}), tmp_path)
    assert result["steps"] == 6 and result["metrics"]["AUC"] > 0
    assert caplog.text.count("no more curves in Recorder: ConnectionError: the server is gone") == 1
    assert [call[0] for call in Recorded.calls].count(when) == 1


def test_one_that_hangs_is_given_up_at_the_end_and_holds_up_nothing_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(Recorded, "trouble", {"log": over.wait})
    monkeypatch.setattr(tracker, "PATIENCE", 0.2)
    stuck = Recorded(tmp_path)
    try:
        for step in range(1, 4):
            stuck.on_step(StepResult(step, 0.5, 8, 8.0))
        stuck.on_end()
        assert caplog.text.count("no more curves in Recorder: it has not taken all of them within 0 s") == 1
        stuck.on_evaluate("valid", {"AUC": 0.5}, 3)  # is not waited for again
        stuck.on_end()
        assert [call[0] for call in Recorded.calls] == ["open", "log"]
    finally:
        over.set()


def track_on_all(folder: Path) -> tuple[list[Any], int]:
    """What this worker's tracker has sent, and the threads that it has left."""
    Recorded.calls = []
    with Patched(tracker, "EVERY", 0.0), Patched(run, "tracker_class", lambda name: Recorded):
        train(configured(train={"steps": 4, "eval_every": 2}), folder)
    return Recorded.calls, sum(thread.name == Recorded.service for thread in threading.enumerate())


def test_of_several_workers_the_first_one_tracks(cluster: Cluster, tmp_path: Path) -> None:
    (first, threads), (other, _) = cluster.run(2, track_on_all, tmp_path)
    assert first[0] == ("open", None) and first[-1] == ("close",) and threads == 0
    assert other == []


def test_params_are_named_by_their_sections() -> None:
    assert flat({"train": {"steps": 8, "track": ["mlflow"]}, "x": 1}) == {
        "train.steps": 8,
        "train.track": ["mlflow"],
        "x": 1,
    }

"""MLflow: a run in a real store of its own, read back with MLflow's client."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.tracking import tracker
from tests.behaviour.test_resume import configured, train

mlflow = pytest.importorskip("mlflow")


def test_a_run_and_its_resumption_are_one_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(tracker, "EVERY", 0.0)
    entries = {"track": ["mlflow"], "eval_every": 4, "checkpoint_every": 0}
    with mlflow.start_run() as parent:
        train(configured(train={**entries, "steps": 6}), tmp_path / "run")
    result = train(configured(train={**entries, "steps": 12}), tmp_path / "run", resume=True)

    client = mlflow.MlflowClient()
    runs = client.search_runs(["0"])
    assert len(runs) == 2
    (run,) = (run for run in runs if run.info.run_id != parent.info.run_id)
    assert (tmp_path / "run" / "mlflow-run.txt").read_text().strip() == run.info.run_id
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.params["train.batch_size"] == "16" and run.data.params["tables.f_.dim"] == "4"
    assert run.data.tags["checkpoint.final"] == f"{tmp_path / 'run' / 'final'}, step 12"

    def curve(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}

    assert list(curve("train/loss")) == list(range(1, 13)) and list(curve("valid/AUC")) == [4, 8, 12]
    assert curve("test/AUC")[12] == result["metrics"]["AUC"]


def test_names_are_as_it_takes_them() -> None:
    from nestpipe.tracking.mlflow import _name

    assert _name("valid/HR@10") == "valid/HR_at_10" and _name('tables."f*".dim') == "tables._f__.dim"

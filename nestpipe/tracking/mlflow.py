"""MLflow: metrics and the config in a run of the tracking server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.tracking.tracker import Tracker, flat

LONGEST = 6000  # characters of a parameter


class MLflow(Tracker):
    """A Tracker. Where to is MLflow's own setting: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, or `mlflow.set_experiment` called
    before. Inside a run of yours (`with mlflow.start_run():`) it is a child of that. MLflow takes no "@" in a name: `HR@10` is
    `HR_at_10` there."""

    service = "MLflow"
    _mlflow: Any = None
    _run: str = ""

    def __init__(self, folder: str | Path, *, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, params=params)
        self._parent = _active_run()  # of the thread that makes this: MLflow has one for each

    def open(self) -> None:
        import mlflow

        self._mlflow, begun = mlflow, self.remembered()
        tags = {} if self._parent is None else {"mlflow.parentRunId": self._parent}
        self._run = mlflow.start_run(run_id=begun, run_name=None if begun else self.folder.name, tags=tags).info.run_id
        self.remember(self._run)
        if begun is None and self.params:
            mlflow.log_params({_name(name): str(value)[:LONGEST] for name, value in flat(self.params).items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({_name(name): value for name, value in values.items()}, step=step, run_id=self._run)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._mlflow.MlflowClient().set_tag(self._run, f"checkpoint.{path.name}", f"{path.absolute()}, step {step}")

    def close(self) -> None:
        self._mlflow.end_run()


def _active_run() -> str | None:
    import sys

    mlflow = sys.modules.get("mlflow")  # who has not imported it has none
    run = None if mlflow is None else mlflow.active_run()
    return None if run is None else run.info.run_id


def _name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name.replace("@", "_at_"))

"""Weights & Biases: metrics and the config in a run there; what it keeps locally lies in `wandb` of the run folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.tracking.tracker import Tracker

PROJECT = "nestpipe"


class WeightsAndBiases(Tracker):
    """A Tracker. Where to is its own setting: WANDB_PROJECT ("nestpipe" if it is not set), WANDB_ENTITY, WANDB_MODE=offline and
    the like."""

    service = "Weights & Biases"
    _run: Any = None

    def open(self) -> None:
        import wandb

        begun = self.remembered()
        name = begun or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.folder.name,
            id=name,
            resume="allow" if begun else None,
            dir=self.folder,
            config=self.params,
            reinit="create_new",  # another run of this process is not ended
            settings=wandb.Settings(console="off", silent=True),
        )
        self.remember(name)
        # By our step and not by its own count, which must not go back: a run that is resumed does steps again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._run.summary.update(
            {f"checkpoint.{path.name}": str(path.absolute()), f"checkpoint.{path.name}.step": step}
        )

    def close(self) -> None:
        self._run.finish()

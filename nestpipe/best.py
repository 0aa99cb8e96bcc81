"""Best: the best checkpoint of a training is kept, and training ends when nothing gets better any more."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.callbacks import Callback
from nestpipe.checkpoint import Damaged, manifest, settle
from nestpipe.directions import direction_of
from nestpipe.errors import TrainingError, did_you_mean
from nestpipe.trainer import Trainer

STATE = "nestpipe.best"  # in Trainer.extra
log = logging.getLogger("nestpipe")


class Best(Callback):
    """Keeps the best checkpoint, by a metric of the evaluations of `fit`, and ends training when it gets no better:

        best = Best(trainer, "AUC", folder="run/best", patience=3)
        trainer.fit(batches, evaluate=judge, evaluate_every=500, callbacks=[best])

    Made on every worker, after `load`: what it knows is saved with every checkpoint, so that a training that goes on from one
    ends after the same step, with the same best. Decides by the first worker's figures. NaN is never better.

    metric: one of those that `evaluate` returns.
    folder: where the best checkpoint lies; a better one takes its place when it is complete. Training waits while it is saved.
        One that cannot be saved is told, and training goes on as if it had not been better. None: nothing is saved.
    patience: training ends after so many evaluations in a row that were not better; None: never.
    direction: "max" or "min"; None: as the metric's name says (AUC, HR@k, NDCG@k and the like, or a loss, NE).
    """

    def __init__(
        self,
        trainer: Trainer,
        metric: str,
        *,
        folder: str | Path | None = None,
        patience: int | None = None,
        direction: str | None = None,
    ) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self.metric, self.patience = metric, patience
        self.direction = direction_of(metric) if direction is None else direction
        if self.direction not in ("max", "min"):
            raise ValueError(f"direction must be 'max' or 'min', got {direction!r}")
        self.folder = None if folder is None else Path(folder)
        self._trainer = trainer
        if self.folder is not None:
            place = self.folder
            trainer.workers.on_first(lambda: settle(place), what="best checkpoint")
        self._resume()

    # -- what it knows -------------------------------------------------------------------------------------------------

    @property
    def value(self) -> float | None:
        """The best so far; None: there is none yet."""
        return self._state["value"]

    @property
    def step(self) -> int | None:
        """After which it was measured."""
        return self._state["step"]

    @property
    def waited(self) -> int:
        """Evaluations since."""
        return self._state["waited"]

    @property
    def has_waited_enough(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def checkpoint(self) -> Path | None:
        """Where the best lies; None if it is not there. Every worker calls it."""
        held = None if self.folder is None or self.step is None else self._trainer.workers.from_first(self._held())
        return self.folder if held is not None and held == self.step else None

    def in_words(self) -> str:
        return f"{self.metric} {self.value:.4f} after step {self.step}" if self.value is not None else "none yet"

    # -- what it is told -----------------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        if self.has_waited_enough:  # before the checkpoint that this has been loaded from
            self._trainer.end_fit()

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        if self.metric not in metrics:
            raise ValueError(f"the best is kept by {self.metric!r}, {did_you_mean(self.metric, list(metrics))}")
        value = float(self._trainer.workers.from_first(metrics[self.metric]))
        before = self._state
        if self._is_better(value):
            self._state = before | {"value": value, "step": step, "waited": 0}
            if not self._save():
                self._state = before
        if self.step != step:
            self._state = self._state | {"waited": before["waited"] + 1}
        if self.has_waited_enough:
            if self._trainer.rank == 0:
                log.warning(
                    f"training ends after step {step}: {self.metric} has not been better in {self.waited} evaluations; the "
                    f"best is {self.in_words()}"
                )
            self._trainer.end_fit()

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        return value > self.value if self.direction == "max" else value < self.value

    @property
    def _state(self) -> dict[str, Any]:
        return self._trainer.extra[STATE]

    @_state.setter
    def _state(self, state: dict[str, Any]) -> None:
        self._trainer.extra[STATE] = state

    def _resume(self) -> None:
        new = {"metric": self.metric, "direction": self.direction, "value": None, "step": None, "waited": 0}
        state = self._trainer.extra.get(STATE)
        why = None
        if state is not None and any(state[name] != new[name] for name in ("metric", "direction")):
            why = f"it was judged by {state['metric']} ({state['direction']}), now by {self.metric} ({self.direction})"
        elif state is not None and state["step"] is not None and self.folder is not None:
            held = self._trainer.workers.from_first(self._held())
            why = f"there is no checkpoint in {self.folder}" if held is None else None
        if why is not None and self._trainer.rank == 0:
            log.warning(f"the best checkpoint is looked for anew: {why}")
        self._state = dict(new if state is None or why is not None else state)

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _save(self) -> bool:
        """All workers; whether it was possible."""
        if self.folder is None:
            return True
        try:
            self._trainer.save(self.folder, replace=True)
        except TrainingError as error:
            if self._trainer.rank == 0:
                log.warning(f"the best checkpoint, {self.folder}, cannot be saved, training goes on: {error}")
            return False
        return True

    def _held(self) -> int | None:
        """The step of what is in the folder."""
        assert self.folder is not None
        try:
            return manifest.read(self.folder).step
        except Damaged:
            return None

"""Callback: what is told of a training while it goes on; for curves, checkpoints, early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nestpipe.engine.context import StepResult
from nestpipe.errors import did_you_mean

EVENTS = ("on_begin", "on_step", "on_evaluate", "on_checkpoint", "on_end")


class Callback:
    """Is told what happens in `Trainer.fit(callbacks=[...])`. Override what you need; any object that has some of these methods
    will do. All are called on every worker. One that raises ends the training on all of them.

    wants_predictions: whether StepResult.predicted is to be there. It costs the memory of a batch's predictions.
    """

    wants_predictions: bool = False

    def on_begin(self) -> None:
        """`fit` begins, and no batch is under way."""

    def on_step(self, result: StepResult) -> None:
        """After every step. Only in a pause (`pause_every`, `evaluate_every`) is the pipeline empty."""

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        """After an evaluation of `fit(evaluate=...)`, in a pause: it may save, and `trainer.end_fit()` ends the training here.
        The same step's on_step has been called."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint is complete. One that was written while training went on is told of when the next one begins, or is
        waited for: `step` is what it holds."""

    def on_end(self) -> None:
        """`fit` ends, also by an error."""


def checked(callbacks: Iterable[Any]) -> list[Any]:
    """Raises ValueError for what would never be called."""
    callbacks = list(callbacks)
    for callback in callbacks:
        kind = type(callback).__name__ if not isinstance(callback, type) else f"the class {callback.__name__}"
        methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
        for name in methods:
            if name not in EVENTS:
                raise ValueError(f"callback {kind}: {name}, {did_you_mean(name, EVENTS)}")
        if not methods or isinstance(callback, type):
            raise ValueError(
                f"callbacks: {kind} is no callback; give an object with one or more of the methods {', '.join(EVENTS)} (a "
                f"plain function is fit(on_step=...))"
            )
    return callbacks


def tell(callbacks: Iterable[Any], event: str, *values: Any) -> None:
    """Calls a method of all that have it, in order."""
    assert event in EVENTS, event
    for callback in list(callbacks):
        method = getattr(callback, event, None)
        if method is not None:
            method(*values)

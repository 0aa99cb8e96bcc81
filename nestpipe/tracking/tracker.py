"""Tracker: sends what training tells to a tracking service, without ever holding it up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe.callbacks import Callback
from nestpipe.engine.context import StepResult
from nestpipe.files import write_text
from nestpipe.tracking.window import Window

EVERY = 1.0  # seconds of training between two points of its curves
PATIENCE = 30.0  # seconds that the end of a run waits for a service that has not taken everything yet
log = logging.getLogger("nestpipe")


class Tracker(Callback):
    """Curves of a run: `train/loss`, `train/samples_per_second`, `train/AUC`, ... as means of the last second (see Window), and
    the metrics of every evaluation, `valid/AUC`; the config at the start, and where checkpoints lie.

    Of all workers the first one tracks. It does so in a thread of its own, so that a slow server, or one that is not there, holds
    nothing up; what fails ends the curves with a warning, never the training.

    folder: of the run. What a service calls the run is kept in it, so that one that is resumed goes on with its curves.
    params: what to keep with the curves, such as a config, by section.
    """

    service = "a tracker"

    def __init__(self, folder: str | Path, *, params: Mapping[str, Any] | None = None) -> None:
        self.folder, self.params = Path(folder), dict(params or {})
        self._window = Window()
        self._step = 0
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lost = False

    @property
    def wants_predictions(self) -> bool:  # type: ignore[override]
        return _is_first()

    def on_begin(self) -> None:
        self._window.leave_out()

    def on_step(self, result: StepResult) -> None:
        if not _is_first():
            return
        self._window.add(result)
        self._step = result.step
        if self._window.seconds >= EVERY:
            self._send_window()

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        values = {f"{split}/{name}": value for name, value in metrics.items() if isinstance(value, float)}
        self._do(partial(self.log, values, step))  # counts make no curves
        self._window.leave_out()

    def on_checkpoint(self, path: Path, step: int) -> None:
        self._do(partial(self.log_checkpoint, path, step))

    def on_end(self) -> None:
        """Waits until everything is sent. What comes after it begins anew, in the same run of the service."""
        if self._step:
            self._send_window()
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._lost = True  # else the next call would wait for it again
            log.warning(f"no more curves in {self.service}: it has not taken all of them within {PATIENCE:.0f} s")
        self._thread, self._queue = None, queue.SimpleQueue()

    def _send_window(self) -> None:
        figures = {f"train/{name}": value for name, value in self._window.figures().items()}
        if figures:
            self._do(partial(self.log, figures, self._step))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _do(self, work: Any) -> None:
        if self._lost or not _is_first():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(self._queue,), name=self.service, daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _serve(self, tasks: queue.SimpleQueue[Any]) -> None:
        try:
            self.open()
            while (work := tasks.get()) is not None:
                work()
            self.close()
        except Exception as error:
            self._lost = True
            log.warning(f"no more curves in {self.service}: {type(error).__name__}: {error}")

    # -- what a service does, all in its thread ------------------------------------------------------------------------

    def open(self) -> None:
        """Begins a run of the service, or goes on with it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def log_checkpoint(self, path: Path, step: int) -> None:
        """It is there."""

    def close(self) -> None:
        """Nothing comes any more for now."""

    def remembered(self) -> str | None:
        """What the service called this run when it was begun."""
        file = self._file()
        return file.read_text().strip() if file.is_file() else None

    def remember(self, name: str) -> None:
        write_text(self._file(), f"{name}\n")

    def _file(self) -> Path:
        return self.folder / f"{type(self).__name__.lower()}-run.txt"


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train.steps": 800, ...}"""
    found: dict[str, Any] = {}
    for name, value in params.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found

"""SIGTERM asks a training to stop, with all that it has done saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from nestpipe.trainer import Trainer


@contextlib.contextmanager
def asked_by_signal(trainer: Trainer) -> Iterator[None]:
    """While it lasts, SIGTERM asks training to stop; where signals cannot be caught (another thread) it is as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

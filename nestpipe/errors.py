"""Errors that say on which worker and in which batch, so that every rank can leave with the first cause."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TrainingError(RuntimeError):
    """Training cannot go on. Raised on every worker with the same message, naming rank, batch and cause.

    is_ours: whether this worker is the first with a cause, and the one to tell it.
    """

    def __init__(self, message: str, *, is_ours: bool = True) -> None:
        super().__init__(message)
        self.is_ours = is_ours


class Stopped(Exception):
    """A worker has been asked to stop; what was under way is left undone."""


class StorageError(OSError):
    """Rows on disk cannot be read or written: the message names the file, the table and what to do. Never a wrong row."""


def describe(error: BaseException) -> str:
    """What it says; with the kind of error in front unless it was made for users to read, and with the user's own line."""
    if isinstance(error, TrainingError):
        return str(error)
    made_for_users = isinstance(error, (ValueError, TimeoutError, StorageError)) and str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    text = (str(error) if made_for_users else f"{type(error).__name__}: {error}") + where
    return "; ".join([text, *getattr(error, "__notes__", ())])


def from_the_users_line(error: BaseException) -> BaseException:
    """The same, with tracebacks that begin at the user's own code; what led there (threads, schedules, torch) is left out."""
    seen: BaseException | None = error
    while seen is not None:
        trace = seen.__traceback__
        while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        seen.__traceback__ = trace if trace is not None else _last(seen.__traceback__)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return error


def _last(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_users(filename: str) -> bool:
    torch = sys.modules.get("torch")
    ours = [str(Path(module).parent) + os.sep for module in (__file__, torch and torch.__file__) if module]
    return not filename.startswith(("<", *ours))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The tail of an error message about an unknown name."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = ", ".join(sorted(known)) or "none"
    return (
        f"which is not known; did you mean {near[0]!r}? (known: {listed})"
        if near
        else f"which is not known (known: {listed})"
    )

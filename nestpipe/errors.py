"""Errors that say on which worker and in which batch, so that every rank can leave with the first cause."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import sysconfig
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
    frames = traceback.extract_tb(error.__traceback__)
    users = _users([frame.filename for frame in frames])
    where = (
        f" (at {frames[users[-1]].filename}:{frames[users[-1]].lineno}, in {frames[users[-1]].name})" if users else ""
    )
    text = (str(error) if made_for_users else f"{type(error).__name__}: {error}") + where
    return "; ".join([text, *getattr(error, "__notes__", ())])


def from_the_users_line(error: BaseException) -> BaseException:
    """The same, with tracebacks that begin at the user's own code; what led there (threads, schedules, torch) is left out."""
    seen: BaseException | None = error
    while seen is not None:
        traces: list[TracebackType] = []
        trace = seen.__traceback__
        while trace is not None:
            traces.append(trace)
            trace = trace.tb_next
        if traces:
            users = _users([trace.tb_frame.f_code.co_filename for trace in traces])
            seen.__traceback__ = traces[users[0] if users else -1]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return error


def _users(filenames: Sequence[str]) -> list[int]:
    """Which of the files are the user's own. If none is, those of installed packages: a model may come in one."""
    torch = sys.modules.get("torch")
    ours = tuple(str(Path(module).parent) + os.sep for module in (__file__, torch and torch.__file__) if module)
    python = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
    own, installed = [], []
    for index, name in enumerate(filenames):
        if name.startswith(("<", *ours)):
            continue
        if {"site-packages", "dist-packages"} & set(
            Path(name).parts
        ):  # which mostly lie inside the standard library's folder
            installed.append(index)
        elif not name.startswith(python):
            own.append(index)
    return own or installed


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The tail of an error message about an unknown name."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = ", ".join(sorted(known)) or "none"
    return (
        f"which is not known; did you mean {near[0]!r}? (known: {listed})"
        if near
        else f"which is not known (known: {listed})"
    )

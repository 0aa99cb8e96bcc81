"""Errors that say on which worker and in which batch, so that every rank can leave with the first cause."""

from __future__ import annotations

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TrainingError(RuntimeError):
    """Training cannot go on. Raised on every worker with the same message, naming rank, batch and cause.

    is_ours: whether this worker is the first with a cause, and the one to tell it.
    """

    def __init__(self, message: str, *, is_ours: bool = True) -> None:
        super().__init__(message)
        self.is_ours = is_ours


class StorageError(OSError):
    """Rows on disk cannot be read or written: the message names the file, the table and what to do. Never a wrong row."""


def describe(error: BaseException) -> str:
    """What it says, and what was noted on it; with the kind of error in front unless it was made for users to read."""
    for_users = isinstance(error, (ValueError, TimeoutError, TrainingError, StorageError)) and str(error)
    text = str(error) if for_users else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", ())])

"""Errors that say on which worker and in which batch, so that every rank can leave with the first cause."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot go on. Raised on every worker, with the same message, naming rank, batch and cause."""


def describe(error: BaseException) -> str:
    """One line: the kind of error, unless it is one of ours to the user, and what it says."""
    text = str(error) or type(error).__name__
    return text if type(error) in (ValueError, TrainingError) or type(error).__module__.startswith("nestpipe") else (
        f"{type(error).__name__}: {text}"
    )

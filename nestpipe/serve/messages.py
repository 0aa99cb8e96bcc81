"""What an instance is told and asked, and what it answers: plain arrays, without torch, so that a front process needs none.

Legend: n items of a history, C candidates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from nestpipe.serve.requests import Source

LATEST = 1 << 53  # seconds: up to here float64 holds all whole ones, and the time between two is an int64


@dataclasses.dataclass(frozen=True, eq=False)
class Signal:
    """A ranking of this user will come soon.

    user: whoever it is; signal and ranking say the same. history: int64 keys of the items known by now, oldest first.
    times: seconds of each item, for models that look at times. candidates: how many there will be, about.
    """

    user: str
    history: np.ndarray
    times: np.ndarray | None = None
    candidates: int = 100

    def __post_init__(self) -> None:
        _check_history(self)
        if not isinstance(self.candidates, int) or isinstance(self.candidates, bool) or self.candidates < 0:
            raise ValueError(f"candidates: a signal says how many there will be, zero or more, got {self.candidates!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """Rank these candidates for a user.

    user, history, times: as in Signal; the history may have grown since. candidates: int64 keys, at least one.
    now: seconds, on the clock of `times`; what the machine's clock says (seconds since 1970) if left out.
    deadline_seconds: from now on, until the answer is due; the instance's SLO if left out.
    """

    user: str
    history: np.ndarray
    candidates: np.ndarray
    times: np.ndarray | None = None
    now: float | None = None
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_history(self)
        object.__setattr__(self, "candidates", _keys("candidates", self.candidates))
        if not len(self.candidates):
            raise ValueError("candidates: the list is empty; give at least one item to rank")
        if self.now is not None and not abs(self.now) <= LATEST:
            raise ValueError(f"now: {self.now!r} is not a number of seconds, or beyond 2^53")
        if self.deadline_seconds is not None and not 0 < self.deadline_seconds < math.inf:
            raise ValueError(f"deadline: {self.deadline_seconds!r} seconds from now; give a number above zero")


@dataclasses.dataclass(frozen=True, eq=False)
class Ranked:
    """scores: float32 [C], one for each candidate in its order, larger is better (logits). source: where the prefix came from, or
    why it was a full pass. version: of the bundle that answered. seconds: from the request to the answer, in the instance."""

    scores: np.ndarray
    source: Source
    version: str
    seconds: float


REJECTIONS = {
    "full": "the queue is full",
    "late": "it could no longer be answered in time",
    "stopping": "the instance is stopping",
}


class Rejected(Exception):
    """There is too much to do. Nothing is wrong with the request: another instance, or a later time, may do.

    why: "full": so many requests wait already. "late": it could not be in time any more. "stopping": no more are taken.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"not ranked: {REJECTIONS[why]}")
        self.why = why

    def __reduce__(self) -> tuple[type[Rejected], tuple[str]]:
        return Rejected, (self.why,)


def digest(history: np.ndarray, times: np.ndarray | None) -> bytes:
    """Of items and their times, 16 bytes: equal for equal ones, and for no others that anybody will meet."""
    hashed = hashlib.blake2b(np.ascontiguousarray(history).data, digest_size=16)
    if times is not None:
        hashed.update(times.dtype.char.encode())
        hashed.update(np.ascontiguousarray(times).data)
    return hashed.digest()


def _check_history(message: Signal | Ask) -> None:
    if not isinstance(message.user, str):
        raise ValueError(f"user: a string is needed, got {message.user!r}")
    history = _keys("history", message.history)
    object.__setattr__(message, "history", history)
    if message.times is not None:
        times = _seconds(message.times)
        if len(times) != len(history):
            raise ValueError(f"times: {len(times)} for {len(history)} items of the history; give one for each")
        object.__setattr__(message, "times", times)


def _keys(name: str, given: np.ndarray) -> np.ndarray:
    keys = np.asarray(given)
    if not keys.size and keys.ndim == 1:
        return np.empty(0, np.int64)
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or (keys.dtype == np.uint64 and keys.max() >= 1 << 63):
        raise ValueError(f"{name}: a list of int64 keys is needed, got {keys.dtype} of shape {keys.shape}")
    return _own(keys, np.int64)


def _own(given: np.ndarray, kind: type) -> np.ndarray:
    """Not to be changed any more by whoever gave it: it is read later, and by other threads."""
    return given.astype(kind, copy=given.flags.writeable)


def _seconds(given: np.ndarray) -> np.ndarray:
    """int64 where they are whole, as training has them; else float64."""
    times = np.asarray(given)
    if times.ndim != 1 or (times.size and times.dtype.kind not in "iuf"):
        raise ValueError(f"times: a list of seconds is needed, got {times.dtype} of shape {times.shape}")
    if times.dtype.kind == "f" or not times.size:
        times = times.astype(np.float64, copy=False)
    if not ((times >= -LATEST) & (times <= LATEST)).all():
        raise ValueError("times: one of them is no finite number of seconds, or beyond 2^53")
    return _own(times, np.int64 if times.dtype.kind != "f" or (times == np.floor(times)).all() else np.float64)

"""Waiting in tests: as long as it takes on a machine that others use as well, and no longer than needed."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE = 180.0  # seconds; only a test that fails waits so long

T = TypeVar("T")


def until(condition: Callable[[], T], what: str) -> T:
    """Waits until condition() is true and returns what it gave; fails with what was waited for."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE:.0f} s, in vain, until {what}"
        time.sleep(0.005)
    return value


def is_alive(pid: int) -> bool:
    """A process that has ended and whose parent has not asked for its exit code yet is not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Signpost:
    """A number that a process and those it forks from then on see alike: how far the other one is."""

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 8)).cast("q")

    @property
    def reached(self) -> int:
        return self._shared[0]

    def reach(self, number: int) -> None:
        self._shared[0] = number

    def wait_for(self, number: int) -> None:
        until(lambda: self.reached >= number, f"the other process has reached {number}")

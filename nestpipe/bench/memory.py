"""Memory of one part of a process, from the resident set that the kernel counts (Linux).

Several contestants live in the same process, so its peak says nothing of any of them. What one takes is measured while it is
built and does its first steps, before others run: how far the resident set then rises, at its peak, above where it was. Memory
that the allocator had kept from before goes back to the system first; pages that are used again thus count for who uses them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

_PROCESS = Path("/proc/self")


class Growth:
    """From here on. `peak` is in bytes; not a number where the system does not tell."""

    def __init__(self) -> None:
        give_back()
        forget_peak()
        self._before = resident()

    def peak(self) -> float:
        return highest() - self._before


def give_back() -> None:
    """Returns memory that is free to the system, whatever `process.keep_large_blocks` said."""
    gc.collect()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def forget_peak() -> None:
    """`highest` counts from now on."""
    if (_PROCESS / "clear_refs").exists():
        (_PROCESS / "clear_refs").write_text("5")


def resident() -> float:
    return _status("VmRSS")


def highest() -> float:
    """The highest that the resident set has been."""
    return _status("VmHWM")


def _status(name: str) -> float:
    if not (_PROCESS / "status").exists():
        return float("nan")
    lines = (_PROCESS / "status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024.0

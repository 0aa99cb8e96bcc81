"""Allocator settings for the worker processes of a measurement, the same for every contestant.

Large tensors that are freed go back to the kernel by default, and each new one pays a page fault per 4 KiB.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # mallopt's parameter numbers, from glibc's malloc.h


def keep_large_blocks() -> bool:
    """Makes glibc keep freed memory for the next tensor; call it first in a process. False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])

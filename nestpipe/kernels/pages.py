"""Memory straight from the system: it goes back when freed, whatever malloc keeps, and asks for huge pages."""

from __future__ import annotations

import mmap

import numpy as np


def anonymous(num_bytes: int) -> mmap.mmap:
    """A private mapping of zeros: pages cost memory only once touched.

    Huge pages, because random access to gigabytes spends its time in page walks without them. Private, because shared
    mappings, which are Python's default, get no huge pages from Linux as it comes.
    """
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def zeros(shape: int | tuple[int, ...], dtype: type, *, inherited: bool = True) -> np.ndarray:
    """Like numpy.zeros, in a mapping of its own that is unmapped with the array.

    inherited: whether a forked process has it. What a device writes to directly must not be: either process might be left with
    the other's copy of the page.
    """
    count = int(np.prod(shape))
    pages = anonymous(count * np.dtype(dtype).itemsize)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(pages, dtype, count).reshape(shape)

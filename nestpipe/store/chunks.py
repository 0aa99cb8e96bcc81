"""Chunks: memory for records that grows without moving any."""

from __future__ import annotations

import mmap

import numpy as np

from nestpipe.kernels.pages import anonymous
from nestpipe.kernels.rows import Rows

CHUNK_BYTES = 32 << 20


class Chunks:
    """Records of `words` float32 each, at positions 0, 1, 2, ...; growing adds a chunk, so no record is ever copied.

    Pages of a chunk cost memory only once touched; see `pages.anonymous`. One thread may `reserve` while others read and
    write records that are there already: addresses in a `rows` taken before stay right.
    """

    def __init__(self, words: int, *, half: bool) -> None:
        self._stride = words * 4
        self._shift = max(0, (CHUNK_BYTES // self._stride).bit_length() - 1)
        self._maps: list[mmap.mmap] = []
        self._half = half
        self._bases = np.empty(0, np.int64)

    @property
    def rows(self) -> Rows:
        return Rows(self._bases, self._shift, self._stride, self._half)

    @property
    def raw(self) -> Rows:
        """The records as plain float32 words, whatever their values are stored as."""
        return Rows(self._bases, self._shift, self._stride, False)

    def reserve(self, num_records: int) -> None:
        """Makes positions below `num_records` usable."""
        while len(self._maps) << self._shift < num_records:
            chunk = anonymous(self._stride << self._shift)
            self._maps.append(chunk)
            start = np.frombuffer(chunk, np.uint8).ctypes.data
            self._bases = np.append(self._bases, start)

"""CompactIndex: int64 key -> position like HashIndex, in half the memory or less, and back from position to key.

Keys lie once, by position; the hash table holds only positions, in 4 bytes. That is 14 to 20 bytes a key instead of 24 to
48, for one more cache miss a lookup: right where memory is short and rows are on a disk anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import carray

from nestpipe.kernels.index import slots_for
from nestpipe.kernels.jit import inlined, kernel, long_pointer, prefetch
from nestpipe.kernels.keys import AHEAD, ONE, mix
from nestpipe.kernels.pages import zeros
from nestpipe.kernels.rows import NONE, Rows, address

MOST_POSITIONS = 2**32 - 1


@inlined
def _key_at(rows, position):
    return carray(long_pointer(address(rows, position)), 1)[0]


@kernel
def _find(slots, rows, keys, out):
    """A slot holds position + 1, or 0."""
    mask = np.uint64(len(slots) - 1)
    base = slots.ctypes.data
    near = AHEAD // 2
    length = len(keys)
    for i in range(length):
        if i + AHEAD < length:
            prefetch(base + np.int64(mix(keys[i + AHEAD]) & mask) * 4)
        if i + near < length:
            entry = np.int64(slots[mix(keys[i + near]) & mask])
            if entry:
                prefetch(address(rows, entry - 1))
        slot = mix(keys[i]) & mask
        out[i] = -1
        while slots[slot] != 0:
            position = np.int64(slots[slot]) - 1
            if _key_at(rows, position) == keys[i]:
                out[i] = position
                break
            slot = (slot + ONE) & mask


@kernel
def _insert(slots, rows, keys, positions, missing):
    mask = np.uint64(len(slots) - 1)
    for i in missing:
        slot = mix(keys[i]) & mask
        while slots[slot] != 0:
            slot = (slot + ONE) & mask
        slots[slot] = np.uint32(positions[i] + 1)
        carray(long_pointer(address(rows, positions[i])), 1)[0] = keys[i]


@kernel
def _rehash(old, rows, new):
    mask = np.uint64(len(new) - 1)
    for i in range(len(old)):
        if i + AHEAD < len(old) and old[i + AHEAD]:
            prefetch(address(rows, np.int64(old[i + AHEAD]) - 1))
        if old[i] != 0:
            slot = mix(_key_at(rows, np.int64(old[i]) - 1)) & mask
            while new[slot] != 0:
                slot = (slot + ONE) & mask
            new[slot] = old[i]


@kernel
def _delete(slots, rows, keys, out):
    """Removes keys; out[i] = the position keys[i] had, or -1. Returns how many there were."""
    mask = np.uint64(len(slots) - 1)
    deleted = 0
    for i in range(len(keys)):
        hole = mix(keys[i]) & mask
        while slots[hole] != 0 and _key_at(rows, np.int64(slots[hole]) - 1) != keys[i]:
            hole = (hole + ONE) & mask
        out[i] = np.int64(slots[hole]) - 1
        if slots[hole] == 0:
            continue
        deleted += 1
        slot = hole
        while True:
            slot = (slot + ONE) & mask
            if slots[slot] == 0:
                break
            home = mix(_key_at(rows, np.int64(slots[slot]) - 1)) & mask
            # The entry may move into the hole unless its home lies (cyclically) after the hole.
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                slots[hole] = slots[slot]
                hole = slot
        slots[hole] = 0
    return deleted


@kernel
def _keys_at(rows, positions, out):
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(address(rows, positions[i + AHEAD]))
        out[i] = _key_at(rows, positions[i])


@kernel
def _note(rows, positions, keys):
    for i in range(len(positions)):
        carray(long_pointer(address(rows, positions[i])), 1)[0] = keys[i]


class CompactIndex:
    """Distinct keys and their positions (>= 0, below 2^32). A position has one key at a time.

    The caller owns the memory of keys (8 bytes a position) and passes it as Rows, grown to hold every position.
    """

    def __init__(self, capacity: int = 1 << 10) -> None:
        self.key_rows = Rows(NONE, 0, 8, False)
        self._slots = zeros(1 << max(4, (capacity * 2 - 1).bit_length()), np.uint32)
        self._size = 0
        self._top = 0  # positions below it have been used

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def nbytes_with(self, more: int) -> int:
        """The most that inserting `more` keys can take: while they move, the old slots and the new ones."""
        return self.nbytes + slots_for(self._size + more, len(self._slots)) * 4

    def find(self, keys: np.ndarray, out: np.ndarray) -> None:
        """out[i] = position of keys[i], or -1."""
        _find(self._slots, self.key_rows, keys, out)

    def key_at(self, positions: np.ndarray) -> np.ndarray:
        """The key that each position has, or had last."""
        out = np.empty(len(positions), np.int64)
        _keys_at(self.key_rows, positions, out)
        return out

    def note(self, positions: np.ndarray, keys: np.ndarray) -> None:
        """Makes `key_at` tell these keys, which are found elsewhere, of positions that no key here has."""
        _note(self.key_rows, positions, keys)

    def insert(self, keys: np.ndarray, positions: np.ndarray, missing: np.ndarray) -> None:
        """Adds keys[i] -> positions[i] for every i in `missing`; those keys must be distinct and absent."""
        if not len(missing):
            return
        needed = self._size + len(missing)
        self._top = max(self._top, int(positions[missing].max()) + 1)
        if self._top > MOST_POSITIONS:
            raise ValueError(f"more than {MOST_POSITIONS:,} rows on one worker; use more workers")
        grown = slots_for(needed, len(self._slots))
        if grown:
            new = zeros(grown, np.uint32)
            _rehash(self._slots, self.key_rows, new)
            self._slots = new
        _insert(self._slots, self.key_rows, keys, positions, missing)
        self._size = needed

    def delete(self, keys: np.ndarray) -> np.ndarray:
        """Removes keys; returns the position that each had, or -1."""
        positions = np.empty(len(keys), np.int64)
        self._size -= _delete(self._slots, self.key_rows, keys, positions)
        return positions

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys and positions, by position."""
        parts = [(NONE, NONE), *self.blocks()]
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([positions for _, positions in parts])

    def blocks(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All keys and positions like `items`, at most `size` at a time; the index must not change meanwhile."""
        for start in range(0, self._top, size):
            positions = np.arange(start, min(start + size, self._top))
            keys = self.key_at(positions)
            where = np.empty_like(positions)
            self.find(keys, where)
            alive = where == positions  # else the row was given up, or is one of those that rare keys share
            yield keys[alive], positions[alive]

"""HashIndex: int64 key -> position, in batches; grows, deletes, never moves a position.

Open addressing with linear probing; an entry is (key, position) side by side, so that a hit is one cache line. Deleting
shifts the rest of the run back instead of leaving a tombstone: lookups never slow down with age.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nestpipe.kernels.jit import kernel, prefetch
from nestpipe.kernels.keys import AHEAD, ONE, mix
from nestpipe.kernels.pages import zeros

EMPTY = -1


@kernel
def _find(slots, keys, out):
    mask = np.uint64(len(slots) - 1)
    base = slots.ctypes.data
    length = len(keys)
    for i in range(length):
        if i + AHEAD < length:
            prefetch(base + np.int64(mix(keys[i + AHEAD]) & mask) * 16)
        key = keys[i]
        slot = mix(key) & mask
        while slots[slot, 1] != EMPTY and slots[slot, 0] != key:
            slot = (slot + ONE) & mask
        out[i] = slots[slot, 1]


@kernel
def _insert(slots, keys, positions, missing):
    """Gives keys[i] for i in missing the position positions[i]; they must be distinct and absent."""
    mask = np.uint64(len(slots) - 1)
    for i in missing:
        slot = mix(keys[i]) & mask
        while slots[slot, 1] != EMPTY:
            slot = (slot + ONE) & mask
        slots[slot, 0] = keys[i]
        slots[slot, 1] = positions[i]


@kernel
def _assign(slots, keys, positions):
    """Overwrites the positions of keys, all of which must be present."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(keys)):
        slot = mix(keys[i]) & mask
        while slots[slot, 0] != keys[i] or slots[slot, 1] == EMPTY:
            slot = (slot + ONE) & mask
        slots[slot, 1] = positions[i]


@kernel
def _rehash(old, new):
    mask = np.uint64(len(new) - 1)
    for i in range(len(old)):
        if old[i, 1] != EMPTY:
            slot = mix(old[i, 0]) & mask
            while new[slot, 1] != EMPTY:
                slot = (slot + ONE) & mask
            new[slot, 0] = old[i, 0]
            new[slot, 1] = old[i, 1]


@kernel
def _delete(slots, keys, out):
    """Removes keys; out[i] = the position keys[i] had, or EMPTY. Returns how many there were."""
    mask = np.uint64(len(slots) - 1)
    deleted = 0
    for i in range(len(keys)):
        hole = mix(keys[i]) & mask
        while slots[hole, 1] != EMPTY and slots[hole, 0] != keys[i]:
            hole = (hole + ONE) & mask
        out[i] = slots[hole, 1]
        if slots[hole, 1] == EMPTY:
            continue
        deleted += 1
        slot = hole
        while True:
            slot = (slot + ONE) & mask
            if slots[slot, 1] == EMPTY:
                break
            home = mix(slots[slot, 0]) & mask
            # The entry may move into the hole unless its home lies (cyclically) after the hole.
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                slots[hole, 0] = slots[slot, 0]
                slots[hole, 1] = slots[slot, 1]
                hole = slot
        slots[hole, 1] = EMPTY
    return deleted


@kernel
def _items(slots, keys, positions):
    n = 0
    for i in range(len(slots)):
        if slots[i, 1] != EMPTY:
            keys[n] = slots[i, 0]
            positions[n] = slots[i, 1]
            n += 1
    return n


@kernel
def _place(slots, keys, first, step):
    """Gives keys[i] the position first + i * step; returns the first i whose key was there before, or -1."""
    mask = np.uint64(len(slots) - 1)
    base = slots.ctypes.data
    length = len(keys)
    for i in range(length):
        if i + AHEAD < length:
            prefetch(base + np.int64(mix(keys[i + AHEAD]) & mask) * 16)
        slot = mix(keys[i]) & mask
        while slots[slot, 1] != EMPTY:
            if slots[slot, 0] == keys[i]:
                return i
            slot = (slot + ONE) & mask
        slots[slot, 0] = keys[i]
        slots[slot, 1] = first + i * step
    return -1


def fewest_slots(num_keys: int) -> int:
    """That an index which does not grow any more needs: a power of two of which at most two thirds are in use."""
    return 1 << max(4, (-(-3 * num_keys // 2) - 1).bit_length())


def place(slots: np.ndarray, keys: np.ndarray, first: int, *, step: int = 1) -> None:
    """Gives keys[i] the position first + i * step in slots [S, 2] of the caller's: in a file, say. (Slots are empty where the
    second number is EMPTY.) ValueError for a key that is there already."""
    twice = _place(slots, keys, first, step)
    if twice >= 0:
        raise ValueError(f"key {keys[twice]} is there twice")


def find(slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The position of each key in slots that `place` has filled, or EMPTY."""
    out = np.empty(len(keys), np.int64)
    _find(slots, keys, out)
    return out


def slots_for(needed: int, num_slots: int) -> int:
    """How many slots a table of `num_slots` needs to hold so many keys, or 0 if it can stay as it is."""
    return 1 << (needed * 2 - 1).bit_length() if needed * 3 > num_slots * 2 else 0


class HashIndex:
    """Distinct keys and their positions (>= 0)."""

    def __init__(self, capacity: int = 1 << 10) -> None:
        self._slots = self._empty(1 << max(4, (capacity * 2 - 1).bit_length()))
        self._size = 0

    @staticmethod
    def _empty(num_slots: int) -> np.ndarray:
        slots = zeros((num_slots, 2), np.int64)
        slots[:, 1] = EMPTY
        return slots

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def nbytes_with(self, more: int) -> int:
        """The most that inserting `more` keys can take: while they move, the old slots and the new ones."""
        grown = slots_for(self._size + more, len(self._slots))
        return self.nbytes + grown * 16

    def find(self, keys: np.ndarray, out: np.ndarray) -> None:
        """out[i] = position of keys[i], or -1."""
        _find(self._slots, keys, out)

    def insert(self, keys: np.ndarray, positions: np.ndarray, missing: np.ndarray) -> None:
        """Adds keys[i] -> positions[i] for every i in `missing`; those keys must be distinct and absent."""
        needed = self._size + len(missing)
        grown = slots_for(needed, len(self._slots))
        if grown:
            new = self._empty(grown)
            _rehash(self._slots, new)
            self._slots = new
        _insert(self._slots, keys, positions, missing)
        self._size = needed

    def assign(self, keys: np.ndarray, positions: np.ndarray) -> None:
        """Gives keys that are present other positions."""
        _assign(self._slots, keys, positions)

    def delete(self, keys: np.ndarray) -> np.ndarray:
        """Removes keys; returns the position that each had, or -1."""
        positions = np.empty(len(keys), np.int64)
        self._size -= _delete(self._slots, keys, positions)
        return positions

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys and positions, in no particular order."""
        keys, positions = np.empty(self._size, np.int64), np.empty(self._size, np.int64)
        count = _items(self._slots, keys, positions)
        assert count == self._size
        return keys, positions

    def blocks(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All keys and positions like `items`, at most `size` at a time; the index must not change meanwhile."""
        keys, positions = np.empty(size, np.int64), np.empty(size, np.int64)
        for start in range(0, len(self._slots), size):
            count = _items(self._slots[start : start + size], keys, positions)
            yield keys[:count].copy(), positions[:count].copy()

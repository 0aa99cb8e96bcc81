"""Kernels on keys: hash, owner, deduplicate with inverse, bucket by owner.

A key is any int64. Its hash decides everything: the top 16 bits are its *shard* (65,536 of them, whatever the number of
workers), consecutive shards belong to one of the workers that hold the table, its owners, and the low bits place it in
hash tables.
"""

from __future__ import annotations

import hashlib

import numpy as np

from nestpipe.kernels.jit import kernel, prefetch

SHARD_BITS = 16
NUM_SHARDS = 1 << SHARD_BITS
AHEAD = 16  # keys between asking for a cache line and using it
ONE = np.uint64(1)  # to go on by one slot: an unsigned slot and a signed 1 would make a float in Numba

_M1 = np.uint64(0xFF51AFD7ED558CCD)
_M2 = np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S32 = np.uint64(32)
_S33 = np.uint64(33)
_S48 = np.uint64(64 - SHARD_BITS)


@kernel
def mix(key):
    """A bijection of 64 bits in which every input bit moves every output bit (the finalizer of MurmurHash3)."""
    h = np.uint64(key)
    h ^= h >> _S33
    h *= _M1
    h ^= h >> _S33
    h *= _M2
    h ^= h >> _S33
    return h


@kernel
def shard_of(key):
    return np.int64(mix(key) >> _S48)


@kernel
def owner_of(key, owners):
    """Which of the owners holds the key's row: shards are dealt out in consecutive ranges, equal to within one."""
    return owners[np.uint64((shard_of(key) * len(owners)) >> SHARD_BITS)]


@kernel
def _spread(key):
    """One multiplication: enough to place keys in a scratch table, and half the price of `mix`. Read from the top."""
    h = np.uint64(key)
    return (h ^ (h >> _S32)) * _GOLDEN


@kernel
def deduplicate(keys, slots, bits, unique, inverse):
    """unique[:n] = the distinct keys in order of first appearance; inverse[i] = where keys[i] is in it. Returns n.

    slots: scratch of a power of two >= 2 * len(keys) int32, of which the first 2^bits are used to begin with, more as
    distinct keys turn up: a table that fits the cache is what makes skewed keys fast. An entry is place + 1, 0 if empty.
    unique needs len(keys) places. Indices are unsigned where Numba would else test them for being negative.
    """
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(64 - bits)
    limit = 1 << (bits - 1)
    slots[: 1 << bits] = 0
    base = slots.ctypes.data
    n = 0
    last_ahead = len(keys) - AHEAD
    for i in range(len(keys)):
        if i < last_ahead:
            prefetch(base + np.int64(_spread(keys[np.uint64(i + AHEAD)]) >> shift) * 4)
        key = keys[i]
        slot = _spread(key) >> shift
        while True:
            entry = slots[slot]
            if entry == 0:
                unique[np.uint64(n)] = key
                inverse[i] = n
                n += 1
                slots[slot] = n
                break
            place = np.uint64(entry - 1)
            if unique[place] == key:
                inverse[i] = place
                break
            slot = (slot + ONE) & mask
        if n > limit:
            mask = (mask << ONE) | ONE
            shift -= ONE
            limit <<= 1
            slots[: limit << 1] = 0
            for place in range(n):
                slot = _spread(unique[place]) >> shift
                while slots[slot] != 0:
                    slot = (slot + ONE) & mask
                slots[slot] = place + 1
    return n


@kernel
def bucket(unique, owners, owner, counts, start, bucketed, place):
    """Stable counting sort of keys by owner: bucketed[place[i]] = unique[i]; counts[w] = keys of worker w.

    owner: scratch of len(unique) int32; start: scratch of len(counts) int64.
    """
    counts[:] = 0
    for i in range(len(unique)):
        w = owner_of(unique[i], owners)
        owner[i] = w
        counts[w] += 1
    start[0] = 0
    for w in range(1, len(counts)):
        start[w] = start[w - 1] + counts[w - 1]
    for i in range(len(unique)):
        w = owner[i]
        place[i] = start[w]
        bucketed[start[w]] = unique[i]
        start[w] += 1


@kernel
def compose(first, second, out):
    """out[i] = second[first[i]]"""
    for i in range(len(first)):
        out[i] = second[first[i]]


@kernel
def _shards(keys, out):
    for i in range(len(keys)):
        out[i] = shard_of(keys[i])


def shards(keys: np.ndarray) -> np.ndarray:
    """The shard (0 to 65,535) of each key."""
    out = np.empty(len(keys), np.int64)
    _shards(keys, out)
    return out


def owners_of(shards: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The worker that each shard belongs to; see `owner_of`."""
    return owners[(shards * len(owners)) >> SHARD_BITS]


def hashed_name(table: str) -> int:
    """Of a table: 64 bits."""
    return int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")


def row_seeds(table: str, seed: int) -> tuple[np.uint64, np.uint64]:
    """From which, with a key, the first values of a row follow; and, with a shard, those of a row that rare keys share."""
    own = np.uint64(mix(np.uint64(hashed_name(table) ^ (seed % 2**64))))
    return own, np.uint64(mix(own))


class Deduplicator:
    """`deduplicate` with its scratch kept between calls. Not for two threads at once."""

    def __init__(self) -> None:
        self._slots = np.empty(1 << 12, np.int32)
        self._expected = 0  # distinct keys last time

    def __call__(self, keys: np.ndarray, unique: np.ndarray, inverse: np.ndarray) -> int:
        needed = 1 << max(12, (2 * len(keys) - 1).bit_length())
        if needed > len(self._slots):
            self._slots = np.empty(needed, np.int32)
        bits = min(max(12, (3 * self._expected).bit_length()), needed.bit_length() - 1)
        self._expected = deduplicate(keys, self._slots, bits, unique, inverse)
        return self._expected

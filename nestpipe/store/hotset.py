"""HotSet: the records of a disk table that are in memory, newer than those in its file."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from nestpipe.kernels import records
from nestpipe.kernels.compact import CompactIndex
from nestpipe.kernels.pages import anonymous
from nestpipe.kernels.rows import NONE, gather, one_chunk
from nestpipe.store.rowfile import RowFile

# Stamps of slots that are not for the taking; others hold the number of the `put` that wrote them last.
BUSY, FREE = np.iinfo(np.int32).max - 1, np.iinfo(np.int32).max
INDEX_BYTES = 12  # of the index, for each row there is room for, at most
ROW_BYTES = 8 + 4 + INDEX_BYTES + 8  # beside the record: position, stamp, index, and what choosing victims takes


class _Job(NamedTuple):
    """Rows on their way to the file. They stay in their slots, and readable, until they are there."""

    future: Future[None]
    slots: np.ndarray
    positions: np.ndarray


class HotSet:
    """At most `capacity` records by position. `put` makes room by writing those to the file that were put longest ago.

    Written by one background thread, a sixteenth of the set at a time, begun when an eighth is left: `put` only waits if
    that is not soon enough. A row that is put again while it is being written gets another slot, so that what is written is
    never half of two versions. If writing fails, the next call raises the error, and the rows are still here.
    """

    def __init__(self, file: RowFile, key_at: Callable[[np.ndarray], np.ndarray], *, capacity: int) -> None:
        self._file, self._key_at = file, key_at
        self.capacity = self._most = capacity
        words = file.layout.words
        self._maps = [(anonymous(capacity * width), width) for width in (words * 4, 8, 4)]
        starts = [np.frombuffer(pages, np.uint8).ctypes.data for pages, _ in self._maps]
        self.rows = one_chunk(starts[0], words * 4)
        self._stamps = np.frombuffer(self._maps[2][0], np.int32, capacity)
        self._positions = np.frombuffer(self._maps[1][0], np.int64, capacity)
        self._index = CompactIndex(capacity * 3 // 4)  # never needs to grow: it is two thirds full at most
        self._index.key_rows = one_chunk(starts[1], 8)
        self._free = NONE
        self._high = 0  # slots from here on have not been used
        self._clock = 0
        self._job: _Job | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-back")
        self.written = 0  # rows

    def __len__(self) -> int:
        """Slots in use, those of rows that are being written included."""
        return self._high - len(self._free)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + len(self) * (self.rows.stride + 12)

    @property
    def index_bytes(self) -> int:
        """Made for the most rows it will have: does not shrink with the rest."""
        return self._index.nbytes

    @property
    def _available(self) -> int:
        return len(self._free) + self.capacity - self._high

    def find(self, positions: np.ndarray) -> np.ndarray:
        """The slot of each position in `rows`, or -1."""
        slots = np.empty(len(positions), np.int64)
        self._index.find(positions, slots)
        return slots

    def put(self, positions: np.ndarray, rows: np.ndarray) -> None:
        """Stores rows of distinct positions. After an error it can be called again with the same."""
        self.poll()
        size = max(1, self.capacity // 4)  # so that there are always others to make room
        for start in range(0, len(positions), size):
            self._put(positions[start : start + size], rows[start : start + size])
        if self._job is None and self._available < self.capacity // 8:
            self._start(self.capacity // 16)

    def _put(self, positions: np.ndarray, rows: np.ndarray) -> None:
        self._clock += 1
        slots = self._kept(positions)
        self._stamps[slots[slots >= 0]] = self._clock  # first, so that making room does not take them
        self._make_room(int((slots < 0).sum()))
        # Nothing is let go before there is room: whatever fails, the newest version of every row is here.
        slots = self._kept(positions)
        missing = np.flatnonzero(slots < 0)
        self._index.delete(positions[missing])
        slots[missing] = self._take(len(missing))
        self._index.insert(positions, slots, missing)
        self._stamps[slots] = self._clock
        records.put(rows, slots, self.rows)

    def _kept(self, positions: np.ndarray) -> np.ndarray:
        """The slot that a new version of each position goes to, or -1: a slot that is being written is not changed."""
        slots = self.find(positions)
        hot = np.flatnonzero(slots >= 0)
        slots[hot[self._stamps[slots[hot]] == BUSY]] = -1
        return slots

    def discard(self, positions: np.ndarray) -> None:
        """Forgets what it has of these positions."""
        slots = self._index.delete(positions)
        slots = slots[slots >= 0]
        self._release(slots[self._stamps[slots] != BUSY])  # the others when they are written

    def poll(self) -> None:
        """Takes note of what has been written; raises what went wrong."""
        if self._job is not None and self._job.future.done():
            self._finish()

    def drain(self) -> None:
        """Waits for what is being written."""
        if self._job is not None:
            self._finish()

    def resize(self, capacity: int) -> None:
        """Room for so many rows, not more than there was at the start; memory beyond it goes back to the system."""
        capacity = min(capacity, self._most)
        if capacity < self.capacity:
            self._clock += 1  # every row may go
            while len(self) > capacity:
                self._make_room_once(len(self) - capacity)
            self.drain()  # a slot that is being written cannot move
            self._compact(capacity)
        self.capacity = capacity

    def close(self) -> None:
        try:
            self.drain()
        finally:
            self._thread.shutdown()

    # -- slots -------------------------------------------------------------------------------------------------------

    def _take(self, n: int) -> np.ndarray:
        reused, self._free = self._free[:n], self._free[n:]
        fresh = np.arange(self._high, self._high + n - len(reused))
        self._high += len(fresh)
        assert self._high <= self.capacity
        return np.concatenate([reused, fresh])

    def _release(self, slots: np.ndarray) -> None:
        self._stamps[slots] = FREE
        self._free = np.concatenate([self._free, slots])

    def _compact(self, capacity: int) -> None:
        """Moves the rows of slots from `capacity` on to lower ones."""
        top = min(self._high, capacity)
        moving = capacity + np.flatnonzero(self._stamps[capacity : self._high] != FREE)
        self._free = self._free[self._free < capacity]
        self._high = top
        size = max(1, (8 << 20) // self.rows.stride)
        old_capacity, self.capacity = self.capacity, capacity
        for start in range(0, len(moving), size):
            slots = moving[start : start + size]
            positions, stamps = self._positions[slots], self._stamps[slots]
            block = np.empty((len(slots), self.rows.stride // 4), np.float32)
            gather(self.rows, slots, NONE, block)
            self._index.delete(positions)
            targets = self._take(len(slots))
            self._index.insert(positions, targets, np.arange(len(slots)))
            self._stamps[targets] = stamps
            records.put(block, targets, self.rows)
        for pages, width in self._maps:
            first, end = (-(-bound * width // mmap.PAGESIZE) * mmap.PAGESIZE for bound in (capacity, old_capacity))
            end = min(end, len(pages))
            if end > first:
                pages.madvise(mmap.MADV_DONTNEED, first, end - first)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _make_room(self, n: int) -> None:
        while self._available < n:
            self._make_room_once(n - self._available)

    def _make_room_once(self, n: int) -> None:
        if self._job is None:
            self._start(max(self.capacity // 16, n))
        else:
            self._finish()

    def _start(self, n: int) -> None:
        """Begins to write the n rows that were put longest ago."""
        stamps = self._stamps[: self._high]
        n = min(n, int((stamps < max(1, self._clock)).sum()))
        if n == 0:
            return
        bound = np.partition(stamps, n - 1)[n - 1]
        below, tied = np.flatnonzero(stamps < bound), np.flatnonzero(stamps == bound)
        slots = np.concatenate([below, tied[: n - len(below)]])
        slots = slots[np.argsort(self._positions[slots])]
        positions = self._positions[slots]
        keys = self._key_at(positions)  # now: a position may have another key by the time it is written
        self._stamps[slots] = BUSY
        future = self._thread.submit(self._file.write, positions, keys, slots, self.rows)
        self._job = _Job(future, slots, positions)

    def _finish(self) -> None:
        assert self._job is not None
        job, problem = self._job, self._job.future.exception()
        self._job = None
        current = self.find(job.positions) == job.slots  # else there is a newer version, or it was discarded
        if problem is not None:
            self._stamps[job.slots[current]] = 0
            self._release(job.slots[~current])
            raise problem
        self._index.delete(job.positions[current])
        self._release(job.slots)
        self.written += len(job.slots)

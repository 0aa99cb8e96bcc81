"""Versions: debug mode. Every copy of a row carries the number of the batch that last updated it, checked at every read."""

from __future__ import annotations

import threading

import numpy as np

from nestpipe.engine.buffers import DualBuffer
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore

NEVER = -1


class Versions:
    """Raises AssertionError where a batch reads a row that is not as the last batch before it that used the row left it.

    stale_by: updates that the schedule says a row may be behind: those of so many batches right before need not be in it.
    Follows the rows of each table by position, in the same way as the rows themselves: in place, or from the tier into a
    buffer, from buffer to buffer, and back.
    """

    def __init__(self, stores: list[MemoryStore | DiskStore], stale_by: int = 0) -> None:
        self._stores, self._stale_by = stores, stale_by
        self._lock = threading.Lock()  # its arrays grow; the rows themselves do not move
        # By position: the last batches that looked it up, newest first; and the version of the row in its store.
        self._users = [np.empty((stale_by + 1, 0), np.int64) for _ in stores]
        self._home = [np.empty((1, 0), np.int64) for _ in stores]
        # By batch: the oldest and the newest version that it may read of each row.
        self._expected: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in stores]
        self._positions: list[dict[int, np.ndarray]] = [{} for _ in stores]
        self._copies: list[dict[int, np.ndarray]] = [{} for _ in stores]  # by batch: version of each row of its buffer

    def retrieve(self, k: int, batch: int, positions: np.ndarray, buffer: DualBuffer | None) -> None:
        with self._lock:
            born = np.concatenate([np.empty(0, np.int64), *(births.positions for births in self._stores[k].births)])
            for of_position in (self._users, self._home):
                depth, length = of_position[k].shape
                highest = int(max(positions.max(initial=-1), born.max(initial=-1)))
                short = highest + 1 - length
                if short > 0:
                    longer = np.full((depth, short + highest // 2), NEVER)
                    of_position[k] = np.concatenate([of_position[k], longer], axis=1)
                of_position[k][:, born] = NEVER
            users = self._users[k][:, positions]
            must_have = np.argmax(users < batch - self._stale_by, axis=0)  # the newest of those that are not too near
            self._expected[k][batch] = users[must_have, np.arange(len(positions))], users[0]
            self._positions[k][batch] = positions
            self._users[k][1:, positions] = users[:-1]
            self._users[k][0, positions] = batch
            if buffer is not None:
                copies = np.full(len(positions), NEVER - 1)
                wanted = buffer.of(batch).wanted
                copies[wanted] = self._home[k][0, positions[wanted]]
                self._copies[k][batch] = copies
                self._copies[k].pop(batch - 2, None)

    def sync(self, k: int, batch: int, buffer: DualBuffer) -> None:
        with self._lock:
            here = buffer.of(batch)
            if len(here.went_to):
                self._copies[k][batch][here.went_to] = self._copies[k][batch - 1][here.came_from]

    def read(self, k: int, table: str, batch: int) -> None:
        with self._lock:
            positions, (oldest, newest) = self._positions[k][batch], self._expected[k].pop(batch)
            versions = self._copies[k][batch] if batch in self._copies[k] else self._home[k][0, positions]
            wrong = np.flatnonzero((versions < oldest) | (versions > newest))
            assert not len(wrong), (
                f"table {table!r}: batch {batch} reads {len(wrong)} rows that are not fresh, the first at position "
                f"{positions[wrong[0]]}: last updated by batch {versions[wrong[0]]}, last used by batch {newest[wrong[0]]}"
                + (f" (and it may be {self._stale_by} behind)" if self._stale_by else "")
            )

    def update(self, k: int, batch: int, buffer: DualBuffer | None) -> None:
        with self._lock:
            positions = self._positions[k].pop(batch)
            if buffer is None:
                self._home[k][0, positions] = batch
            else:
                self._copies[k][batch][:] = batch

    def writeback(self, k: int, batch: int, positions: np.ndarray, buffer: DualBuffer) -> None:
        with self._lock:
            self._home[k][0, positions] = self._copies[k][batch]

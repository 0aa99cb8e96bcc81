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

    Follows the rows of each table by position, in the same way as the rows themselves: in place, or from the tier into a
    buffer, from buffer to buffer, and back.
    """

    def __init__(self, stores: list[MemoryStore | DiskStore]) -> None:
        self._stores = stores
        self._lock = threading.Lock()  # its arrays grow; the rows themselves do not move
        self._last_user = [np.empty(0, np.int64) for _ in stores]  # by position: the last batch that looked it up
        self._home = [np.empty(0, np.int64) for _ in stores]  # by position: version of the row in its store
        self._expected: list[dict[int, np.ndarray]] = [{} for _ in stores]  # by batch
        self._positions: list[dict[int, np.ndarray]] = [{} for _ in stores]
        self._copies: list[dict[int, np.ndarray]] = [{} for _ in stores]  # by batch: version of each row of its buffer

    def retrieve(self, k: int, batch: int, positions: np.ndarray, buffer: DualBuffer | None) -> None:
        with self._lock:
            born = np.concatenate([np.empty(0, np.int64), *(births.positions for births in self._stores[k].births)])
            for of_position in (self._last_user, self._home):
                highest = int(max(positions.max(initial=-1), born.max(initial=-1)))
                short = highest + 1 - len(of_position[k])
                if short > 0:
                    of_position[k] = np.concatenate([of_position[k], np.full(short + highest // 2, NEVER)])
                of_position[k][born] = NEVER
            self._expected[k][batch] = self._last_user[k][positions]
            self._positions[k][batch] = positions
            self._last_user[k][positions] = batch
            if buffer is not None:
                copies = np.full(len(positions), NEVER - 1)
                wanted = buffer.of(batch).wanted
                copies[wanted] = self._home[k][positions[wanted]]
                self._copies[k][batch] = copies
                self._copies[k].pop(batch - 2, None)

    def sync(self, k: int, batch: int, buffer: DualBuffer) -> None:
        with self._lock:
            here = buffer.of(batch)
            if len(here.went_to):
                self._copies[k][batch][here.went_to] = self._copies[k][batch - 1][here.came_from]

    def read(self, k: int, table: str, batch: int) -> None:
        with self._lock:
            positions, expected = self._positions[k][batch], self._expected[k].pop(batch)
            versions = self._copies[k][batch] if batch in self._copies[k] else self._home[k][positions]
            wrong = np.flatnonzero(versions != expected)
            assert not len(wrong), (
                f"table {table!r}: batch {batch} reads {len(wrong)} rows that are not fresh, the first at position "
                f"{positions[wrong[0]]}: last updated by batch {versions[wrong[0]]}, last used by batch {expected[wrong[0]]}"
            )

    def update(self, k: int, batch: int, buffer: DualBuffer | None) -> None:
        with self._lock:
            positions = self._positions[k].pop(batch)
            if buffer is None:
                self._home[k][positions] = batch
            else:
                self._copies[k][batch][:] = batch

    def writeback(self, k: int, batch: int, positions: np.ndarray, buffer: DualBuffer) -> None:
        with self._lock:
            self._home[k][positions] = self._copies[k][batch]

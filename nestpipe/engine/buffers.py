"""DualBuffer: the two working buffers of a table in a lower tier."""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.rows import Rows, gather, rows_of
from nestpipe.store.disk import DiskStore


@dataclasses.dataclass
class Buffer:
    """The records (values and optimizer state) of one batch's rows.

    came_from, went_to: rows that the batch before has too: row came_from[i] there is row went_to[i] here.
    """

    records: np.ndarray
    batch: int = -1  # nobody's
    positions: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    came_from: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    went_to: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    wanted: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))  # rows read from the tier


class DualBuffer:
    """While batch t trains on its buffer, the rows of batch t + 1 are read into the other one; then they swap roles.

    A row that both use is not read: batch t is about to change it. `sync` copies it over, once batch t has.
    """

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self._two = [Buffer(np.empty((0, store.record_words), np.float32)) for _ in range(2)]

    def forget(self) -> None:
        for buffer in self._two:
            buffer.batch = -1

    def of(self, batch: int) -> Buffer:
        buffer = self._two[batch % 2]
        assert buffer.batch == batch, f"the buffer of batch {batch} has been given to batch {buffer.batch}"
        return buffer

    def fill(self, batch: int, positions: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Reads the rows at these distinct positions of the tier, but for those of the batch before; returns where they
        are, as rows 0, 1, 2, ..."""
        before, buffer = self._two[(batch - 1) % 2], self._two[batch % 2]
        if len(buffer.records) < len(positions):
            room = len(positions) + len(positions) // 8
            buffer.records = np.empty((room, self.store.record_words), np.float32)
        came_from = np.full(len(positions), -1, np.int64)
        if before.batch == batch - 1:
            index = HashIndex(len(before.positions))
            numbers = np.arange(len(before.positions))
            index.insert(before.positions, numbers, numbers)
            index.find(positions, came_from)
        buffer.batch, buffer.positions = batch, positions
        buffer.went_to = np.flatnonzero(came_from >= 0)
        buffer.came_from = came_from[buffer.went_to]
        buffer.wanted = np.flatnonzero(came_from < 0)
        self.store.fill(positions, buffer.records[: len(positions)], buffer.wanted)
        return self.store.rows_in(buffer.records), np.arange(len(positions))

    def sync(self, batch: int) -> None:
        buffer = self.of(batch)
        if len(buffer.went_to):
            gather(rows_of(self.of(batch - 1).records), buffer.came_from, buffer.went_to, buffer.records)

    def write_back(self, batch: int, positions: np.ndarray) -> None:
        self.store.write_back(positions, self.of(batch).records[: len(positions)])

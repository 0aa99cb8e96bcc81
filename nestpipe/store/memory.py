"""MemoryStore: one worker's part of one table, in memory."""

from __future__ import annotations

import numpy as np

from nestpipe.kernels import records
from nestpipe.kernels.rows import NONE, Rows, gather
from nestpipe.kernels.update import Gradients
from nestpipe.store.chunks import Chunks
from nestpipe.store.directory import Directory
from nestpipe.store.table_store import ALONE, StoreStats, TableStore
from nestpipe.tables import Table

__all__ = ["MemoryStore", "StoreStats"]


class MemoryStore(TableStore):
    """Rows by key: found, born, updated, given up, all in place.

    Growing never moves a row, so `update` and readers of `rows` in another thread are not disturbed by a `resolve`; see
    TableStore for which thread may call what.
    """

    def __init__(self, table: Table, *, seed: int, owners: np.ndarray = ALONE) -> None:
        super().__init__(table, Directory(table, seed=seed, num_owners=len(owners)), seed=seed, owners=owners)
        self._chunks = Chunks(self.record_words, half=self.half)

    @property
    def rows(self) -> Rows:
        """Where rows lie, for gather and pool."""
        return self._chunks.rows

    def resolve(self, keys: np.ndarray, step: int) -> np.ndarray:
        """The position of each of these distinct keys; rows are born, counted and given up as the table says."""
        positions, self.births = self.directory.resolve(keys, step)
        self._chunks.reserve(self.directory.used)
        for births in self.births:
            self._bear(self.rows, births)
        self.mark(positions, step)
        return positions

    def read(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """out[i] = values at positions[i], or what keys[i] would be born with where the position is negative."""
        gather(self.rows, positions, NONE, out)
        self._read_unborn(keys, positions, out)

    def update(
        self,
        positions: np.ndarray,
        grads: Gradients,
        scale: float,
        rows: Rows | None = None,
        sharers: np.ndarray = NONE,
        lr: float | None = None,
    ) -> None:
        """Applies the row optimizer once to distinct positions (of `rows`, or of the store's own), whose gradients are
        summed and multiplied by scale. sharers: see Occasion. lr: if not the one that is set now."""
        self._update(self.rows if rows is None else rows, positions, grads, scale, sharers, lr)

    def words(self, positions: np.ndarray) -> np.ndarray:
        out = np.empty((len(positions), self.record_words), np.float32)
        gather(self._chunks.raw, positions, NONE, out)
        return out

    def put(self, keys: np.ndarray, rows: np.ndarray, *, shared: bool = False) -> None:
        positions = self.directory.restore(keys, rows[:, self.record_words :], shared=shared)
        self._chunks.reserve(self.directory.used)
        records.put(np.ascontiguousarray(rows[:, : self.record_words]), positions, self._chunks.raw)
        self.mark(positions, 0)

    def _overwrite(self, positions: np.ndarray, words: np.ndarray, new: np.ndarray) -> None:
        self._chunks.reserve(self.directory.used)
        records.put(words, positions, self._chunks.raw)

    def stats(self) -> StoreStats:
        self.directory.sweep()
        of = self.directory
        rows = of.in_use * self._chunks.rows.stride
        return StoreStats(len(of), len(of.shared), rows + of.nbytes, of.born, of.evicted)

"""DiskStore: one worker's part of one table, in a file; keys, counters and the rows used last in memory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import numpy as np

from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.keys import mix
from nestpipe.kernels.rows import NONE, Rows, gather, one_chunk
from nestpipe.kernels.update import Gradients
from nestpipe.store.directory import Births, Directory
from nestpipe.store.hotset import INDEX_BYTES, ROW_BYTES, HotSet
from nestpipe.store.rowfile import RowFile
from nestpipe.store.table_store import ALONE, StoreStats, TableStore
from nestpipe.store.undo import FrozenFile
from nestpipe.tables import Table

MIN_ROWS = 1024  # hot rows below which a table is not worth starting
SCRATCH_BYTES = 64  # for each row of a batch while it is looked up
OWN, SHARED = 0, 1


class DiskStore(TableStore):
    """Rows by key in a file bigger than memory; a batch works on copies.

        positions = store.resolve(keys, step)        # key work only: rows are born, counted and given up
        store.fill(positions, records, wanted)       # copies of rows into the batch's buffer
        store.update(places, grads, scale, rows)     # in the buffer
        store.write_back(positions, records)         # and back, before the resolve after the next

    folder: where the file lies; working storage, deleted by `close`, not a checkpoint.
    hot_rows: at most so many rows in memory, however large the budget.

    `Table.memory` bounds everything of the table that is in memory, the two buffers of the caller included: what the key
    index needs comes first, and the hot set gives way as that grows.
    """

    def __init__(
        self,
        table: Table,
        *,
        seed: int,
        folder: Path | str,
        owners: np.ndarray = ALONE,
        rank: int = 0,
        hot_rows: int | None = None,
    ) -> None:
        directory = Directory(table, seed=seed, num_owners=len(owners), compact=True)
        super().__init__(table, directory, seed=seed, owners=owners)
        self._hot_rows = hot_rows if rank in owners else 1  # nobody will ask this worker for any
        self._part = table.memory_bytes // len(owners)
        self._buffers = 0  # bytes of the caller's two, and of scratch
        self._hot_index = 0  # bytes; not known before there is a hot set
        self._unborn = HashIndex()  # position -> OWN or SHARED, of rows that are nowhere yet: not written back once
        self.hits = self.reads = 0
        path = Path(folder) / f"{quote(table.name, safe='')}.{rank}.rows"
        tag = np.uint64(mix(self.directory.seed + np.uint64(rank)))
        self.file = RowFile(path, table.name, words=self.record_words, tag=tag)
        self._source: RowFile | FrozenFile = self.file  # that rows are read from
        try:
            capacity = self._affordable(0)
            self._hot = HotSet(self.file, self.directory.key_at, capacity=capacity)
            self._hot_index = self._hot.index_bytes
        except BaseException:
            self.file.close()
            raise

    # -- one batch ---------------------------------------------------------------------------------------------------

    def resolve(self, keys: np.ndarray, step: int) -> np.ndarray:
        """The position of each of these distinct keys; the rows themselves come with `fill`."""
        self._expect_buffers(len(keys), len(keys) * self.record_words * 4)
        self._fit(keys)
        positions, self.births = self.directory.resolve(keys, step)
        for births in self.births:
            self._expect(births)
        self.mark(positions, step)
        return positions

    def fill(self, positions: np.ndarray, records: np.ndarray, wanted: np.ndarray) -> None:
        """records[i] = the record (values and optimizer state) at positions[i], for every i in wanted.

        positions: distinct. The other entries are left alone: they are for the caller to copy from the batch before, which
        has newer ones. This may run while rows are written in the background.
        """
        assert records.dtype == np.float32 and records.shape == (len(positions), self.record_words)
        buffer = records if records.base is None else records.base  # the caller may have made it larger than it needs
        self._expect_buffers(len(positions), buffer.nbytes)
        self._hot.poll()
        hits, reads = self._fetch(positions[wanted], records, wanted)
        self.hits += hits
        self.reads += reads

    def update(
        self,
        positions: np.ndarray,
        grads: Gradients,
        scale: float,
        rows: Rows | None = None,
        sharers: np.ndarray = NONE,
        lr: float | None = None,
    ) -> None:
        """Applies the row optimizer once to distinct positions of `rows`, the batch's buffer, whose gradients are summed
        and multiplied by scale. sharers: see Occasion. lr: if not the one that is set now."""
        assert rows is not None, "the rows of a disk table are in the batch's buffer"
        self._update(rows, positions, grads, scale, sharers, lr)

    def write_back(self, positions: np.ndarray, records: np.ndarray) -> None:
        """Stores the records of a finished batch. What an error leaves unfinished may be written back again."""
        stored = positions
        try:
            self._hot.put(positions, records)
        except BaseException:
            stored = positions[self._hot.find(positions) >= 0]
            raise
        finally:
            self._unborn.delete(stored)

    def rows_in(self, records: np.ndarray) -> Rows:
        """A buffer of records as Rows, for update, gather and pool."""
        assert records.dtype == np.float32 and records.flags.c_contiguous and records.shape[1] == self.record_words
        return one_chunk(records.ctypes.data, self.record_words * 4, half=self.half)

    # -- evaluation, digest, checkpoint ------------------------------------------------------------------------------

    def read(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """out[i] = values at positions[i], or what keys[i] would be born with where the position is negative."""
        born = np.flatnonzero(positions >= 0)
        distinct, back = np.unique(positions[born], return_inverse=True)  # rare keys may share a position
        size = self._block_rows
        for start in range(0, len(distinct), size):
            block = self.words(distinct[start : start + size])
            here = np.flatnonzero((back >= start) & (back < start + size))
            gather(self.rows_in(block), back[here] - start, born[here], out)
        self._read_unborn(keys, positions, out)

    def words(self, positions: np.ndarray) -> np.ndarray:
        out = np.empty((len(positions), self.record_words), np.float32)
        self._fetch(positions, out, np.arange(len(positions)))
        return out

    def put(self, keys: np.ndarray, rows: np.ndarray, *, shared: bool = False) -> None:
        self._fit(keys)
        positions = self.directory.restore(keys, rows[:, self.record_words :], shared=shared)
        self._hot.put(positions, np.ascontiguousarray(rows[:, : self.record_words]))
        self.mark(positions, 0)

    def check_room(self, keys: np.ndarray) -> None:
        super().check_room(keys)
        self._affordable(self.directory.num_missing(keys))

    def give(self, keys: np.ndarray, words: np.ndarray, step: int) -> None:
        self._fit(keys)
        super().give(keys, words, step)

    def _overwrite(self, positions: np.ndarray, words: np.ndarray, new: np.ndarray) -> None:
        self._hot.discard(positions[new])  # rows given up before
        self.write_back(positions, words)

    def put_sightings(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self._fit(keys)
        super().put_sightings(keys, counts)

    def freeze(self) -> None:
        self.file.freeze()

    def thaw(self) -> None:
        self.file.thaw()

    def open_frozen(self) -> None:
        self._source = self.file.frozen()

    def close_frozen(self) -> None:
        if isinstance(self._source, FrozenFile):
            self._source.close()
            self._source = self.file

    def stats(self) -> StoreStats:
        self.directory.sweep()
        of = self.directory
        return StoreStats(len(of), len(of.shared), self.nbytes, of.born, of.evicted, hot_rows=len(self._hot),
                          file_bytes=self.file.num_bytes, hits=self.hits, reads=self.reads,
                          writes=self._hot.written)  # fmt: skip

    def close(self) -> None:
        """Ends its threads and deletes its file."""
        try:
            self._hot.close()
        finally:
            self.file.close()

    # -- where a row is ----------------------------------------------------------------------------------------------

    def _expect(self, births: Births) -> None:
        """New rows are nowhere yet; what the hot set has at their positions are rows given up before."""
        kind = SHARED if births.seed == self.directory.shared_seed else OWN
        self._hot.discard(births.positions)
        self._unborn.delete(births.positions)
        self._unborn.insert(births.positions, np.full(len(births.positions), kind), np.arange(len(births.positions)))

    def _fetch(self, positions: np.ndarray, out: np.ndarray, targets: np.ndarray) -> tuple[int, int]:
        """out[targets[i]] = the record at positions[i]. Returns how many were in memory, and how many in the file."""
        slots = self._hot.find(positions)
        gather(self._hot.rows, slots, targets, out)
        rest = np.flatnonzero(slots < 0)
        unborn = np.empty(len(rest), np.int64)
        self._unborn.find(positions[rest], unborn)
        for kind, seed in ((OWN, self.directory.seed), (SHARED, self.directory.shared_seed)):
            new = rest[unborn == kind]
            if len(new):
                self._bear(self.rows_in(out), Births(seed, self.directory.key_at(positions[new]), targets[new]))
        cold = rest[unborn < 0]
        if len(cold):
            cold = cold[np.argsort(positions[cold])]
            where = positions[cold]
            self._source.read(where, self.directory.key_at(where), targets[cold], out)
        return len(positions) - len(rest), len(cold)

    # -- the budget --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """What it takes of memory now, the caller's buffers included."""
        return self.directory.nbytes + self._unborn.nbytes + self._buffers + self.file.nbytes + self._hot.nbytes

    def _expect_buffers(self, num_rows: int, num_bytes: int) -> None:
        self._buffers = max(self._buffers, 2 * num_bytes + SCRATCH_BYTES * num_rows)

    def _fit(self, keys: np.ndarray) -> None:
        """Shrinks the hot set before the key index grows; lets it grow again when the index has moved."""
        capacity = self._hot.capacity
        rows = self._affordable(len(keys), strict=False)
        if rows < capacity:  # count, before anything is written for the sake of rows that exist
            rows = self._affordable(self.directory.num_missing(keys))
        # A little less than there is room for, and back only for much more: rows are moved once in many batches.
        if rows < capacity or rows - rows // 8 > capacity:
            self._hot.resize(rows - rows // 32)

    def _affordable(self, more: int, *, strict: bool = True) -> int:
        """How many hot rows fit beside everything else, if so many keys are added to the index."""
        index = self.directory.nbytes_with(more) + self._unborn.nbytes_with(more)
        others = self._buffers + self.file.nbytes + self._hot_index
        row_bytes = self.record_words * 4 + ROW_BYTES - (INDEX_BYTES if self._hot_index else 0)
        rows = (self._part - index - others) // row_bytes
        least = MIN_ROWS if self._hot_rows is None else self._hot_rows
        if strict and rows < least:
            workers = len(self.owners)
            needed = (index + others + 4 * least * row_bytes) * workers
            every = self.table.sync_every
            window = f", or average more often: sync_every={every} holds the rows of so many steps" if every > 1 else ""
            raise ValueError(
                f"table {self.table.name!r}: memory={self.table.memory or self.table.memory_bytes!r} is too little: on this "
                f"worker (1 of {workers}) the index of {len(self.directory) + more:,} keys takes {index:,} bytes and buffers "
                f"{others:,} of {self._part:,}, which leaves no room for rows; give it "
                f"memory={_megabytes(needed)!r} or more{window}"
            )
        return max(0, rows if self._hot_rows is None else min(rows, self._hot_rows))


def _megabytes(size: int) -> str:
    return f"{-(-size // 10**6)}MB"

"""RowFile: records by position in a plain file, read and written in batches, with many blocks under way at once.

Why a plain file and not an embedded key-value store: keys are resolved in memory anyway (births, admission and eviction need
that), so a row's place is a multiplication away, and a read is one of the block it lies in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nestpipe.errors import NO_ROOM, StorageError
from nestpipe.kernels import aio, blocks
from nestpipe.kernels.aio import Ring
from nestpipe.kernels.blocks import Layout
from nestpipe.kernels.rows import NONE, Rows, rows_of
from nestpipe.store.undo import NO_BLOCKS, SUFFIX, FrozenFile, Undo, free_all

PAGE = 4096
EXTENT_BYTES = 64 << 20  # by which the file grows
DEPTH, UNIT_BYTES = 128, 16 << 10  # how much is under way, asynchronously: so many pieces of so much at most
ATTEMPTS = 4  # to grow, where there is no room
THREADS, BOUNCE_BYTES = 16, 128 << 10  # the same where that cannot be done


_held: set[Path] = set()  # files that this process has locked, by their absolute paths


class RowFile:
    """Working storage for the rows of one table on one worker: empty at the start, deleted by `close`.

    The page cache is left out (O_DIRECT) where the file system allows it, so that the memory the table takes is the memory
    it says; `direct` tells. With it, blocks are moved asynchronously if the system can, by the thread that calls; otherwise
    by several threads. `read` may run while another thread is in `write`, for other positions: where they share a block,
    the bytes of a position that is not written are written back as they were.

    `freeze` keeps the file as it is for a forked process, which reads it with the `frozen` file, while this one goes on.

    A file that another process uses is refused. One that this process uses (a cell of a notebook that is run again makes its new
    trainer before the old one is dropped) has the next one stand beside it, with a number in its name.
    """

    def __init__(self, path: Path, table: str, *, words: int, tag: np.uint64) -> None:
        self.path, self.table = _beside(path), table
        per_block, block_bytes = block_shape(words * 4 + 16)
        self.layout = Layout(words, per_block, block_bytes, tag)
        self.num_bytes = 0  # allocated so far
        self._fd, self.direct = self._open()
        self._undo: Undo | None = None
        self._rings = self._make_rings(), self._make_rings()  # for reading, for writing
        self._pool = ThreadPoolExecutor(2 * THREADS, thread_name_prefix="row-file")  # starts none that is not needed

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(ring.nbytes for rings in self._rings for ring in rings)

    def describe(self) -> str:
        how = "without the page cache" if self.direct else "through the page cache: this file system refuses O_DIRECT"
        how += "" if self._rings[0][0].context else f"; by {THREADS} threads"
        return f"{self.path} ({how}; {self.layout.per_block} rows to a block of {self.layout.block_bytes} bytes)"

    def read(self, positions: np.ndarray, keys: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
        """out[targets[i]] = the record of keys[i], which was written at positions[i] (ascending). One thread at a time."""
        self._run(False, positions, keys, targets, rows_of(out))

    def write(self, positions: np.ndarray, keys: np.ndarray, sources: np.ndarray, rows: Rows) -> None:
        """Puts record sources[i] of rows at positions[i] (ascending), as that of keys[i]. One thread at a time."""
        if len(positions):
            self._grow(int(positions[-1]))
            undo = self._undo
            self._run(True, positions, keys, sources, rows, undo if undo is not None and undo.wanted() else None)

    def freeze(self) -> None:
        """From here on what the file holds now can be read by the `frozen` file, in a process that is forked now."""
        self.thaw()
        try:
            block_bytes = self.layout.block_bytes
            self._undo = Undo(self._undo_path, self.num_bytes // block_bytes, block_bytes)
        except OSError as error:
            raise self._error(f"cannot be kept as it is: {error}", error.errno) from error
        # The kernel is loaded now: a forked process must not take the locks that loading takes.
        self.read(NONE, NONE, NONE, np.empty((0, self.layout.words), np.float32))

    def thaw(self) -> None:
        """Forgets what was frozen."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.delete()

    def frozen(self) -> FrozenFile:
        """In the forked process."""
        assert self._undo is not None
        return FrozenFile(self, self._undo)

    def close(self) -> None:
        """Ends its threads and deletes the file."""
        self.thaw()
        if self._fd >= 0:
            # Together: the system takes tens of milliseconds for each.
            list(self._pool.map(Ring.close, [*self._rings[0], *self._rings[1]]))
            self._pool.shutdown()
            # Deleted while the lock is held: nobody else can have begun to use it.
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1
            _held.discard(self._locked)

    @property
    def _undo_path(self) -> Path:
        return self.path.with_suffix(SUFFIX)

    # -- the file ----------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[int, bool]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                fd, direct = _open_direct(self.path)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                    raise ValueError(
                        f"table {self.table!r}: {self.path} is in use by another run; give each run a folder of its own"
                    ) from None
                if _is_at(fd, self.path):
                    break
                os.close(fd)  # its owner deleted the file between our opening and locking it
            self._locked = self.path.absolute()
            _held.add(self._locked)
            os.ftruncate(fd, 0)
            self._undo_path.unlink(missing_ok=True)  # of a run that was killed
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}", error.errno) from error
        return fd, direct

    def _grow(self, position: int) -> None:
        needed = (position // self.layout.per_block + 1) * self.layout.block_bytes
        if needed <= self.num_bytes:
            return
        # Whole blocks, at least an extent, but not a multiple of what is there: disks are shared.
        extent = -(-EXTENT_BYTES // self.layout.block_bytes) * self.layout.block_bytes
        grown = -(-needed // extent) * extent
        for attempt in range(ATTEMPTS):
            try:
                os.posix_fallocate(self._fd, self.num_bytes, grown - self.num_bytes)
                break
            except OSError as error:
                if error.errno not in NO_ROOM or attempt + 1 == ATTEMPTS:
                    raise self._no_room(error.errno, f"growing it to {grown:,} bytes") from error
            # A checkpoint matters less than the run. More than once: others may have been faster, to free it or to take it.
            free_all(self.path.parent)
            time.sleep(0.05 * attempt)
        self.num_bytes = grown

    # -- batches -----------------------------------------------------------------------------------------------------

    def _make_rings(self) -> list[Ring]:
        """One for each thread that moves blocks."""
        ring = self.make_ring(self._fd if self.direct else None)
        if ring.context:
            return [ring]
        return [aio.make_ring(1, max(BOUNCE_BYTES, self.layout.block_bytes)) for _ in range(THREADS)]

    def make_ring(self, fd: int | None) -> Ring:
        unit = max(UNIT_BYTES, self.layout.block_bytes)
        return aio.make_ring(max(THREADS, DEPTH * UNIT_BYTES // unit), unit, fd)

    def _run(
        self,
        writes: bool,
        positions: np.ndarray,
        keys: np.ndarray,
        places: np.ndarray,
        rows: Rows,
        undo: Undo | None = None,
    ) -> None:
        """Cuts a batch between blocks, so that none is read twice or written by two, and gives each thread a part."""
        rings = self._rings[writes]
        in_block = positions // self.layout.per_block
        starts = np.flatnonzero(in_block[1:] != in_block[:-1]) + 1
        wanted = np.searchsorted(starts, np.arange(1, len(rings)) * len(positions) // len(rings))
        inner = starts[wanted[wanted < len(starts)]]
        cuts = [0, *np.unique(inner).tolist(), len(positions)]
        failures = np.zeros((len(cuts), 4), np.int64)
        old, kept = (-1, NO_BLOCKS) if undo is None else (undo.fd, undo.kept)

        def move(n: int) -> None:
            part = slice(cuts[n], cuts[n + 1])
            blocks.move_rows(writes, self._fd, self.layout, positions[part], keys[part], places[part], rows,
                             rings[n], failures[n], old, kept)  # fmt: skip

        others = [self._pool.submit(move, n) for n in range(1, len(cuts) - 1)]
        move(0)
        for job in others:
            job.result()
        for failure in failures:
            problem = self.problem(writes, failure, positions, keys)
            if problem is not None:
                raise problem

    def problem(
        self, writes: bool, failure: np.ndarray, positions: np.ndarray, keys: np.ndarray
    ) -> StorageError | None:
        """What the kernel has told, if anything."""
        code, position, detail, other_key = failure.tolist()
        if code == blocks.FINE:
            return None
        key = int(keys[np.searchsorted(positions, position)])
        block = position // self.layout.per_block * self.layout.block_bytes
        place = f"table {self.table!r}, key {key}, byte {block}"
        if writes and code == blocks.SYSTEM and detail in NO_ROOM:
            return self._no_room(detail, f"writing at byte {block}")
        if code == blocks.SYSTEM:
            return self._error(f"{'writing' if writes else 'reading'} failed: {os.strerror(detail)} ({place})", detail)
        if code == blocks.SHORT:
            return self._error(
                f"{'writing' if writes else 'reading'} ended at byte {block + detail} ({place}); has something cut the file "
                "short? Go on from the last checkpoint"
            )
        slot = block + position % self.layout.per_block * (self.layout.words * 4 + 16)
        place = f"table {self.table!r}, key {key}, byte {slot}"
        problem = (
            "is damaged: a checksum does not fit" if code == blocks.DAMAGED else f"holds the row of key {other_key}"
        )
        return self._error(f"{problem} ({place}); check the disk, and go on from the last checkpoint")

    def _no_room(self, number: int | None, doing: str) -> StorageError:
        why = os.strerror(number or 0)
        return self._error(
            f"{doing} failed: {why} (table {self.table!r}); free space there, choose another folder, or bound the table "
            "with Eviction(max_rows=...)",
            number,
        )

    def _error(self, problem: str, number: int | None = None) -> StorageError:
        error = StorageError(f"{self.path}: {problem}")
        error.errno = number
        return error


def block_shape(slot_bytes: int) -> tuple[int, int]:
    """(slots to a block, bytes of a block).

    4 KiB, the least that can be read; 8 KiB where three slots fit into it but one into a half; what one slot needs if that is
    more than 4 KiB.
    """
    if slot_bytes > PAGE:
        return 1, -(-slot_bytes // PAGE) * PAGE
    if PAGE // slot_bytes == 1 and 2 * PAGE // slot_bytes == 3:
        return 3, 2 * PAGE
    return PAGE // slot_bytes, PAGE


def _open_direct(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fd = os.open(path, flags, 0o644)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, False


def _beside(path: Path) -> Path:
    """The path, or the first with a number that this process does not use."""
    numbered = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if candidate.absolute() not in _held)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

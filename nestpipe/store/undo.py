"""A row file as it was at an instant, for a forked process that reads it while the one that trains writes to it.

Before a block is overwritten for the first time it is copied to the same place of another, sparse file, and a byte of shared
memory says so. Who reads a block looks at that byte afterwards: if it is still unset, nothing had been overwritten.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nestpipe.errors import StorageError
from nestpipe.kernels import blocks
from nestpipe.kernels.aio import Ring
from nestpipe.kernels.blocks import IN_PLACE, KEPT, LOST
from nestpipe.kernels.rows import Rows, rows_of

if TYPE_CHECKING:
    from nestpipe.store.rowfile import RowFile

NO_BLOCKS = np.empty(0, np.uint8)
SUFFIX = ".undo"


class Undo:
    """Where blocks are that were overwritten since. Closed when nobody uses it any more: a write may be under way.

    kept: for each block that there was, IN_PLACE, KEPT (in the file at `path`) or LOST; shared with forked processes.

    Anybody who needs the room may empty the file (`free_all`): who reads it finds that slots do not fit their checksums.
    """

    def __init__(self, path: Path, num_blocks: int, block_bytes: int) -> None:
        self.path = path
        path.unlink(missing_ok=True)  # that of an instant before may still be written to
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, self.fd)
        self._size = num_blocks * block_bytes
        os.ftruncate(self.fd, self._size)  # takes no room
        self._pages = mmap.mmap(-1, num_blocks + 1)  # shared
        everything = np.frombuffer(self._pages, np.uint8)
        self.kept, self._over = everything[:-1], everything[-1:]

    def wanted(self) -> bool:
        """Whether what is about to be overwritten has to be kept: not if nobody will read it, or some of it is lost already."""
        if not self._over[0] and os.fstat(self.fd).st_size < self._size:
            self.kept[:] = LOST
            self._over[0] = 1
        return not self._over[0]

    def end(self) -> None:
        """Nobody will read it any more."""
        self._over[0] = 1

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def free_all(folder: Path) -> None:
    """Empties all such files in a folder, of other tables and workers too."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


class FrozenFile:
    """What RowFile.freeze froze: in the forked process, which has neither its open files nor its threads."""

    def __init__(self, file: RowFile, undo: Undo) -> None:
        self._file, self._undo = file, undo
        flags = os.O_RDONLY | (os.O_DIRECT if file.direct else 0)
        self._live, self._old = os.open(file.path, flags), os.open(undo.path, os.O_RDWR)
        self._ring: Ring | None = None  # not before it is needed: there may be many tables

    def read(self, positions: np.ndarray, keys: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
        """Like RowFile.read."""
        in_block = positions // self._file.layout.per_block
        rows = rows_of(out)
        left = np.arange(len(positions))
        while len(left):
            where = self._undo.kept[in_block[left]]
            old, live = left[where == KEPT], left[where == IN_PLACE]
            problem = self._move(self._old, positions[old], keys[old], targets[old], rows)
            if problem is not None or (self._undo.kept[in_block[left]] == LOST).any():
                raise OSError(
                    f"{self._undo.path}: rows of table {self._file.table!r} that training changed meanwhile could not be kept "
                    "there; make room on that disk, or choose another folder for tables"
                )
            problem = self._move(self._live, positions[live], keys[live], targets[live], rows)
            overwritten = self._undo.kept[in_block[live]] != IN_PLACE  # perhaps before it was read
            if problem is not None and not overwritten.any():
                raise problem
            left = live if problem is not None else live[overwritten]

    def close(self) -> None:
        """Gives back the room that it took on the disk."""
        self._undo.end()
        os.ftruncate(self._old, 0)
        if self._ring is not None:
            self._ring.close()
        os.close(self._live)
        os.close(self._old)

    def _move(
        self, fd: int, positions: np.ndarray, keys: np.ndarray, targets: np.ndarray, rows: Rows
    ) -> StorageError | None:
        if self._ring is None:
            self._ring = self._file.make_ring(self._live if self._file.direct else None)
        failure = np.zeros(4, np.int64)
        blocks.move_rows(
            False, fd, self._file.layout, positions, keys, targets, rows, self._ring, failure, -1, NO_BLOCKS
        )
        return self._file.problem(False, failure, positions, keys)

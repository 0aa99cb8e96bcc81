"""A row file as it was at an instant, for a forked process that reads it while the one that trains writes to it.

Before a block is overwritten for the first time it is copied to the same place of another, sparse file, and a byte of shared
memory says so. Who reads a block looks at that byte afterwards: if it is still unset, nothing had been overwritten.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nestpipe.errors import StorageError
from nestpipe.kernels import blocks
from nestpipe.kernels.blocks import IN_PLACE, KEPT, LOST
from nestpipe.kernels.rows import Rows, rows_of

if TYPE_CHECKING:
    from nestpipe.store.rowfile import RowFile

NO_BLOCKS = np.empty(0, np.uint8)


class Undo:
    """Where blocks are that were overwritten since. Closed when nobody uses it any more: a write may be under way.

    kept: for each block that there was, IN_PLACE, KEPT (in the file at `path`) or LOST; shared with forked processes.
    """

    def __init__(self, path: Path, num_blocks: int) -> None:
        self.path = path
        path.unlink(missing_ok=True)  # that of an instant before may still be written to
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._pages = mmap.mmap(-1, num_blocks + 1)  # shared
        everything = np.frombuffer(self._pages, np.uint8)
        self.kept, self._over = everything[:-1], everything[-1:]

    @property
    def over(self) -> bool:
        """Whether nobody will read it any more."""
        return bool(self._over[0])

    def end(self) -> None:
        """Nobody will read it any more. Its room on the disk is given back."""
        self._over[0] = 1
        os.truncate(self.path, 0)

    def give_up(self) -> None:
        """For want of room on the disk."""
        self.kept[:] = LOST
        os.truncate(self.path, 0)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class FrozenFile:
    """What RowFile.freeze froze: in the forked process, which has neither its open files nor its threads."""

    def __init__(self, file: RowFile, undo: Undo) -> None:
        self._file, self._undo = file, undo
        flags = os.O_RDONLY | (os.O_DIRECT if file.direct else 0)
        self._live, self._old = os.open(file.path, flags), os.open(undo.path, os.O_RDONLY)
        self._ring = file.make_ring(self._live if file.direct else None)

    def read(self, positions: np.ndarray, keys: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
        """Like RowFile.read."""
        in_block = positions // self._file.layout.per_block
        rows = rows_of(out)
        left = np.arange(len(positions))
        while len(left):
            where = self._undo.kept[in_block[left]]
            old, live = left[where == KEPT], left[where == IN_PLACE]
            problem = self._move(self._old, positions[old], keys[old], targets[old], rows)
            if (self._undo.kept[in_block[left]] == LOST).any():
                raise OSError(
                    f"{self._undo.path}: no room for rows of table {self._file.table!r} that training changed while the "
                    "checkpoint was written; free space there, or choose another folder"
                )
            if problem is not None:
                raise problem
            problem = self._move(self._live, positions[live], keys[live], targets[live], rows)
            overwritten = self._undo.kept[in_block[live]] != IN_PLACE  # perhaps before it was read
            if problem is not None and not overwritten.any():
                raise problem
            left = live if problem is not None else live[overwritten]

    def close(self) -> None:
        self._undo.end()
        self._ring.close()
        os.close(self._live)
        os.close(self._old)

    def _move(
        self, fd: int, positions: np.ndarray, keys: np.ndarray, targets: np.ndarray, rows: Rows
    ) -> StorageError | None:
        failure = np.zeros(4, np.int64)
        blocks.move_rows(
            False, fd, self._file.layout, positions, keys, targets, rows, self._ring, failure, -1, NO_BLOCKS
        )
        return self._file.problem(False, failure, positions, keys)

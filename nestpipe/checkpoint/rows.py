"""The rows of a table out of a checkpoint, full or incremental, each key once, a block at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nestpipe.checkpoint.manifest import Manifest, table_file
from nestpipe.errors import did_you_mean
from nestpipe.tensorfile import TensorReader

ROWS = 1 << 16  # of a block

Block = tuple[
    np.ndarray, np.ndarray
]  # keys, and the values of each: float32 [n, dim], or the bits of bfloat16 (uint16)


@dataclasses.dataclass(frozen=True)
class SavedTable:
    """A table of the newest of a chain of manifests (`manifest.chain`)."""

    chain: Sequence[Manifest]
    name: str

    def __post_init__(self) -> None:
        names = [table["name"] for table in self.chain[0].tables]
        if self.name not in names:
            raise ValueError(f"{self.chain[0].path} has no table {self.name!r}, {did_you_mean(self.name, names)}")

    @property
    def declared(self) -> Mapping[str, Any]:
        return next(table for table in self.chain[0].tables if table["name"] == self.name)

    @property
    def dim(self) -> int:
        return self.declared["dim"]

    @property
    def half(self) -> bool:
        return self.declared["dtype"] == "torch.bfloat16"

    def counts(self) -> tuple[int, int]:
        """Keys with a row of their own, and shards whose rare keys share one."""
        newest, keys, shards = self.chain[0], 0, 0
        for worker in range(newest.world):
            with TensorReader(newest.path / table_file(self.name, worker, newest.world)) as file:
                keys, shards = keys + file.shape("keys")[0], shards + file.shape("shared")[0]
        return keys, shards

    def blocks(self) -> Iterator[Block]:
        """Keys with a row of their own. Workers of an incremental checkpoint and of its base hold the same keys."""
        newest, *base = self.chain
        for worker in range(newest.world):
            with TensorReader(newest.path / table_file(self.name, worker, newest.world)) as file:
                yield from self._of("changed" if base else "keys", "records", file)
                if not base:
                    continue
                keys, changed = (file.read(name, 0, file.shape(name)[0]) for name in ("keys", "changed"))
                unchanged = np.setdiff1d(keys, changed, assume_unique=True)
                unchanged.sort()
                del keys, changed
            with TensorReader(base[0].path / table_file(self.name, worker, newest.world)) as file:
                yield from self._of("keys", "records", file, wanted=unchanged)

    def shared_blocks(self) -> Iterator[Block]:
        """The same of shards: never more than 65,536."""
        newest = self.chain[0]
        for worker in range(newest.world):
            with TensorReader(newest.path / table_file(self.name, worker, newest.world)) as file:
                yield from self._of("shared", "shared_records", file)

    def _of(self, keys: str, records: str, file: TensorReader, wanted: np.ndarray | None = None) -> Iterator[Block]:
        """wanted: only these keys, sorted."""
        for start in range(0, file.shape(keys)[0], ROWS):
            some = file.read(keys, start, start + ROWS)
            if wanted is None:
                yield some, self._values(file.read(records, start, start + ROWS))
                continue
            at = np.minimum(np.searchsorted(wanted, some), len(wanted) - 1)
            chosen = np.flatnonzero(wanted[at] == some) if len(wanted) else at[:0]
            if len(chosen):
                yield some[chosen], self._values(file.read(records, start, start + ROWS)[chosen])

    def _values(self, records: np.ndarray) -> np.ndarray:
        """Of records, whose first words they are."""
        words = records.view(np.uint16) if self.half else records
        return np.ascontiguousarray(words[:, : self.dim])


def widened(values: np.ndarray) -> np.ndarray:
    """Values of a block as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values

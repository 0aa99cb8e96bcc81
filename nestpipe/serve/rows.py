"""The rows of a table, read where they lie: in files that several processes map and share. Nothing is read at the start.

Legend: n keys, D row width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from nestpipe.kernels.index import EMPTY, find
from nestpipe.kernels.keys import NUM_SHARDS, row_seeds, shards
from nestpipe.kernels.rows import NONE, Rows, first_rows, gather
from nestpipe.sealed import Damaged
from nestpipe.serve.manifest import CHUNK_BITS, GONE, KIND, Manifest, StoredTable
from nestpipe.tensorfile import TensorReader

BLOCK = 1 << 16  # keys looked at together
LOW_BITS = (1 << CHUNK_BITS) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A table's file in one bundle, mapped; see `serve.manifest` for its tensors."""

    path: str
    slots: np.ndarray
    rows: np.ndarray
    keys: np.ndarray
    shared: np.ndarray
    shared_at: np.ndarray

    @classmethod
    def open(cls, manifest: Manifest, stored: StoredTable) -> Layer:
        path = manifest.path / stored.file
        kind = np.uint16 if stored.dtype == torch.bfloat16 else np.float32
        try:
            with TensorReader(path) as file:
                of = file.mapped()
            # Copied: they need not be aligned in the file, and are few.
            shared, shared_at = of["shared"].copy(), of["shared_at"].copy()
            layer = cls(str(path), of["slots"], of["rows"], of["keys"], shared, shared_at)
            num_slots = len(layer.slots)
            fits = (
                layer.slots.shape[1:] == (2,)
                and num_slots & (num_slots - 1) == 0 < num_slots
                and layer.rows.shape[1:] == (stored.table.dim,)
                and layer.rows.dtype == kind
                and layer.shared.shape == layer.shared_at.shape == (len(layer.shared),)
                and layer.keys.ndim == 1
                and len(layer.keys) <= len(layer.rows) < GONE
            )
            if not fits:
                raise ValueError("its tensors are of other shapes or types")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path} is not what nestpipe writes ({error}); {KIND.remedy}") from None
        return layer

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Positions in this file, EMPTY or GONE."""
        return self._checked(find(self.slots, keys))

    def find_shared(self, ids: np.ndarray) -> np.ndarray:
        """The same of shards."""
        if not len(self.shared):
            return np.full(len(ids), EMPTY, np.int64)
        at = np.minimum(np.searchsorted(self.shared, ids), len(self.shared) - 1)
        return self._checked(np.where(self.shared[at] == ids, self.shared_at[at], EMPTY))

    def _checked(self, positions: np.ndarray) -> np.ndarray:
        # Bytes of tables are not checked at the start: a damaged index must not read other memory.
        out = (positions >= len(self.rows)) & (positions != GONE) | (positions < EMPTY)
        if out.any():
            raise Damaged(
                f"{self.path} is damaged: its index gives position {positions[out][0]} of {len(self.rows)} rows; "
                f"`nestpipe bundle verify` reads all of a bundle; {KIND.remedy}"
            )
        return positions


class TableRows:
    """The rows of one table by key, in a bundle and its deltas; never changes.

    A position is (number of the layer << CHUNK_BITS) + place in the layer's rows: one number that `Rows` finds an address by.
    """

    def __init__(self, stored: StoredTable, layers: Sequence[Layer]) -> None:
        self.stored, self.layers = stored, tuple(layers)
        self.half = stored.dtype == torch.bfloat16
        self._bases = [layer.rows.ctypes.data for layer in self.layers]
        self._stride = stored.table.dim * (2 if self.half else 4)
        self._seeds = row_seeds(stored.name, stored.seed)

    def __len__(self) -> int:
        """Keys that have a row of their own."""
        return self.stored.keys

    @property
    def shares_rows(self) -> bool:
        return self.stored.table.admit_after > 1

    def with_layer(self, stored: StoredTable, layer: Layer) -> TableRows:
        """The same with what a delta changes."""
        return TableRows(stored, (*self.layers, layer))

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The position of each key's own row, or -1."""
        return self._newest([layer.find for layer in self.layers], keys)

    def find_shared(self, ids: np.ndarray) -> np.ndarray:
        """The same of shards, whose rare keys share a row."""
        return self._newest([layer.find_shared for layer in self.layers], ids)

    @staticmethod
    def _newest(finders: Sequence[Callable[[np.ndarray], np.ndarray]], keys: np.ndarray) -> np.ndarray:
        """What the newest layer says that knows a key."""
        positions = np.full(len(keys), EMPTY, np.int64)
        left = np.arange(len(keys))
        for chunk in reversed(range(len(finders))):
            told = finders[chunk](keys[left])
            known = told != EMPTY
            there = known & (told != GONE)
            positions[left[there]] = told[there] + (chunk << CHUNK_BITS)
            left = left[~known]
            if not len(left):
                break
        return positions

    def located(self, keys: np.ndarray) -> Located:
        """Where the values of each key lie: its own row's, those of the row that rare keys share, or those it would be born
        with, which are made here."""
        positions = self.find(keys)
        missing = np.flatnonzero(positions == EMPTY)
        born = keys[missing]
        if self.shares_rows and len(missing):
            born = shards(born)
            positions[missing] = self.find_shared(born)
            unshared = positions[missing] == EMPTY
            missing, born = missing[unshared], born[unshared]
        values = self._first(born)
        positions[missing] = np.arange(len(born)) + (len(self.layers) << CHUNK_BITS)
        bases = np.array([*self._bases, values.ctypes.data], np.int64)
        return Located(Rows(bases, CHUNK_BITS, self._stride, self.half), positions, (self, values))

    def _first(self, keys: np.ndarray) -> np.ndarray:
        """The values that keys (or shards, where rare keys share rows) are born with, as rows are stored."""
        table = self.stored.table
        values = np.empty((len(keys), table.dim), np.float32)
        half = self.half or table.dtype == torch.bfloat16
        if len(keys):
            none = np.full(len(keys), EMPTY, np.int64)
            first_rows(self._seeds[self.shares_rows], keys, none, *table.first_values, half, values)
        return (values.view(np.uint32) >> 16).astype(np.uint16) if self.half else values

    def read(self, keys: np.ndarray) -> np.ndarray:
        """float32 [n, D]"""
        located = self.located(keys)
        out = np.empty((len(keys), self.stored.table.dim), np.float32)
        gather(located.rows, located.positions, NONE, out)
        return out

    def values_at(self, positions: np.ndarray) -> np.ndarray:
        """Values as they are stored, [n, D]: float32, or the bits of bfloat16."""
        out = np.empty((len(positions), self.stored.table.dim), np.uint16 if self.half else np.float32)
        chunks = positions >> CHUNK_BITS
        for chunk, layer in enumerate(self.layers):
            here = chunks == chunk
            out[here] = layer.rows[positions[here] & LOW_BITS]
        return out

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All keys that have a row of their own, and its position, in blocks."""
        for chunk, layer in enumerate(self.layers):
            for start in range(0, len(layer.keys), BLOCK):
                keys = layer.keys[start : start + BLOCK].copy()  # which need not be aligned in the file
                positions = np.arange(start, start + len(keys)) + (chunk << CHUNK_BITS)
                if chunk < len(self.layers) - 1:  # a later layer may have another row of it, or none
                    current = self.find(keys) == positions
                    keys, positions = keys[current], positions[current]
                yield keys, positions

    def shared_ids(self) -> np.ndarray:
        """Shards whose rare keys share a row."""
        ids = np.arange(NUM_SHARDS if self.shares_rows else 0)
        return ids[self.find_shared(ids) != EMPTY]


@dataclasses.dataclass(frozen=True, eq=False)
class Located:
    """rows, positions: for `gather` and `pool`. kept: whose memory they point into."""

    rows: Rows
    positions: np.ndarray
    kept: object

"""What a delta holds of a table: rows that differ from those of an earlier bundle, byte for byte, and keys that are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.rows import Block
from nestpipe.kernels.index import EMPTY
from nestpipe.serve.manifest import CHUNK_BITS
from nestpipe.serve.rows import LOW_BITS, TableRows


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """keys, shared: changed or born keys, and shards. gone, gone_shared: those that were there before and are not any more.
    values: in a file, of keys and then of shards, because all of a table may have changed."""

    keys: np.ndarray
    shared: np.ndarray
    gone: np.ndarray
    gone_shared: np.ndarray
    values: Path
    dim: int
    dtype: np.dtype

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        with self.values.open("rb") as file:
            while some := file.read(size * self.dim * self.dtype.itemsize):
                yield np.frombuffer(some, self.dtype).reshape(-1, self.dim)


def changes_since(earlier: TableRows, own: Iterable[Block], shared: Iterable[Block], spool: Path) -> Changes:
    """own, shared: what there is now, values as they are stored."""
    seen = [np.zeros(len(layer.rows), bool) for layer in earlier.layers]  # a byte for each row
    with spool.open("wb") as file:

        def changed(blocks: Iterable[Block], find: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            found = [np.empty(0, np.int64)]
            for keys, values in blocks:
                positions = find(keys)
                there = np.flatnonzero(positions != EMPTY)
                for marks, places in zip(seen, _by_layer(positions[there], len(seen)), strict=True):
                    marks[positions[there][places] & LOW_BITS] = True
                differs = np.ones(len(keys), bool)
                before = earlier.values_at(positions[there])
                differs[there] = (_bits(before) != _bits(values[there])).any(1)
                found.append(keys[differs])
                file.write(np.ascontiguousarray(values[differs]).data)
            return np.concatenate(found)

        keys, ids = changed(own, earlier.find), changed(shared, earlier.find_shared)

    def unseen(some: np.ndarray, positions: np.ndarray) -> np.ndarray:
        was = np.empty(len(some), bool)
        for marks, places in zip(seen, _by_layer(positions, len(seen)), strict=True):
            was[places] = marks[positions[places] & LOW_BITS]
        return some[~was]

    gone = np.concatenate([np.empty(0, np.int64), *(unseen(*block) for block in earlier.blocks())])
    shards_before = earlier.shared_ids()
    gone_shared = unseen(shards_before, earlier.find_shared(shards_before))
    kind = np.dtype(np.uint16 if earlier.half else np.float32)
    return Changes(keys, ids, gone, gone_shared, spool, earlier.stored.table.dim, kind)


def _by_layer(positions: np.ndarray, num_layers: int) -> list[np.ndarray]:
    """Which of the positions are of each layer."""
    return [np.flatnonzero(positions >> CHUNK_BITS == layer) for layer in range(num_layers)]


def _bits(values: np.ndarray) -> np.ndarray:
    """So that NaN is equal to itself, and 0 not to -0."""
    return values.view(np.uint32) if values.dtype == np.float32 else values

"""Hot rows: the few keys of a table that every batch of every worker uses. Every worker holds them, so that they need not travel.

They are a table of their own (`HotRows`, the *twin*) that has replicas everywhere; what a feature reads is put together from
both. Which keys are hot is decided once, from the first batch of all workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestpipe.batch import Batch
from nestpipe.kernels.index import HashIndex
from nestpipe.tables import Feature

OFFERED = 4  # times as many keys as are wanted: what a worker tells the others of its batch


class HotKeys:
    """The hot keys of one table, for good."""

    def __init__(self, keys: Sequence[int] | np.ndarray = ()) -> None:
        self.keys = np.sort(np.asarray(keys, np.int64))
        self._index = HashIndex(max(16, len(self.keys)))
        every = np.arange(len(self.keys))
        self._index.insert(self.keys, every, every)

    def __len__(self) -> int:
        return len(self.keys)

    def contains(self, keys: np.ndarray) -> np.ndarray:
        positions = np.empty(len(keys), np.int64)
        self._index.find(keys, positions)
        return positions >= 0


def most_used(batch: Batch, features: Sequence[Feature], most: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys that these features of a batch use most, and how often."""
    keys, counts = np.unique(np.concatenate([batch.keys[f.name].values.numpy() for f in features]), return_counts=True)
    order = np.lexsort((keys, -counts))[: OFFERED * most]
    return keys[order], counts[order]


def choose(offered: Sequence[tuple[np.ndarray, np.ndarray]], most: int) -> HotKeys:
    """From what each worker has offered, the same on all of them. A key that has been used once is not hot."""
    keys, place = np.unique(np.concatenate([keys for keys, _ in offered]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([counts for _, counts in offered]), minlength=len(keys))
    order = np.lexsort((keys, -counts))[:most]
    return HotKeys(keys[order[counts[order] > 1]])

"""Where the parts of a message and of a buffer lie: the same on both sides, worked out from counts alone.

Legend: K tables, W workers, P parts of the window.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.window import Window

_KEYS, _WEIGHTED, _WIDE, _VECTORS = 0, 1, 2, 3  # columns of a table's sizes


@dataclasses.dataclass
class Sizes:
    """What a worker tells another before the message itself: row w is for, or from, worker w.

    table: [W, 1 + K * (3 + P)] int64. Column 0 is the state of the sender. Then, for each table: keys, whether they have
    weights, whether they take eight bytes each or four, and vectors of each part.
    """

    table: np.ndarray
    num_tables: int
    parts: int

    @classmethod
    def empty(cls, world: int, num_tables: int, parts: int) -> Sizes:
        return cls(np.zeros((world, 1 + num_tables * (_VECTORS + parts)), np.int64), num_tables, parts)

    @property
    def state(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def _of_tables(self) -> np.ndarray:
        # A view [W, K, 3 + P]. Its width is told, because without tables (K = 0) NumPy could not work it out.
        return self.table[:, 1:].reshape(len(self.table), self.num_tables, _VECTORS + self.parts)

    def put(self, k: int, keys: np.ndarray, vectors: np.ndarray, *, weighted: bool, wide: bool) -> None:
        """keys: [W]; vectors: [P, W]."""
        columns = self._of_tables[:, k]
        columns[:, _KEYS], columns[:, _VECTORS:] = keys, vectors.T
        columns[:, _WEIGHTED], columns[:, _WIDE] = weighted, wide

    @property
    def keys(self) -> np.ndarray:
        """[K, W]"""
        return self._of_tables[:, :, _KEYS].T

    @property
    def weighted(self) -> np.ndarray:
        """[K, W]"""
        return self._of_tables[:, :, _WEIGHTED].T

    @property
    def wide(self) -> np.ndarray:
        """[K, W]"""
        return self._of_tables[:, :, _WIDE].T

    @property
    def vectors(self) -> np.ndarray:
        """[K, P, W]"""
        return np.ascontiguousarray(self._of_tables[:, :, _VECTORS:].transpose(1, 2, 0))


@dataclasses.dataclass
class Layout:
    """A buffer of vectors for each dim: by part, then by worker, then by table.

    counts[dim]: [P, W] vectors of all its tables. start: [K, P, W], where a table's vectors begin in the buffer of its dim.
    """

    counts: dict[int, np.ndarray]
    start: np.ndarray

    def __post_init__(self) -> None:
        self._ends = {dim: [0, *np.cumsum(of_dim.sum(axis=1)).tolist()] for dim, of_dim in self.counts.items()}

    def total(self, dim: int) -> int:
        return self._ends[dim][-1]

    def part(self, dim: int, p: int) -> slice:
        """Where part p lies in the buffer of a dim."""
        return slice(self._ends[dim][p], self._ends[dim][p + 1])


def lay_out(counts: np.ndarray, plan: ExchangePlan) -> Layout:
    """counts: [K, P, W] vectors."""
    start, totals = np.empty_like(counts), {}
    for dim, members in plan.groups.items():
        of_dim = np.ascontiguousarray(counts[members].transpose(1, 2, 0))
        start[members] = starts(of_dim.ravel()).reshape(of_dim.shape).transpose(2, 0, 1)
        totals[dim] = of_dim.sum(axis=2)
    return Layout(totals, start)


def payload_layout(sizes: Sizes, plan: ExchangePlan, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Where keys, bag lengths, weights and last uses start in the payload, in int32 words [K, 4, W]; words per worker."""
    keys, vectors, weighted = sizes.keys, sizes.vectors.sum(axis=1), sizes.weighted
    words = np.zeros((keys.shape[1], len(keys), 4), np.int64)
    for k in range(len(keys)):
        words[:, k, 0] = keys[k] * (1 + sizes.wide[k])
        words[:, k, 1] = vectors[k] if plan.at_owner[k] else 0
        words[:, k, 2] = keys[k] * weighted[k]
        if window.last_use is not None and not plan.at_owner[k]:
            words[:, k, 3] = -(-keys[k] * window.last_use.itemsize // 4)
    start = starts(words.ravel()).reshape(words.shape)
    return np.ascontiguousarray(start.transpose(1, 2, 0)), words.sum(axis=(1, 2))


def starts(counts: np.ndarray) -> np.ndarray:
    """Where each of consecutive segments begins."""
    return np.cumsum(counts) - counts

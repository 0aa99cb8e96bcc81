"""The source's side of an exchange: from requests to messages, and where the answers will lie.

Legend: K tables, W workers, P parts of the window, T keys of one table in the batch, R rows (or bags) asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.layout import Sizes, lay_out, payload_layout, starts
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.requests import BagRequest, Requests, RowRequest, TableKeys, is_wide
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import compose
from nestpipe.kernels.route import copy_segments, fill_bags, segment_places
from nestpipe.kernels.rows import ONES
from nestpipe.kernels.window import count_by_part, places_by_part


@dataclasses.dataclass
class Entries:
    """Where a feature's vectors lie in the received buffer of its dim, and their gradients in the buffer that goes back.

    Sample i of micro-batch m has the positions offsets[first[m] + i] to offsets[first[m] + i + 1]: one per key where rows
    travel, one per owner where bags are pooled there.
    weights: may be empty: 1 each.
    once: no position occurs twice in all samples (each bag has vectors of its own), and weights are 1.
    """

    dim: int
    positions: np.ndarray
    grad_positions: np.ndarray
    offsets: np.ndarray
    first: list[int]
    weights: np.ndarray
    once: bool

    def of(self, m: int, num_samples: int) -> np.ndarray:
        """The offsets of micro-batch m."""
        return self.offsets[self.first[m] : self.first[m] + num_samples + 1]


class SourceRoute:
    """What this worker asks of the others for one batch.

    sizes: what each worker is told first, see Sizes.
    payload: int32 words, laid out as `layout` says.
    vectors, grads: how the vectors that come lie in the buffer of their dim, and how their gradients do.
    entries[feature]: see Entries.
    """

    def __init__(self, requests: Requests, plan: ExchangePlan, window: Window, world: int, arena: Arena) -> None:
        self._plan, self._window, self._world, self._arena = plan, window, world, arena
        tables, rows, bags = requests.tables, requests.rows, requests.bags
        self.sizes = Sizes.empty(world, len(tables), window.parts)
        grad_counts = np.zeros((len(tables), window.parts, world), np.int64)
        for k, table in enumerate(tables):
            wide = is_wide(table.keys)
            if plan.at_owner[k]:
                weighted = len(table.weights) > 0
                self.sizes.put(k, bags[k].num_keys.sum(axis=0), bags[k].num_bags, weighted=weighted, wide=wide)
                grad_counts[k] = bags[k].num_bags
            else:
                self.sizes.put(k, rows[k].counts.sum(axis=0), rows[k].counts, weighted=False, wide=wide)
                grad_counts[k] = self._count_grads(rows[k])
        self.vectors = lay_out(self.sizes.vectors, plan)
        self.grads = self.vectors if window.last_use is None else lay_out(grad_counts, plan)
        self.layout = payload_layout(self.sizes, plan, window)
        self.payload = arena.take("payload out", self.layout.total, np.int32)
        self.entries: dict[str, Entries] = {}
        for k, table in enumerate(requests.whole):
            if plan.at_owner[k]:
                self._lay_out_bags(k, table, bags[k])
                continue
            positions = self._lay_out_rows(k, rows[k])
            if k in plan.twins:
                others = self._lay_out_rows(plan.twins[k], rows[plan.twins[k]])
                positions = self._united(k, requests.hot[k], positions, others)
            self._enter(k, table, *positions)

    def _count_grads(self, rows: RowRequest) -> np.ndarray:
        """How many gradients go to each worker with each part [P, W]."""
        if self._window.last_use is None:
            return rows.counts
        counts = np.empty_like(rows.counts)
        count_by_part(rows.last_R, rows.counts.ravel(), self._workers(), counts)
        return counts

    def _workers(self) -> np.ndarray:
        """The worker of each segment, where segments lie by part, then worker."""
        return np.tile(np.arange(self._world), self._window.parts)

    def _lay_out_rows(self, k: int, rows: RowRequest) -> tuple[np.ndarray, np.ndarray]:
        """Where the row of each key will lie, and where its gradient."""
        take, counts, word_start = self._arena.take, rows.counts.ravel(), self.layout.start[k]
        # In the payload by worker, then part; in buffers by part, then worker.
        in_payload = (np.cumsum(rows.counts, axis=0) - rows.counts).ravel()
        worker, segment = self._workers(), starts(counts)
        self._put_keys(k, rows.keys_R, segment, word_start[0][worker], in_payload, counts)
        places = take(f"places {k}", len(rows.keys_R), np.int32)
        segment_places(counts, self.vectors.start[k].ravel(), places)
        positions = grad_positions = self._positions(f"positions {k}", rows, places)
        if self._window.last_use is not None:
            size = self._window.last_use.itemsize
            target, last = self.payload.view(rows.last_R.dtype), rows.last_R
            copy_segments(last, segment, target, word_start[3][worker] * (4 // size) + in_payload, counts)
            places_by_part(last, counts, worker, self.grads.start[k].copy(), places)
            grad_positions = self._positions(f"grad positions {k}", rows, places)
        return positions, grad_positions

    def _united(
        self, k: int, hot_T: np.ndarray, rest: tuple[np.ndarray, np.ndarray], hot: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same of a table's keys as they were, from those of the table and of its twin."""

        def unite(name: str, of_rest: np.ndarray, of_hot: np.ndarray) -> np.ndarray:
            both = self._arena.take(name, len(hot_T), np.int32)
            both[hot_T], both[~hot_T] = of_hot, of_rest
            return both

        positions = unite(f"united positions {k}", rest[0], hot[0])
        return positions, positions if rest[1] is rest[0] else unite(f"united grad positions {k}", rest[1], hot[1])

    def _enter(self, k: int, table: TableKeys, positions: np.ndarray, grad_positions: np.ndarray) -> None:
        features = self._plan.features_of[k]
        for i, feature in enumerate(features):
            weights = table.weights if feature.pooling else ONES
            first = self._first(i, len(features))
            self.entries[feature.name] = Entries(
                self._plan.tables[k].dim, positions, grad_positions, table.offsets, first, weights, once=False
            )

    def _put_keys(
        self,
        k: int,
        keys: np.ndarray,
        start: np.ndarray,
        words: np.ndarray,
        before: np.ndarray | int,
        counts: np.ndarray,
    ) -> None:
        """Segments of keys into the payload: from `words` on, behind so many keys that stand before them there."""
        if self.sizes.wide[k, 0]:
            copy_segments(keys.view(np.int32), start * 2, self.payload, words + before * 2, counts * 2)
        else:
            copy_segments(keys, start, self.payload, words + before, counts)

    def _positions(self, name: str, rows: RowRequest, places: np.ndarray) -> np.ndarray:
        """From the place of each request to that of each key."""
        moved = self._arena.take("moved", len(rows.place_R), np.int32)
        compose(rows.place_R, places, moved)
        positions = self._arena.take(name, len(rows.inverse_T), np.int32)
        compose(rows.inverse_T, moved, positions)
        return positions

    def _first(self, i: int, num_features: int) -> list[int]:
        """Where the samples of the i-th feature of a table begin, for each micro-batch."""
        bounds = self._window.bounds
        return [num_features * a + i * (z - a) for a, z in zip(bounds[:-1], bounds[1:], strict=True)]

    def _lay_out_bags(self, k: int, table: TableKeys, bags: BagRequest) -> None:
        take, features, word_start = self._arena.take, self._plan.features_of[k], self.layout.start[k]
        num_bags, num_keys = bags.num_bags.sum(axis=0), bags.num_keys.sum(axis=0)
        total = int(num_bags.sum())
        lengths, vectors = take(f"bag lengths {k}", total, np.int32), take(f"positions {k}", total, np.int32)
        keys = take(f"bag keys {k}", len(table.keys), np.int64)
        weights = take(f"bag weights {k}", len(table.weights), np.float32)
        vector_offsets = take(f"vector offsets {k}", len(table.offsets), np.int64)
        vector_offsets[0] = 0
        bag_start, key_start = starts(num_bags), starts(num_keys)
        bag_next, key_next = bag_start.copy(), key_start.copy()
        scratch = np.empty(self._world, np.int64)
        pieces = zip(
            self._window.cut(table.offsets, len(features)),
            self._window.cut(vector_offsets, len(features)),
            self.vectors.start[k],
            strict=True,
        )
        for offsets, into, vector_start in pieces:
            fill_bags(
                table.keys, bags.owner_T, offsets, table.weights, bag_next, key_next, vector_start.copy(), scratch,
                lengths, keys, weights, vectors, into,
            )  # fmt: skip
        self._put_keys(k, keys, key_start, word_start[0], 0, num_keys)
        copy_segments(lengths, bag_start, self.payload, word_start[1], num_bags)
        if len(weights):
            copy_segments(weights.view(np.int32), key_start, self.payload, word_start[2], num_keys)
        grad_positions = vectors
        if self.grads is not self.vectors:  # the same in every segment, but segments of other tables lie between
            old, new = self.vectors.start[k].ravel(), self.grads.start[k].ravel()
            grad_positions = vectors + (new - old)[np.searchsorted(old, vectors, side="right") - 1]
        for i, feature in enumerate(features):
            first = self._first(i, len(features))
            self.entries[feature.name] = Entries(
                self._plan.tables[k].dim, vectors, grad_positions, vector_offsets, first, ONES, once=True
            )

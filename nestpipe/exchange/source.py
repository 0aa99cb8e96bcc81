"""The source's side of an exchange: from requests to messages, and where the answers will lie.

Legend: K tables, W workers, P parts of the window, T keys of one table in the batch, R rows (or bags) asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.exchange.layout import Sizes, lay_out, payload_layout, starts
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.requests import BagRequest, Requests, RowRequest, TableKeys, decide, is_wide
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator, compose
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
    payload: int32 words, payload_counts of them to each worker.
    vectors, grads: how the vectors that come lie in the buffer of their dim, and how their gradients do.
    entries[feature]: see Entries.
    """

    def __init__(
        self,
        batch: Batch,
        plan: ExchangePlan,
        window: Window,
        transport: Transport,
        dedup: Deduplicator,
        arena: Arena,
    ) -> None:
        requests = Requests(batch, plan, window, transport.world, dedup, arena)
        decide(plan, requests, transport)

        self._plan, self._window, self._world, self._arena = plan, window, transport.world, arena
        tables, rows, bags = requests.tables, requests.rows, requests.bags
        self.sizes = Sizes.empty(transport.world, len(tables), window.parts)
        grad_counts = np.zeros((len(tables), window.parts, transport.world), np.int64)
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
        word_start, self.payload_counts = payload_layout(self.sizes, plan, window)
        self.payload = arena.take("payload out", int(self.payload_counts.sum()), np.int32)
        self.entries: dict[str, Entries] = {}
        for k, table in enumerate(tables):
            if plan.at_owner[k]:
                self._lay_out_bags(k, table, bags[k], word_start[k])
            else:
                self._lay_out_rows(k, table, rows[k], word_start[k])

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

    def _lay_out_rows(self, k: int, table: TableKeys, rows: RowRequest, word_start: np.ndarray) -> None:
        take, counts = self._arena.take, rows.counts.ravel()
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

    def _lay_out_bags(self, k: int, table: TableKeys, bags: BagRequest, word_start: np.ndarray) -> None:
        take, features = self._arena.take, self._plan.features_of[k]
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

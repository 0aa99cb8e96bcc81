"""The owner's side of an exchange: from received messages to rows, and from received gradients to one sum per row.

Legend: R keys received of one table from all sources, V distinct ones, D dim.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.source import FIELDS, payload_layout, starts, vector_layout
from nestpipe.kernels.keys import Deduplicator, compose
from nestpipe.kernels.route import copy_segments, entry_positions, segment_places
from nestpipe.kernels.rows import NONE, ONES, Rows, gather, pool, pool_add, scatter_add


@dataclasses.dataclass
class _Bags:
    """Bags of one table that sources want pooled here."""

    entries: np.ndarray  # place of each key in its source's message
    counts: np.ndarray  # [W] entries by source
    offsets: np.ndarray  # [bags + 1] into entries
    weights: np.ndarray  # [entries] or empty
    targets: np.ndarray  # [bags] in the buffer of the dim


@dataclasses.dataclass
class OwnedKeys:
    """What is asked of one table of this owner for one batch: distinct keys, and where each received key is in them."""

    keys_V: np.ndarray
    inverse_R: np.ndarray
    key_start: np.ndarray  # [W] of each source in the R keys
    targets_R: np.ndarray  # in the buffer of the dim; empty if bags are pooled here
    bags: _Bags | None

    def merge(self, places: np.ndarray) -> None:
        """Keys that share a row become one: key v is now row places[v]."""
        compose(self.inverse_R, places, self.inverse_R)


class OwnerRoute:
    """What the others ask of this worker for one batch.

    vectors[dim]: [W] vectors to send to each worker.
    tables[k]: see OwnedKeys.
    """

    def __init__(
        self, sizes: np.ndarray, payload: np.ndarray, plan: ExchangePlan, dedup: Deduplicator, arena: Arena
    ) -> None:
        self._plan, self._arena = plan, arena
        vector_start, self.vectors = vector_layout(sizes, plan)
        word_start, _ = payload_layout(sizes)
        self.tables = []
        for k in range(len(plan.tables)):
            fields = sizes[:, 1 + k * FIELDS : 1 + (k + 1) * FIELDS]
            self.tables.append(self._owned(k, fields, payload, word_start[k], vector_start[k], dedup))

    def _owned(
        self,
        k: int,
        fields: np.ndarray,
        payload: np.ndarray,
        word_start: np.ndarray,
        vector_start: np.ndarray,
        dedup: Deduplicator,
    ) -> OwnedKeys:
        take = self._arena.take
        counts, vectors, entries, weighted = (np.ascontiguousarray(column) for column in fields.T)
        key_start, num_keys = starts(counts), int(counts.sum())
        keys = take(f"received keys {k}", num_keys, np.int64)
        copy_segments(payload, word_start[0], keys.view(np.int32), key_start * 2, counts * 2)
        unique, inverse = take(f"owned unique {k}", num_keys, np.int64), take(f"owned inverse {k}", num_keys, np.int32)
        unique = unique[: dedup(keys, unique, inverse)]
        num_vectors = int(vectors.sum())
        targets = take(f"owned targets {k}", num_vectors, np.int64)
        segment_places(vectors, vector_start, targets)
        if not self._plan.at_owner[k]:
            return OwnedKeys(unique, inverse, key_start, targets, None)
        bags = self._received_bags(k, vectors, entries, weighted, payload, word_start, targets)
        return OwnedKeys(unique, inverse, key_start, NONE, bags)

    def _received_bags(
        self,
        k: int,
        vectors: np.ndarray,
        entries: np.ndarray,
        weighted: np.ndarray,
        payload: np.ndarray,
        word_start: np.ndarray,
        targets: np.ndarray,
    ) -> _Bags:
        take = self._arena.take
        lengths = take(f"owned lengths {k}", int(vectors.sum()), np.int32)
        copy_segments(payload, word_start[1], lengths, starts(vectors), vectors)
        offsets = take(f"owned offsets {k}", len(lengths) + 1, np.int64)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        kept = take(f"owned entries {k}", int(entries.sum()), np.int32)
        copy_segments(payload, word_start[2], kept, starts(entries), entries)
        weights = ONES
        if weighted.any():
            weights = take(f"owned weights {k}", len(kept), np.float32)
            weights[:] = 1  # of sources that sent none
            copy_segments(payload, word_start[3], weights.view(np.int32), starts(entries), entries * weighted)
        return _Bags(kept, entries, offsets, weights, targets)

    def answer(self, k: int, rows: Rows, positions_V: np.ndarray, out: np.ndarray) -> None:
        """Writes what the sources asked of table k into the buffer of its dim; key v's row is record positions_V[v]."""
        owned = self.tables[k]
        if owned.bags is None:
            positions = self._arena.take(f"owned positions {k}", len(owned.inverse_R), np.int64)
            compose(owned.inverse_R, positions_V, positions)
            gather(rows, positions, owned.targets_R, out)
            return
        bags = owned.bags
        positions = self._arena.take(f"owned positions {k}", len(bags.entries), np.int64)
        entry_positions(bags.entries, bags.counts, owned.key_start, owned.inverse_R, positions_V, positions)
        pool(rows, positions, bags.offsets, bags.weights, bags.targets, out)

    def sum_gradients(self, k: int, num_rows: int, received: np.ndarray) -> np.ndarray:
        """[num_rows, D]: gradients of table k's rows, summed over sources in the order of their ranks."""
        owned, bags = self.tables[k], self.tables[k].bags
        grads = self._arena.take(f"owned grads {k}", (num_rows, received.shape[1]), np.float32)
        grads[:] = 0
        if bags is None:
            scatter_add(received, owned.targets_R, owned.inverse_R, grads)
            return grads
        places = self._arena.take(f"owned positions {k}", len(bags.entries), np.int64)
        entry_positions(bags.entries, bags.counts, owned.key_start, owned.inverse_R, np.arange(num_rows), places)
        pool_add(received, bags.targets, places, bags.offsets, bags.weights, grads)
        return grads

"""The owner's side of an exchange: from received messages to rows, and from received gradients to gradients by row.

Legend: E keys received of one table from all sources, V distinct ones.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.source import FIELDS, payload_layout, starts, vector_layout
from nestpipe.kernels.keys import Deduplicator, compose
from nestpipe.kernels.route import copy_segments, segment_places, spread_over_bags
from nestpipe.kernels.rows import ONES, Rows, gather, pool
from nestpipe.kernels.update import Gradients, group_by_row


@dataclasses.dataclass
class OwnedKeys:
    """What is asked of one table of this owner for one batch.

    keys_V: distinct keys.
    row_E: which of them each received key is; vector_E: which vector in the buffer of its dim its row goes into.
    weights_E: may be empty.
    bags: offsets [bags + 1] into the received keys, and the bags' vectors, if they are pooled here; else None.
    """

    keys_V: np.ndarray
    row_E: np.ndarray
    vector_E: np.ndarray
    weights_E: np.ndarray
    bags: tuple[np.ndarray, np.ndarray] | None

    def merge(self, places: np.ndarray) -> None:
        """Keys that share a row become one: key v is now row places[v]."""
        compose(self.row_E, places, self.row_E)


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
        word_start, _ = payload_layout(sizes, plan)
        self.tables = []
        for k in range(len(plan.tables)):
            fields = np.ascontiguousarray(sizes[:, 1 + k * FIELDS : 1 + (k + 1) * FIELDS].T)
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
        counts, vectors, weighted = fields
        key_start, num_keys = starts(counts), int(counts.sum())
        keys = take(f"received keys {k}", num_keys, np.int64)
        copy_segments(payload, word_start[0], keys.view(np.int32), key_start * 2, counts * 2)
        unique, row = take(f"owned unique {k}", num_keys, np.int64), take(f"owned rows {k}", num_keys, np.int32)
        unique = unique[: dedup(keys, unique, row)]
        targets = take(f"owned targets {k}", int(vectors.sum()), np.int32)
        segment_places(vectors, vector_start, targets)
        if not self._plan.at_owner[k]:
            return OwnedKeys(unique, row, targets, ONES, None)

        lengths = take(f"owned lengths {k}", len(targets), np.int32)
        copy_segments(payload, word_start[1], lengths, starts(vectors), vectors)
        offsets = take(f"owned offsets {k}", len(lengths) + 1, np.int64)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        weights = ONES
        if weighted.any():
            weights = take(f"owned weights {k}", num_keys, np.float32)
            weights[:] = 1  # of sources that sent none
            copy_segments(payload, word_start[2], weights.view(np.int32), key_start, counts * weighted)
        vector = take(f"owned vectors {k}", num_keys, np.int32)
        spread_over_bags(offsets, targets, vector)
        return OwnedKeys(unique, row, vector, weights, (offsets, targets))

    def answer(self, k: int, rows: Rows, positions_V: np.ndarray, out: np.ndarray) -> None:
        """Writes what the sources asked of table k into the buffer of its dim; key v's row is record positions_V[v]."""
        owned = self.tables[k]
        positions = self._arena.take(f"owned positions {k}", len(owned.row_E), np.int64)
        compose(owned.row_E, positions_V, positions)
        if owned.bags is None:
            gather(rows, positions, owned.vector_E, out)
        else:
            offsets, targets = owned.bags
            pool(rows, positions, offsets, owned.weights_E, targets, out)

    def gradients(self, k: int, num_rows: int, received: np.ndarray) -> Gradients:
        """The received gradients by row of table k: of each row, in the order of source ranks."""
        owned, take = self.tables[k], self._arena.take
        num_entries, num_weights = len(owned.row_E), len(owned.weights_E)
        start, cursor = take(f"start {k}", num_rows + 1, np.int32), take(f"cursor {k}", num_rows, np.int32)
        origins, weights = take(f"origins {k}", num_entries, np.int32), take(f"by row {k}", num_weights, np.float32)
        group_by_row(owned.row_E, num_rows, owned.vector_E, owned.weights_E, start, cursor, origins, weights)
        return Gradients(received, start, origins, weights)

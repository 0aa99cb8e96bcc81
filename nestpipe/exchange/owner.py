"""The owner's side of an exchange: from received messages to rows, and from received gradients to gradients by row.

Legend: E keys received of one table from all sources, V distinct ones, W sources, P parts of the window.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.layout import PayloadLayout, Sizes, lay_out, starts
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator, compose
from nestpipe.kernels.merge import last_part
from nestpipe.kernels.route import copy_segments, segment_places, spread_over_bags
from nestpipe.kernels.rows import ONES, Rows, gather, pool
from nestpipe.kernels.update import Gradients, group_by_row
from nestpipe.kernels.window import count_by_part, places_by_part


@dataclasses.dataclass
class Answer:
    """What to send of one table, in the order of parts, then sources.

    row: which of the V distinct keys each entry is.
    targets: which vector in the buffer of the dim it goes into: one per entry, or one per bag.
    bags: offsets of bags into the entries, where they are pooled here; else None.
    weights: may be empty.
    ends: [P], how many targets there are up to the end of each part.
    """

    row: np.ndarray
    targets: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray
    ends: list[int]


@dataclasses.dataclass
class OwnedKeys:
    """What is asked of one table of this owner for one batch.

    keys_V: distinct keys.
    row_E: which of them each received key is, in the order of sources; grad_E: which vector in the returned buffer of the
        dim its gradient is. In this order gradients are added up, whatever the parts.
    weights_E: may be empty.
    numbers: the arrays that say of something which of the distinct keys it is, row_E among them or not (see ReplicaRoute).
    """

    keys_V: np.ndarray
    row_E: np.ndarray
    grad_E: np.ndarray
    weights_E: np.ndarray
    answer: Answer
    numbers: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [self.row_E] if self.answer.row is self.row_E else [self.row_E, self.answer.row]

    def merge(self, places: np.ndarray) -> None:
        """Keys that share a row become one: key v is now row places[v]."""
        for number in self.numbers:
            compose(number, places, number)


class OwnerRoute:
    """What the others ask of this worker for one batch.

    vectors, grads: how the vectors to send, and the gradients that will come back, lie in the buffers of their dims.
    tables[k]: see OwnedKeys.
    """

    def __init__(
        self,
        sizes: Sizes,
        payload: np.ndarray,
        layout: PayloadLayout,
        plan: ExchangePlan,
        window: Window,
        dedup: Deduplicator,
        arena: Arena,
    ) -> None:
        self._plan, self._window, self._arena, self._payload = plan, window, arena, payload
        self._words = layout.start
        self._keys, self._weighted, self._wide = np.ascontiguousarray(sizes.keys), sizes.weighted, sizes.wide
        self._vectors = sizes.vectors  # [K, P, W]
        self.vectors = self.grads = lay_out(self._vectors, plan)
        self._bag_offsets: dict[int, np.ndarray] = {}
        last = [self._last_use(k) for k in range(len(plan.tables))]
        if window.last_use is not None:
            grad_counts = self._vectors.copy()
            for k, parts in enumerate(last):
                if parts is not None:
                    count_by_part(parts, self._keys[k], np.arange(len(sizes.table)), grad_counts[k])
            self.grads = lay_out(grad_counts, plan)
        self.tables = [self._owned(k, last[k], dedup) for k in range(len(plan.tables))]

    def _last_use(self, k: int) -> np.ndarray | None:
        """The last part that uses each received key; None where it is the one that asks."""
        kind = self._window.last_use
        if kind is None or self._plan.at_owner[k]:
            return None
        parts = self._arena.take(f"owned last use {k}", int(self._keys[k].sum()), kind)
        source_start = self._words[k, 3] * (4 // kind.itemsize)
        copy_segments(self._payload.view(kind), source_start, parts, starts(self._keys[k]), self._keys[k])
        return parts

    def _owned(self, k: int, last: np.ndarray | None, dedup: Deduplicator) -> OwnedKeys:
        take, counts, words = self._arena.take, self._keys[k], self._words[k]
        key_start, num_keys = starts(counts), int(counts.sum())
        keys = take(f"received keys {k}", num_keys, np.int64)
        wide = self._wide[k]
        if wide.any():
            copy_segments(self._payload, words[0], keys.view(np.int32), key_start * 2, counts * 2 * wide)
        if not wide.all():
            copy_segments(self._payload, words[0], keys, key_start, counts * (1 - wide))
        unique, row = take(f"owned unique {k}", num_keys, np.int64), take(f"owned rows {k}", num_keys, np.int32)
        unique = unique[: dedup(keys, unique, row)]
        if self._plan.at_owner[k]:
            return self._owned_bags(k, unique, row)

        targets = take(f"owned targets {k}", num_keys, np.int32)
        vectors = self._vectors[k]
        segment_places(vectors.ravel(), self.vectors.start[k].ravel(), targets)
        answer = Answer(self._by_part(f"{k}", row, vectors), targets, None, ONES, self._ends(k))
        grads = targets
        if last is not None:
            grads = take(f"owned grads {k}", num_keys, np.int32)
            places_by_part(last, counts, np.arange(len(counts)), self.grads.start[k].copy(), grads)
        elif self._window.parts > 1:
            grads = take(f"owned grads {k}", num_keys, np.int32)
            segment_places(vectors.T.ravel(), self.grads.start[k].T.ravel(), grads)
        return OwnedKeys(unique, row, grads, ONES, answer)

    def _owned_bags(self, k: int, unique: np.ndarray, row: np.ndarray) -> OwnedKeys:
        take, counts, words, vectors = self._arena.take, self._keys[k], self._words[k], self._vectors[k]
        num_bags, from_source = int(vectors.sum()), vectors.sum(axis=0)
        lengths, grad_targets = (
            take(f"owned lengths {k}", num_bags, np.int32),
            take(f"owned bags {k}", num_bags, np.int32),
        )
        copy_segments(self._payload, words[1], lengths, starts(from_source), from_source)
        offsets = self._offsets(f"owned offsets {k}", lengths)
        segment_places(vectors.T.ravel(), self.grads.start[k].T.ravel(), grad_targets)
        grads = take(f"owned grads {k}", len(row), np.int32)
        spread_over_bags(offsets, grad_targets, grads)
        weights = ONES
        if self._weighted[k].any():
            weights = take(f"owned weights {k}", len(row), np.float32)
            weights[:] = 1  # of sources that sent none
            sent = counts * self._weighted[k]
            copy_segments(self._payload, words[2], weights.view(np.int32), starts(counts), sent)

        targets, answer_offsets = take(f"owned targets {k}", num_bags, np.int32), offsets
        segment_places(vectors.ravel(), self.vectors.start[k].ravel(), targets)
        self._bag_offsets[k] = offsets
        keys_of = self._keys_by_part(k)
        if self._window.parts > 1:
            answer_offsets = self._offsets(f"answer offsets {k}", self._by_part(f"lengths {k}", lengths, vectors))
        answer = Answer(
            self._by_part(f"{k}", row, keys_of),
            targets,
            answer_offsets,
            self._by_part(f"weights {k}", weights, keys_of) if len(weights) else ONES,
            self._ends(k),
        )
        return OwnedKeys(unique, row, grads, weights, answer)

    def _offsets(self, name: str, lengths: np.ndarray) -> np.ndarray:
        offsets = self._arena.take(name, len(lengths) + 1, np.int64)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        return offsets

    def _by_part(self, name: str, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Values that lie by source, then part, brought into the order of parts, then sources. counts: [P, W]"""
        if self._window.parts == 1:
            return values
        out = self._arena.take(f"answer {name}", len(values), values.dtype)
        by_source = starts(counts.T.ravel()).reshape(counts.T.shape).T
        copy_segments(values, by_source.ravel(), out, starts(counts.ravel()), counts.ravel())
        return out

    def _ends(self, k: int) -> list[int]:
        return np.cumsum(self._vectors[k].sum(axis=1)).tolist()

    def last_parts(self, k: int) -> np.ndarray:
        """The last part with which a gradient of each distinct key of table k comes back."""
        owned, kind = self.tables[k], np.uint8 if self._window.parts <= 256 else np.uint16
        out = self._arena.take(f"last parts {k}", len(owned.keys_V), kind)
        if self._window.parts == 1:
            out[:] = 0
            return out
        parts = self._last_use(k)
        if parts is None:  # with the part that asks; what was asked lies by source, then part
            counts = self._keys_by_part(k).T
            parts = np.repeat(np.tile(np.arange(counts.shape[1], dtype=kind), len(counts)), counts.ravel())
        last_part(owned.row_E, parts, out)
        return out

    def _keys_by_part(self, k: int) -> np.ndarray:
        """[P, W]"""
        vectors = self._vectors[k]
        if not self._plan.at_owner[k]:
            return vectors
        offsets = self._bag_offsets[k]
        return np.diff(offsets[np.append(starts(vectors.T.ravel()), vectors.sum())]).reshape(vectors.T.shape).T

    def answer(self, k: int, part: int, rows: Rows, positions_V: np.ndarray, out: np.ndarray) -> None:
        """Writes what the sources ask of table k with a part into the buffer of its dim; key v's row is positions_V[v]."""
        answer = self.tables[k].answer
        a, z = answer.ends[part - 1] if part else 0, answer.ends[part]
        if answer.bags is None:
            positions = self._positions(answer.row[a:z], positions_V)
            gather(rows, positions, answer.targets[a:z], out)
        else:
            offsets = answer.bags[a : z + 1]
            first, last = offsets[0], offsets[-1]
            positions = self._positions(answer.row[first:last], positions_V)
            weights = answer.weights[first:last] if len(answer.weights) else ONES
            pool(rows, positions, offsets - first if first else offsets, weights, answer.targets[a:z], out)

    def _positions(self, row: np.ndarray, positions_V: np.ndarray) -> np.ndarray:
        positions = self._arena.take("owned positions", len(row), np.int64)
        compose(row, positions_V, positions)
        return positions

    def gradients(self, k: int, num_rows: int, received: np.ndarray) -> Gradients:
        """The received gradients by row of table k: of each row, in the order of source ranks."""
        owned, take = self.tables[k], self._arena.take
        num_entries, num_weights = len(owned.row_E), len(owned.weights_E)
        start, cursor = take(f"start {k}", num_rows + 1, np.int32), take(f"cursor {k}", num_rows, np.int32)
        origins, weights = take(f"origins {k}", num_entries, np.int32), take(f"by row {k}", num_weights, np.float32)
        group_by_row(owned.row_E, num_rows, owned.grad_E, owned.weights_E, start, cursor, origins, weights)
        return Gradients(received, start, origins, weights)

"""The source's side of an exchange: from the keys of a batch to messages, and where the answers will lie.

Legend: K tables, W workers, P parts of the window, T keys of one table in the batch, R rows (or bags) asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged
from nestpipe.exchange.layout import Sizes, key_bytes, lay_out, payload_layout, starts
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator, bucket, compose
from nestpipe.kernels.route import copy_segments, count_bags, fill_bags, mean_weights, segment_places
from nestpipe.kernels.rows import ONES
from nestpipe.kernels.window import count_by_part, distinct_in_each, first_and_last_use, places_by_part
from nestpipe.tables import Feature


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


@dataclasses.dataclass
class _TableKeys:
    """One table's keys in the batch, of all its features: micro-batch by micro-batch, in each feature by feature."""

    keys: np.ndarray  # [T]
    offsets: np.ndarray  # of every sample of every feature, in that order
    weights: np.ndarray  # [T] or empty


@dataclasses.dataclass
class _RowRequest:
    """The distinct keys of a table, by part and owner: their rows are sent."""

    inverse_T: np.ndarray
    place_R: np.ndarray
    keys_R: np.ndarray
    last_R: np.ndarray  # the last part that uses each; empty if it is the one that asks
    counts: np.ndarray  # [P, W]


@dataclasses.dataclass
class _BagRequest:
    """The bags of a table, to be cut into a piece per owner: their pooled vectors are sent.

    Keys go as they are: an owner needs to know which keys each bag has, and deduplicates them itself.
    """

    owner_T: np.ndarray
    num_bags: np.ndarray  # [P, W]
    num_keys: np.ndarray  # [P, W]


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
        self._plan, self._window, self._transport, self._arena = plan, window, transport, arena
        tables = [self._keys(k, batch) for k in range(len(plan.tables))]
        rows = {k: self._ask_rows(k, t, dedup) for k, t in enumerate(tables) if plan.at_owner[k] is not True}
        bags = {k: self._ask_bags(k, t) for k, t in enumerate(tables) if plan.at_owner[k] is not False}
        if plan.undecided:
            _decide(plan, transport, tables, rows, bags)

        self.sizes = Sizes.empty(transport.world, len(tables), window.parts)
        grad_counts = np.zeros((len(tables), window.parts, transport.world), np.int64)
        for k, table in enumerate(tables):
            wide = key_bytes(table.keys) == 8
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

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _keys(self, k: int, batch: Batch) -> _TableKeys:
        features = self._plan.features_of[k]
        lists = [batch.keys[feature.name] for feature in features]
        weighted = any(
            f.pooling == "mean" or (f.pooling and j.weights is not None) for f, j in zip(features, lists, strict=True)
        )
        weights = [self._weights(f, j) if weighted else ONES for f, j in zip(features, lists, strict=True)]
        if len(lists) == 1:
            (jagged,) = lists
            return _TableKeys(np.ascontiguousarray(jagged.values.numpy()), jagged.offsets.numpy(), weights[0])
        keys, offsets, by_key, total = [], [], [], 0
        for first, last in zip(self._window.bounds[:-1], self._window.bounds[1:], strict=True):
            for jagged, of_feature in zip(lists, weights, strict=True):
                all_offsets = jagged.offsets.numpy()
                a, z = int(all_offsets[first]), int(all_offsets[last])
                keys.append(jagged.values.numpy()[a:z])
                by_key.append(of_feature[a:z])
                offsets.append(all_offsets[first:last] + (total - a))
                total += z - a
        offsets.append(np.array([total]))
        return _TableKeys(np.concatenate(keys), np.concatenate(offsets), np.concatenate(by_key))

    def _weights(self, feature: Feature, jagged: Jagged) -> np.ndarray:
        """What each key counts in the sum over its bag."""
        given = ONES if jagged.weights is None else jagged.weights.detach().float().contiguous().numpy()
        weights = self._arena.take(f"weights {feature.name}", len(jagged.values), np.float32)
        if feature.pooling == "mean":
            mean_weights(jagged.offsets.numpy(), given, 0, weights)
        else:
            weights[:] = given if feature.pooling and len(given) else 1.0
        return weights

    def _ends(self, k: int, table: _TableKeys) -> np.ndarray:
        """How many of a table's keys there are up to the end of each micro-batch."""
        return table.offsets[np.array(self._window.bounds[1:]) * len(self._plan.features_of[k])]

    def _ask_rows(self, k: int, table: _TableKeys, dedup: Deduplicator) -> _RowRequest:
        """Deduplicates the keys, of the batch or of each micro-batch, and sorts them by part and owner."""
        world, take, window = self._transport.world, self._arena.take, self._window
        num_keys = len(table.keys)
        unique, inverse = take(f"unique {k}", num_keys, np.int64), take(f"inverse {k}", num_keys, np.int32)
        asked = unique = unique[: dedup(table.keys, unique, inverse)]
        num_new, last = np.zeros(window.micro_batches, np.int64), np.empty(0, np.uint8)
        if not window.cached and window.micro_batches > 1:
            origin, scratch = take(f"origin {k}", num_keys, np.int32), take(f"request {k}", len(unique), np.int32)
            origin = origin[: distinct_in_each(inverse, self._ends(k, table), num_new, scratch, origin)]
            asked = take(f"asked {k}", len(origin), np.int64)
            compose(origin, unique, asked)
        elif window.last_use is not None:
            last = take(f"last use {k}", len(unique), window.last_use)
            first_and_last_use(inverse, self._ends(k, table), num_new, last)
        part_ends = np.cumsum(num_new).tolist() if window.parts > 1 else [len(asked)]
        owner, place = take(f"owner {k}", len(asked), np.int32), take(f"place {k}", len(asked), np.int32)
        bucketed, counts = take(f"bucketed {k}", len(asked), np.int64), np.zeros((window.parts, world), np.int64)
        scratch, a = np.empty(world, np.int64), 0
        for part, z in enumerate(part_ends):
            bucket(asked[a:z], self._plan.owners[k], owner[a:z], counts[part], scratch, bucketed[a:z], place[a:z])
            place[a:z] += a
            a = z
        if len(last):
            by_place = take(f"last use by place {k}", len(last), last.dtype)
            by_place[place] = last
            last = by_place
        return _RowRequest(inverse, place, bucketed, last, counts)

    def _ask_bags(self, k: int, table: _TableKeys) -> _BagRequest:
        world, parts = self._transport.world, self._window.parts
        owner, scratch = self._arena.take(f"owner of {k}", len(table.keys), np.int32), np.empty(world, np.int64)
        num_bags, num_keys = np.zeros((parts, world), np.int64), np.zeros((parts, world), np.int64)
        for part, offsets in enumerate(self._bags_of_parts(k, table.offsets)):
            count_bags(table.keys, self._plan.owners[k], offsets, scratch, owner, num_bags[part], num_keys[part])
        return _BagRequest(owner, num_bags, num_keys)

    def _bags_of_parts(self, k: int, offsets: np.ndarray) -> list[np.ndarray]:
        bounds = [bound * len(self._plan.features_of[k]) for bound in self._window.part_bounds]
        return [offsets[a : z + 1] for a, z in zip(bounds[:-1], bounds[1:], strict=True)]

    def _count_grads(self, rows: _RowRequest) -> np.ndarray:
        """How many gradients go to each worker with each part [P, W]."""
        if self._window.last_use is None:
            return rows.counts
        counts = np.empty_like(rows.counts)
        count_by_part(rows.last_R, rows.counts.ravel(), self._workers(), counts)
        return counts

    def _workers(self) -> np.ndarray:
        """The worker of each segment, where segments lie by part, then worker."""
        return np.tile(np.arange(self._transport.world), self._window.parts)

    # -- where it lies -----------------------------------------------------------------------------------------------

    def _lay_out_rows(self, k: int, table: _TableKeys, rows: _RowRequest, word_start: np.ndarray) -> None:
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

    def _positions(self, name: str, rows: _RowRequest, places: np.ndarray) -> np.ndarray:
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

    def _lay_out_bags(self, k: int, table: _TableKeys, bags: _BagRequest, word_start: np.ndarray) -> None:
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
        scratch = np.empty(self._transport.world, np.int64)
        pieces = zip(
            self._bags_of_parts(k, table.offsets), self._bags_of_parts(k, vector_offsets), self.vectors.start[k], strict=True
        )  # fmt: skip
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


def wire_bytes(dim: int, keys: np.ndarray, *, weighted: bool) -> tuple[int, int, int]:
    """What crosses the wire for a row, for a bag that is pooled at the owner, and for each key of such a bag."""
    vector, key = dim * 8, key_bytes(keys)  # the vector there, and its gradient back
    return vector + key, vector + 4, key + (4 if weighted else 0)


def _decide(
    plan: ExchangePlan,
    transport: Transport,
    tables: list[_TableKeys],
    rows: dict[int, _RowRequest],
    bags: dict[int, _BagRequest],
) -> None:
    """Counts what leaves each worker either way, over all workers, and fixes the cheaper one for each open table."""
    others = np.arange(transport.world) != transport.rank
    counted = []
    for k in plan.undecided:
        row_bytes, bag_bytes, key_bytes = wire_bytes(
            plan.tables[k].dim, tables[k].keys, weighted=len(tables[k].weights) > 0
        )
        as_rows = rows[k].counts[:, others].sum() * row_bytes
        as_bags = bags[k].num_bags[:, others].sum() * bag_bytes + bags[k].num_keys[:, others].sum() * key_bytes
        # Held by one worker: all others send it their keys and get a vector for each bag that has any.
        num_bags = np.count_nonzero(np.diff(tables[k].offsets))
        whole = (num_bags * bag_bytes + len(tables[k].keys) * key_bytes) * (transport.world - 1) // transport.world
        counted.append((as_rows, as_bags, whole))
    totals = transport.sum(np.array(counted, np.int64))
    for k, (as_rows, as_bags, whole) in zip(plan.undecided, totals.tolist(), strict=True):
        if as_rows or transport.world == 1:  # else no worker has a key of this table yet: wait for a batch that has
            plan.decide(k, row_bytes=as_rows, bag_bytes=as_bags, whole_bytes=whole)

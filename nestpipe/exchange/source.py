"""The source's side of an exchange: from the keys of a batch to messages, and where the answers will lie.

Legend: K tables, W workers, T keys of one table in the batch, U distinct ones.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import Deduplicator, bucket, compose
from nestpipe.kernels.route import copy_segments, count_bags, fill_bags, mean_weights, segment_places
from nestpipe.kernels.rows import ONES

FIELDS = 3  # of a size entry: keys, vectors, 1 if keys have weights


@dataclasses.dataclass
class Entries:
    """Where a feature's vectors lie in the received buffer of its dim: sample b has positions[offsets[b]:offsets[b + 1]].

    One entry per key where rows travel, one per owner where bags are pooled there. weights may be empty: 1 each.
    once: no position occurs twice in all samples (each bag has vectors of its own), and weights are 1.
    """

    dim: int
    positions: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    once: bool


@dataclasses.dataclass
class _TableKeys:
    """One table's keys in the batch, of all its features."""

    keys: np.ndarray  # [T]
    offsets: list[np.ndarray]  # per feature, into the T keys
    weights: np.ndarray  # [T] or empty


@dataclasses.dataclass
class _RowRequest:
    """The distinct keys of a table, by owner: their rows are sent."""

    inverse_T: np.ndarray
    place_U: np.ndarray
    keys_U: np.ndarray
    counts: np.ndarray  # [W]


@dataclasses.dataclass
class _BagRequest:
    """The bags of a table, to be cut into a part per owner: their pooled vectors are sent.

    Keys go as they are: an owner needs to know which keys each bag has, and deduplicates them itself.
    """

    offsets: np.ndarray  # of the bags of all features
    owner_T: np.ndarray
    num_bags: np.ndarray  # [W]
    num_keys: np.ndarray  # [W]


class SourceRoute:
    """What this worker asks of the others for one batch.

    sizes: [W, 1 + K * FIELDS]; column 0 is left to the caller.
    payload: int32 words, payload_counts of them to each worker.
    vectors[dim]: [W] vectors to come from each worker, in the order of tables.
    entries[feature]: see Entries.
    """

    def __init__(
        self, batch: Batch, plan: ExchangePlan, transport: Transport, dedup: Deduplicator, arena: Arena
    ) -> None:
        self._plan, self._transport, self._arena = plan, transport, arena
        tables = [self._keys(k, batch) for k in range(len(plan.tables))]
        rows = {k: self._ask_rows(k, t, dedup) for k, t in enumerate(tables) if plan.at_owner[k] is not True}
        bags = {k: self._ask_bags(k, t) for k, t in enumerate(tables) if plan.at_owner[k] is not False}
        if plan.undecided:
            _decide(plan, transport, tables, rows, bags)

        self.sizes = np.zeros((transport.world, 1 + len(tables) * FIELDS), np.int64)
        for k, table in enumerate(tables):
            column = self.sizes[:, 1 + k * FIELDS :]
            if plan.at_owner[k]:
                column[:, 0], column[:, 1] = bags[k].num_keys, bags[k].num_bags
                column[:, 2] = len(table.weights) > 0
            else:
                column[:, 0] = column[:, 1] = rows[k].counts
        vector_start, self.vectors = vector_layout(self.sizes, plan)
        word_start, self.payload_counts = payload_layout(self.sizes, plan)
        self.payload = arena.take("payload out", int(self.payload_counts.sum()), np.int32)
        self.entries: dict[str, Entries] = {}
        for k, table in enumerate(tables):
            if plan.at_owner[k]:
                self._lay_out_bags(k, table, bags[k], word_start[k], vector_start[k])
            else:
                self._lay_out_rows(k, table, rows[k], word_start[k], vector_start[k])

    def _keys(self, k: int, batch: Batch) -> _TableKeys:
        features = self._plan.features_of[k]
        lists = [batch.keys[feature.name] for feature in features]
        values = [jagged.values.numpy() for jagged in lists]
        first = [0, *np.cumsum([len(v) for v in values]).tolist()]
        keys = np.ascontiguousarray(values[0]) if len(values) == 1 else np.concatenate(values)
        weights = ONES
        if any(
            f.pooling == "mean" or (f.pooling and j.weights is not None) for f, j in zip(features, lists, strict=True)
        ):
            weights = self._arena.take(f"weights {k}", len(keys), np.float32)
            for feature, jagged, start in zip(features, lists, first[:-1], strict=True):
                given = ONES if jagged.weights is None else jagged.weights.detach().float().contiguous().numpy()
                if feature.pooling == "mean":
                    mean_weights(jagged.offsets.numpy(), given, start, weights)
                else:
                    weights[start : start + len(jagged.values)] = given if len(given) else 1.0
        offsets = [jagged.offsets.numpy() + start for jagged, start in zip(lists, first[:-1], strict=True)]
        return _TableKeys(keys, offsets, weights)

    def _ask_rows(self, k: int, table: _TableKeys, dedup: Deduplicator) -> _RowRequest:
        """Deduplicates the keys and sorts them by owner."""
        world, take, num_keys = self._transport.world, self._arena.take, len(table.keys)
        unique, inverse = take(f"unique {k}", num_keys, np.int64), take(f"inverse {k}", num_keys, np.int32)
        unique = unique[: dedup(table.keys, unique, inverse)]
        owner, place = take(f"owner {k}", len(unique), np.int32), take(f"place {k}", len(unique), np.int32)
        bucketed, counts = take(f"bucketed {k}", len(unique), np.int64), np.zeros(world, np.int64)
        bucket(unique, world, owner, counts, np.empty(world, np.int64), bucketed, place)
        return _RowRequest(inverse, place, bucketed, counts)

    def _ask_bags(self, k: int, table: _TableKeys) -> _BagRequest:
        world = self._transport.world
        offsets = np.concatenate([table.offsets[0], *(o[1:] for o in table.offsets[1:])])
        owner = self._arena.take(f"owner of {k}", len(table.keys), np.int32)
        num_bags, num_keys = np.zeros(world, np.int64), np.zeros(world, np.int64)
        count_bags(table.keys, world, offsets, np.empty(world, np.int64), owner, num_bags, num_keys)
        return _BagRequest(offsets, owner, num_bags, num_keys)

    def _lay_out_rows(
        self, k: int, table: _TableKeys, rows: _RowRequest, word_start: np.ndarray, vector_start: np.ndarray
    ) -> None:
        take = self._arena.take
        copy_segments(rows.keys_U.view(np.int32), starts(rows.counts) * 2, self.payload, word_start[0], rows.counts * 2)
        # The received buffer is by owner, then by table: first where each distinct key's row will be, then each key's.
        places = take(f"places {k}", len(rows.keys_U), np.int32)
        segment_places(rows.counts, vector_start, places)
        moved = take(f"moved {k}", len(rows.place_U), np.int32)
        compose(rows.place_U, places, moved)
        positions = take(f"positions {k}", len(rows.inverse_T), np.int32)
        compose(rows.inverse_T, moved, positions)
        for feature, offsets in zip(self._plan.features_of[k], table.offsets, strict=True):
            weights = table.weights if feature.pooling else ONES
            self.entries[feature.name] = Entries(self._plan.tables[k].dim, positions, offsets, weights, once=False)

    def _lay_out_bags(
        self, k: int, table: _TableKeys, bags: _BagRequest, word_start: np.ndarray, vector_start: np.ndarray
    ) -> None:
        take, features = self._arena.take, self._plan.features_of[k]
        num_bags, num_keys = int(bags.num_bags.sum()), len(table.keys)
        lengths, vectors = take(f"bag lengths {k}", num_bags, np.int32), take(f"positions {k}", num_bags, np.int32)
        keys = take(f"bag keys {k}", num_keys, np.int64)
        weights = take(f"bag weights {k}", len(table.weights), np.float32)
        vector_offsets = take(f"vector offsets {k}", len(bags.offsets), np.int64)
        bag_start, key_start = starts(bags.num_bags), starts(bags.num_keys)
        fill_bags(
            table.keys, bags.owner_T, bags.offsets, table.weights, bag_start.copy(), key_start.copy(),
            vector_start.copy(), np.empty(self._transport.world, np.int64),
            lengths, keys, weights, vectors, vector_offsets,
        )  # fmt: skip
        copy_segments(keys.view(np.int32), key_start * 2, self.payload, word_start[0], bags.num_keys * 2)
        copy_segments(lengths, bag_start, self.payload, word_start[1], bags.num_bags)
        if len(weights):
            copy_segments(weights.view(np.int32), key_start, self.payload, word_start[2], bags.num_keys)
        size = (len(bags.offsets) - 1) // len(features)
        for i, feature in enumerate(features):
            of_feature = vector_offsets[i * size : (i + 1) * size + 1]
            self.entries[feature.name] = Entries(self._plan.tables[k].dim, vectors, of_feature, ONES, once=True)


def vector_layout(sizes: np.ndarray, plan: ExchangePlan) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Where the vectors of table k to or from worker w start in the buffer of its dim [K, W], and how many per worker."""
    start = np.empty((len(plan.tables), len(sizes)), np.int64)
    totals = {}
    for dim, members in plan.groups.items():
        counts = np.stack([sizes[:, 2 + k * FIELDS] for k in members], axis=1)  # [W, tables of this dim]
        start[members] = starts(counts.ravel()).reshape(counts.shape).T
        totals[dim] = counts.sum(axis=1)
    return start, totals


def payload_layout(sizes: np.ndarray, plan: ExchangePlan) -> tuple[np.ndarray, np.ndarray]:
    """Where keys, bag lengths and weights start in the payload, in int32 words [K, 3, W]; words per worker."""
    world, num_tables = len(sizes), len(plan.tables)
    words = np.zeros((world, num_tables, 3), np.int64)
    for k in range(num_tables):
        keys, vectors, weighted = sizes[:, 1 + k * FIELDS : 1 + (k + 1) * FIELDS].T
        words[:, k, 0] = keys * 2
        words[:, k, 1] = vectors if plan.at_owner[k] else 0
        words[:, k, 2] = keys * weighted
    start = starts(words.ravel()).reshape(words.shape)
    return np.ascontiguousarray(start.transpose(1, 2, 0)), words.sum(axis=(1, 2))


def starts(counts: np.ndarray) -> np.ndarray:
    """Where each of consecutive segments begins."""
    return np.cumsum(counts) - counts


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
        vector_bytes = plan.tables[k].dim * 8  # there, and its gradient back
        key_bytes = 12 if len(tables[k].weights) else 8
        as_rows = rows[k].counts[others].sum() * (vector_bytes + 8)
        as_bags = bags[k].num_bags[others].sum() * (vector_bytes + 4) + bags[k].num_keys[others].sum() * key_bytes
        counted.append((as_rows, as_bags))
    totals = transport.sum(np.array(counted, np.int64))
    for k, (row_bytes, bag_bytes) in zip(plan.undecided, totals.tolist(), strict=True):
        if row_bytes or transport.world == 1:  # else no worker has a key of this table yet: wait for a batch that has
            plan.decide(k, row_bytes=row_bytes, bag_bytes=bag_bytes)

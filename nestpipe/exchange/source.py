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

FIELDS = 4  # of a size entry: keys, vectors, entries of bags, 1 if entries have weights


@dataclasses.dataclass
class Entries:
    """Where a feature's vectors lie in the received buffer of its dim: sample b has positions[offsets[b]:offsets[b + 1]].

    One entry per key where rows travel, one per owner where bags are pooled there. weights may be empty: 1 each.
    """

    dim: int
    positions: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass
class _TableKeys:
    """One table's keys in the batch, deduplicated and sorted by owner."""

    offsets: list[np.ndarray]  # per feature, into the T keys of the table
    weights: np.ndarray  # [T] or empty
    inverse_T: np.ndarray
    owner_U: np.ndarray
    place_U: np.ndarray
    keys_U: np.ndarray  # by owner
    counts: np.ndarray  # [W] distinct keys
    num_bags: np.ndarray  # [W]
    num_entries: np.ndarray  # [W]


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
        tables = [self._keys(k, batch, dedup) for k in range(len(plan.tables))]
        if plan.undecided:
            _decide(plan, transport, tables)
        self._lay_out(tables)

    def _keys(self, k: int, batch: Batch, dedup: Deduplicator) -> _TableKeys:
        """Deduplicates table k's keys over all its features and buckets them by owner."""
        features, world, take = self._plan.features_of[k], self._transport.world, self._arena.take
        lists = [batch.keys[feature.name] for feature in features]
        values = [jagged.values.numpy() for jagged in lists]
        first = np.cumsum([0, *(len(v) for v in values)])
        keys = np.ascontiguousarray(values[0]) if len(values) == 1 else np.concatenate(values)
        num_keys = len(keys)
        unique, inverse = take(f"unique {k}", num_keys, np.int64), take(f"inverse {k}", num_keys, np.int32)
        unique = unique[: dedup(keys, unique, inverse)]
        n = len(unique)
        owner, place = take(f"owner {k}", n, np.int32), take(f"place {k}", n, np.int32)
        bucketed, counts = take(f"bucketed {k}", n, np.int64), np.zeros(world, np.int64)
        bucket(unique, world, owner, counts, np.empty(world, np.int64), bucketed, place)

        weights = ONES
        if any(
            f.pooling == "mean" or (f.pooling and j.weights is not None) for f, j in zip(features, lists, strict=True)
        ):
            weights = take(f"weights {k}", num_keys, np.float32)
            for feature, jagged, start in zip(features, lists, first[:-1], strict=True):
                given = ONES if jagged.weights is None else jagged.weights.float().contiguous().numpy()
                if feature.pooling == "mean":
                    mean_weights(jagged.offsets.numpy(), given, start, weights)
                else:
                    weights[start : start + len(jagged.values)] = given if len(given) else 1.0
        offsets = [jagged.offsets.numpy() + start for jagged, start in zip(lists, first[:-1], strict=True)]
        num_bags, num_entries = np.zeros(world, np.int64), np.zeros(world, np.int64)
        if self._plan.at_owner[k] is not False:
            count_bags(inverse, owner, _joined(offsets), np.empty(world, np.int64), num_bags, num_entries)
        return _TableKeys(offsets, weights, inverse, owner, place, bucketed, counts, num_bags, num_entries)

    def _lay_out(self, tables: list[_TableKeys]) -> None:
        """Writes the messages, and works out where each answer will lie."""
        plan, world, take = self._plan, self._transport.world, self._arena.take
        num_tables = len(tables)
        sizes = np.zeros((world, 1 + num_tables * FIELDS), np.int64)
        for k, table in enumerate(tables):
            at_owner = plan.at_owner[k]
            column = sizes[:, 1 + k * FIELDS :]
            column[:, 0] = table.counts
            column[:, 1] = table.num_bags if at_owner else table.counts
            column[:, 2] = table.num_entries if at_owner else 0
            column[:, 3] = 1 if at_owner and len(table.weights) else 0
        self.sizes = sizes
        vector_start, self.vectors = vector_layout(sizes, plan)
        word_start, self.payload_counts = payload_layout(sizes)
        self.payload = take("payload out", int(self.payload_counts.sum()), np.int32)
        self.entries: dict[str, Entries] = {}
        for k, table in enumerate(tables):
            key_start = starts(table.counts)
            copy_segments(table.keys_U.view(np.int32), key_start * 2, self.payload, word_start[k, 0], table.counts * 2)
            if plan.at_owner[k]:
                self._lay_out_bags(k, table, key_start, word_start[k], vector_start[k])
                continue
            places = take(f"places {k}", len(table.keys_U), np.int32)
            segment_places(table.counts, vector_start[k], places)
            # The received buffer is by owner, then by table: send each distinct key there, then each of the T keys.
            moved = take(f"moved {k}", len(table.place_U), np.int32)
            compose(table.place_U, places, moved)
            positions = take(f"positions {k}", len(table.inverse_T), np.int32)
            compose(table.inverse_T, moved, positions)
            for feature, offsets in zip(plan.features_of[k], table.offsets, strict=True):
                weights = table.weights if feature.pooling else ONES
                self.entries[feature.name] = Entries(plan.tables[k].dim, positions, offsets, weights)

    def _lay_out_bags(
        self, k: int, table: _TableKeys, key_start: np.ndarray, word_start: np.ndarray, vector_start: np.ndarray
    ) -> None:
        take, features = self._arena.take, self._plan.features_of[k]
        offsets = _joined(table.offsets)
        num_bags, num_entries = int(table.num_bags.sum()), len(table.inverse_T)
        lengths = take(f"bag lengths {k}", num_bags, np.int32)
        entries = take(f"bag entries {k}", num_entries, np.int32)
        entry_weights = take(f"bag weights {k}", len(table.weights), np.float32)
        vectors = take(f"positions {k}", num_bags, np.int32)
        vector_offsets = take(f"vector offsets {k}", len(offsets), np.int64)
        bag_start, entry_start = starts(table.num_bags), starts(table.num_entries)
        fill_bags(
            table.inverse_T, table.owner_U, table.place_U, key_start, offsets, table.weights, bag_start.copy(),
            entry_start.copy(), vector_start.copy(), np.empty(self._transport.world, np.int64),
            lengths, entries, entry_weights, vectors, vector_offsets,
        )  # fmt: skip
        copy_segments(lengths, bag_start, self.payload, word_start[1], table.num_bags)
        copy_segments(entries, entry_start, self.payload, word_start[2], table.num_entries)
        if len(table.weights):
            copy_segments(entry_weights.view(np.int32), entry_start, self.payload, word_start[3], table.num_entries)
        size = (len(offsets) - 1) // len(features)
        for i, feature in enumerate(features):
            bags = vector_offsets[i * size : (i + 1) * size + 1]
            self.entries[feature.name] = Entries(self._plan.tables[k].dim, vectors, bags, ONES)


def vector_layout(sizes: np.ndarray, plan: ExchangePlan) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Where the vectors of table k to or from worker w start in the buffer of its dim [K, W], and how many per worker."""
    start = np.empty((len(plan.tables), len(sizes)), np.int64)
    totals = {}
    for dim, members in plan.groups.items():
        counts = np.stack([sizes[:, 2 + k * FIELDS] for k in members], axis=1)  # [W, tables of this dim]
        start[members] = starts(counts.ravel()).reshape(counts.shape).T
        totals[dim] = counts.sum(axis=1)
    return start, totals


def payload_layout(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where keys, bag lengths, entries and weights start in the payload, in int32 words [K, 4, W]; words per worker."""
    world, num_tables = len(sizes), (sizes.shape[1] - 1) // FIELDS
    words = np.zeros((world, num_tables, 4), np.int64)
    for k in range(num_tables):
        keys, vectors, entries, weighted = sizes[:, 1 + k * FIELDS : 1 + (k + 1) * FIELDS].T
        words[:, k, 0] = keys * 2
        words[:, k, 1] = np.where(entries > 0, vectors, 0)
        words[:, k, 2] = entries
        words[:, k, 3] = entries * weighted
    start = starts(words.ravel()).reshape(words.shape)
    return np.ascontiguousarray(start.transpose(1, 2, 0)), words.sum(axis=(1, 2))


def starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _joined(offsets: list[np.ndarray]) -> np.ndarray:
    """Offsets of several features, which continue one another, as one list of bags."""
    return np.concatenate([offsets[0], *(o[1:] for o in offsets[1:])])


def _decide(plan: ExchangePlan, transport: Transport, tables: list[_TableKeys]) -> None:
    """Counts what leaves each worker either way, over all workers, and fixes the cheaper one for each open table."""
    others = np.arange(transport.world) != transport.rank
    counted = []
    for k in plan.undecided:
        dim, table = plan.tables[k].dim, tables[k]
        # There and back: vectors and their gradients. Bags also say which keys they are made of.
        rows = table.counts[others].sum() * dim * 8
        entry_bytes = 8 if len(table.weights) else 4
        bags = table.num_bags[others].sum() * (dim * 8 + 4) + table.num_entries[others].sum() * entry_bytes
        counted.append((rows, bags))
    totals = transport.sum(np.array(counted, np.int64))
    for k, (row_bytes, bag_bytes) in zip(plan.undecided, totals.tolist(), strict=True):
        if row_bytes or transport.world == 1:  # else no worker has a key of this table yet: wait for a batch that has
            plan.decide(k, row_bytes=row_bytes, bag_bytes=bag_bytes)

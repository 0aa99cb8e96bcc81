"""Requests: what a batch needs of every table, deduplicated and sorted by owner, before it is known how it travels.

Legend: W workers, P parts of the window, T keys of one table in the batch, R rows (or bags) asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator, bucket, compose
from nestpipe.kernels.route import count_bags, mean_weights
from nestpipe.kernels.rows import ONES
from nestpipe.kernels.window import distinct_in_each, first_and_last_use
from nestpipe.tables import Feature


@dataclasses.dataclass
class TableKeys:
    """One table's keys in the batch, of all its features: micro-batch by micro-batch, in each feature by feature."""

    keys: np.ndarray  # [T]
    offsets: np.ndarray  # of every sample of every feature, in that order
    weights: np.ndarray  # [T] or empty
    num_features: int

    def part(self, chosen_T: np.ndarray) -> TableKeys:
        """Those of the keys, in the same lists. (Weights are the feature's: it reads both parts.)"""
        before = np.zeros(len(chosen_T) + 1, np.int64)
        np.cumsum(chosen_T, out=before[1:])
        return TableKeys(self.keys[chosen_T], before[self.offsets], ONES, self.num_features)


@dataclasses.dataclass
class RowRequest:
    """The distinct keys of a table, by part and owner: their rows are sent."""

    inverse_T: np.ndarray
    place_R: np.ndarray
    keys_R: np.ndarray
    last_R: np.ndarray  # the last part that uses each; empty if it is the one that asks
    counts: np.ndarray  # [P, W]


@dataclasses.dataclass
class BagRequest:
    """The bags of a table, to be cut into a piece per owner: their pooled vectors are sent.

    Keys go as they are: an owner needs to know which keys each bag has, and deduplicates them itself.
    """

    owner_T: np.ndarray
    num_bags: np.ndarray  # [P, W]
    num_keys: np.ndarray  # [P, W]


class Requests:
    """whole[k]: the keys of table k as its features have them. hot[k]: which of them [T] are those of its twin, if it has one.
    tables[k]: the keys of table k, without those. rows[k], bags[k]: what is asked for as the plan says; both while undecided."""

    def __init__(
        self, batch: Batch, plan: ExchangePlan, window: Window, world: int, dedup: Deduplicator, arena: Arena
    ) -> None:
        self._plan, self._window, self._world, self._arena = plan, window, world, arena
        self.whole = [self._keys(plan.features_of[k], batch) for k in plan.declared]
        self.tables, self.hot = list(self.whole), {}
        for k in plan.twins:  # which stand behind all others, in this order
            table, chosen = self.whole[k], plan.hot[k]
            self.hot[k] = np.zeros(len(table.keys), bool) if chosen is None else chosen.contains(table.keys)
            self.tables[k] = table.part(~self.hot[k])
            self.tables.append(table.part(self.hot[k]))
        self.rows = {k: self._rows(k, t, dedup) for k, t in enumerate(self.tables) if plan.at_owner[k] is not True}
        self.bags = {k: self._bags(k, t) for k, t in enumerate(self.tables) if plan.at_owner[k] is not False}

    def _keys(self, features: list[Feature], batch: Batch) -> TableKeys:
        lists = [batch.keys[feature.name] for feature in features]
        weighted = any(
            f.pooling == "mean" or (f.pooling and j.weights is not None) for f, j in zip(features, lists, strict=True)
        )
        weights = [self._weights(f, j) if weighted else ONES for f, j in zip(features, lists, strict=True)]
        if len(lists) == 1:
            (jagged,) = lists
            return TableKeys(np.ascontiguousarray(jagged.values.numpy()), jagged.offsets.numpy(), weights[0], 1)
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
        return TableKeys(np.concatenate(keys), np.concatenate(offsets), np.concatenate(by_key), len(features))

    def _weights(self, feature: Feature, jagged: Jagged) -> np.ndarray:
        """What each key counts in the sum over its bag."""
        given = ONES if jagged.weights is None else jagged.weights.detach().float().contiguous().numpy()
        weights = self._arena.take(f"weights {feature.name}", len(jagged.values), np.float32)
        if feature.pooling == "mean":
            mean_weights(jagged.offsets.numpy(), given, weights)
        else:
            weights[:] = given if feature.pooling and len(given) else 1.0
        return weights

    def _rows(self, k: int, table: TableKeys, dedup: Deduplicator) -> RowRequest:
        """Deduplicates the keys, of the batch or of each micro-batch, and sorts them by part and owner."""
        world, take, window = self._world, self._arena.take, self._window
        num_keys = len(table.keys)
        unique, inverse = take(f"unique {k}", num_keys, np.int64), take(f"inverse {k}", num_keys, np.int32)
        asked = unique = unique[: dedup(table.keys, unique, inverse)]
        num_new, last = np.zeros(window.micro_batches, np.int64), np.empty(0, np.uint8)
        ends = window.ends(table.offsets, table.num_features)
        if not window.cached and window.micro_batches > 1:
            origin, scratch = take(f"origin {k}", num_keys, np.int32), take(f"request {k}", len(unique), np.int32)
            origin = origin[: distinct_in_each(inverse, ends, num_new, scratch, origin)]
            asked = take(f"asked {k}", len(origin), np.int64)
            compose(origin, unique, asked)
        elif window.last_use is not None:
            last = take(f"last use {k}", len(unique), window.last_use)
            first_and_last_use(inverse, ends, num_new, last)
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
        return RowRequest(inverse, place, bucketed, last, counts)

    def _bags(self, k: int, table: TableKeys) -> BagRequest:
        world, parts = self._world, self._window.parts
        owner, scratch = self._arena.take(f"owner of {k}", len(table.keys), np.int32), np.empty(world, np.int64)
        num_bags, num_keys = np.zeros((parts, world), np.int64), np.zeros((parts, world), np.int64)
        for part, offsets in enumerate(self._window.cut(table.offsets, table.num_features)):
            count_bags(table.keys, self._plan.owners[k], offsets, scratch, owner, num_bags[part], num_keys[part])
        return BagRequest(owner, num_bags, num_keys)


def decide(plan: ExchangePlan, requests: Requests, transport: Transport) -> None:
    """Fixes how each open table travels: counts what leaves each worker either way, over all workers, and takes the cheaper one.
    All workers call it."""
    if not plan.undecided:
        return
    others = np.arange(transport.world) != transport.rank
    counted = []
    for k in plan.undecided:
        table, rows, bags = requests.tables[k], requests.rows[k], requests.bags[k]
        row_bytes, bag_bytes, key_bytes = wire_bytes(plan.tables[k].dim, table.keys, weighted=len(table.weights) > 0)
        as_rows = rows.counts[:, others].sum() * row_bytes
        as_bags = bags.num_bags[:, others].sum() * bag_bytes + bags.num_keys[:, others].sum() * key_bytes
        # Held by one worker: all others send it their keys and get a vector for each bag that has any.
        num_bags = np.count_nonzero(np.diff(table.offsets))
        whole = (num_bags * bag_bytes + len(table.keys) * key_bytes) * (transport.world - 1) // transport.world
        counted.append((as_rows, as_bags, whole))
    totals = transport.sum(np.array(counted, np.int64))
    for k, (as_rows, as_bags, whole) in zip(plan.undecided, totals.tolist(), strict=True):
        if as_rows or transport.world == 1:  # else no worker has a key of this table yet: wait for a batch that has
            plan.decide(k, row_bytes=as_rows, bag_bytes=as_bags, whole_bytes=whole)


def is_wide(keys: np.ndarray) -> bool:
    """Whether one of the keys needs more than four bytes."""
    return bool(len(keys)) and not -(2**31) <= keys.min() <= keys.max() < 2**31


def wire_bytes(dim: int, keys: np.ndarray, *, weighted: bool) -> tuple[int, int, int]:
    """What crosses the wire for a row, for a bag that is pooled at the owner, and for each key of such a bag."""
    vector, key = dim * 8, 8 if is_wide(keys) else 4  # the vector there, and its gradient back
    return vector + key, vector + 4, key + (4 if weighted else 0)

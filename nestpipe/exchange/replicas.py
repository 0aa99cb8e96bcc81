"""What workers that hold the same part of a table, each for its own group, tell each other about one batch.

Their keys, two batches ahead: then all of them find, create, count and give up the same rows. And for tables kept exactly
together, sums of gradients: each worker adds up those of its own group, sends the sums to the others, and all add up the
same sums in the same order.

Legend: K tables, M peers, P parts of the window, V distinct keys of this group, X those of all groups one after the other, U
distinct ones of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.layout import lay_out, starts
from nestpipe.exchange.owner import OwnedKeys, OwnerRoute
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.requests import is_wide
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator, compose
from nestpipe.kernels.merge import sum_rows
from nestpipe.kernels.rows import ONES
from nestpipe.kernels.update import Gradients, group_by_row
from nestpipe.kernels.window import count_by_part, places_by_part


@dataclasses.dataclass
class Merged:
    """One table's keys of all groups, of one that is kept exactly together.

    place_X: which vector in the buffer of the dim the sum of each is. own: where those of this group are among X.
    by_part: [P], which of this group's keys have their last gradient with each part.
    """

    place_X: np.ndarray
    own: slice
    by_part: list[np.ndarray]


class ReplicaRoute:
    """What one set of peers has to do with each other for one batch. From here on keys_V of their tables are the keys of all
    groups, the same in the same order on all peers.

    peers: by rank; this worker is number `here` of them.
    members: the tables that they hold together.
    sums[dim]: of tables that are kept exactly together, vectors by part, then peer, then table.
    """

    def __init__(
        self,
        peers: Sequence[int],
        members: Sequence[int],
        owner: OwnerRoute,
        plan: ExchangePlan,
        window: Window,
        transport: Transport,
        dedup: Deduplicator,
        arena: Arena,
    ) -> None:
        self.peers, self.members = peers, members
        self.here = peers.index(transport.rank)
        self._plan, self._parts, self._arena = plan, window.parts, arena
        self._part_kind = np.dtype(np.uint8 if window.parts <= 256 else np.uint16)
        self._tag = f"of {peers}"
        self._row_X: dict[int, np.ndarray] = {}  # which of the U distinct keys (later: which row) each is
        self._merged: dict[int, Merged] = {}
        self._by_key: dict[int, Gradients] = {}
        owned = [owner.tables[k] for k in members]
        self._sizes, blocks = self._exchange(owned, [owner.last_parts(k) for k in members], transport)
        counts = np.zeros((len(plan.tables), window.parts, len(peers)), np.int64)
        parts_X: dict[int, np.ndarray] = {}
        for i, k in enumerate(members):
            keys_X, parts_X[k] = self._received(i, k, blocks)
            self._unite(i, k, owned[i], keys_X, dedup)
            if plan.is_exact(k):
                count_by_part(parts_X[k], self._counts(k), np.arange(len(peers)), counts[k])
        self._layout = lay_out(counts, plan)
        for k in filter(plan.is_exact, members):
            self._merged[k] = self._lay_out(k, parts_X[k])
        self.sums = {
            dim: arena.take(f"sums {dim} {self._tag}", (self._layout.total(dim), dim), np.float32)
            for dim in plan.groups
        }

    def _counts(self, k: int) -> np.ndarray:
        """Keys of table k by peer."""
        return self._sizes[:, self.members.index(k), 0].copy()

    def _own(self, k: int) -> slice:
        """Where the keys of this group are among those of table k."""
        begin = int(starts(self._counts(k))[self.here])
        return slice(begin, begin + int(self._counts(k)[self.here]))

    def _exchange(
        self, owned: Sequence[OwnedKeys], parts: Sequence[np.ndarray], transport: Transport
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Everybody's sizes [M, members, 2] (keys; whether they take eight bytes) and everybody's block of words: of each table
        its keys, then the last part of each."""
        sizes = np.zeros((len(self.peers), len(owned), 2), np.int64)
        sizes[self.here] = [(len(table.keys_V), is_wide(table.keys_V)) for table in owned]
        transport.spread(list(sizes), self.peers)
        lengths = [sum(sum(self._words(*of_table)) for of_table in of_peer) for of_peer in sizes.tolist()]
        block = self._arena.take(f"keys {self._tag}", sum(lengths), np.int32)
        blocks = np.split(block, np.cumsum(lengths)[:-1])
        at = 0
        for table, of_table, (count, wide) in zip(owned, parts, sizes[self.here].tolist(), strict=True):
            num_keys, num_parts = self._words(count, wide)
            keys_words, part_words = np.split(blocks[self.here][at : at + num_keys + num_parts], [num_keys])
            keys_words[:] = table.keys_V.view(np.int32) if wide else table.keys_V
            if num_parts:
                part_words.view(self._part_kind)[:count] = of_table
            at += num_keys + num_parts
        transport.spread(blocks, self.peers)
        return sizes, blocks

    def _words(self, count: int, wide: int) -> tuple[int, int]:
        """Of keys, and of their last parts."""
        part_bytes = 0 if self._parts == 1 else self._part_kind.itemsize
        return count * (1 + wide), -(-count * part_bytes // 4)

    def _received(self, i: int, k: int, blocks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """All peers' keys of the i-th table, one after the other, and their last parts."""
        total, at = int(self._sizes[:, i, 0].sum()), 0
        keys_X = self._arena.take(f"keys of replicas {k}", total, np.int64)
        parts_X = self._arena.take(f"parts of replicas {k}", total, self._part_kind)
        parts_X[:] = 0
        for of_peer, block in zip(self._sizes.tolist(), blocks, strict=True):
            begin = sum(sum(self._words(*of_table)) for of_table in of_peer[:i])
            count, wide = of_peer[i]
            num_keys, num_parts = self._words(count, wide)
            keys, parts = np.split(block[begin : begin + num_keys + num_parts], [num_keys])
            into = keys_X[at : at + count]
            if wide:
                into.view(np.int32)[:] = keys
            else:
                into[:] = keys
            if num_parts:
                parts_X[at : at + count] = parts.view(self._part_kind)[:count]
            at += count
        return keys_X, parts_X

    def _unite(self, i: int, k: int, owned: OwnedKeys, keys_X: np.ndarray, dedup: Deduplicator) -> None:
        take, num_keys = self._arena.take, len(keys_X)
        unique, row_X = take(f"united {k}", num_keys, np.int64), take(f"row of replicas {k}", num_keys, np.int32)
        unique = unique[: dedup(keys_X, unique, row_X)]
        own = row_X[self._own(k)]
        rows = take(f"united rows {k}", len(owned.answer.row), np.int32)
        compose(owned.answer.row, own, rows)
        owned.numbers = [row_X, rows]
        if not self._plan.is_exact(k):  # else row_E stays as it is: gradients are added up by this group's keys first
            if owned.answer.row is owned.row_E:
                owned.row_E = rows
            else:
                compose(owned.row_E, own, owned.row_E)
                owned.numbers.append(owned.row_E)
        owned.answer.row, owned.keys_V, self._row_X[k] = rows, unique, row_X

    def _lay_out(self, k: int, parts_X: np.ndarray) -> Merged:
        counts, own = self._counts(k), self._own(k)
        place_X = self._arena.take(f"place of replicas {k}", len(parts_X), np.int32)
        places_by_part(parts_X, counts, np.arange(len(counts)), self._layout.start[k].copy(), place_X)
        mine = parts_X[own]
        if self._parts == 1:
            return Merged(place_X, own, [np.arange(len(mine))])
        order, ends = np.argsort(mine, kind="stable"), np.cumsum(np.bincount(mine, minlength=self._parts))
        return Merged(place_X, own, np.split(order, ends[:-1]))

    def send(self, part: int, owner: OwnerRoute, returned: dict[int, np.ndarray], transport: Transport) -> None:
        """The sums of gradients that are complete with a part, to the other peers; and theirs from them."""
        for dim, members in self._plan.groups.items():
            sums, counts = self.sums[dim], self._layout.counts[dim][part]
            for k in (k for k in members if k in self._merged):
                merged = self._merged[k]
                if part == 0:  # how they lie is known from the routes alone
                    self._by_key[k] = owner.gradients(k, int(self._counts(k)[self.here]), returned[dim])
                sum_rows(self._by_key[k], merged.by_part[part], merged.place_X[merged.own], sums)
            transport.spread(np.split(sums[self._layout.part(dim, part)], np.cumsum(counts)[:-1]), self.peers)

    def gradients(self, k: int, num_rows: int) -> Gradients:
        """The sums of all groups by row of table k, each row's in the order of peers."""
        row_X, take = self._row_X[k], self._arena.take
        start, cursor = take(f"sums start {k}", num_rows + 1, np.int32), take(f"sums cursor {k}", num_rows, np.int32)
        origins = take(f"sums origins {k}", len(row_X), np.int32)
        group_by_row(row_X, num_rows, self._merged[k].place_X, ONES, start, cursor, origins, ONES)
        return Gradients(self.sums[self._plan.tables[k].dim], start, origins, ONES)

    def sharers(self, k: int, num_rows: int) -> np.ndarray:
        """How many groups use each row of table k in this batch."""
        counts = np.zeros(num_rows, np.int64)
        for rows in np.split(self._row_X[k], np.cumsum(self._counts(k))[:-1]):
            used = np.zeros(num_rows, bool)
            used[rows[rows >= 0]] = True  # -1: rows that this group does not use
            counts += used
        return counts

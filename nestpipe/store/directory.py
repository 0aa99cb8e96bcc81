"""Directory: which key has a row, and at which position. Admission, eviction and counters; no values of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nestpipe.kernels import records
from nestpipe.kernels.compact import CompactIndex
from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.keys import NUM_SHARDS, hashed_name, mix, row_seeds, shards
from nestpipe.kernels.rows import NONE, gather
from nestpipe.store.chunks import Chunks
from nestpipe.tables import Table

KEPT = 15 / 16  # of the row budget after an eviction: so that selecting victims is paid once per many births
BLOCK = 1 << 16  # rows looked at together: no list of all rows is ever made, a table may be larger than memory


class Births(NamedTuple):
    """Positions that a resolve gave to new rows, whose first values follow from (seed, key)."""

    seed: np.uint64
    keys: np.ndarray  # of shards, where rare keys share rows
    positions: np.ndarray


class Directory:
    """Positions by key: found, given to new keys, taken back. Steps passed to `resolve` must not decrease.

    A position taken back in one call of `resolve` is given out by the next one at the earliest: while batch t+1 is
    resolved, batch t may still be going to update a row that batch t+1 has just pushed out. It is so under every
    schedule, that all of them give the same positions.

    Everything here is called by one thread. Counters lie in memory of their own, by position, so that a table whose rows
    are elsewhere has them at hand.

    num_owners: how many workers hold the table; this is the part of one.
    compact: half the memory for somewhat slower lookups, and `key_at`.
    """

    def __init__(self, table: Table, *, seed: int, num_owners: int = 1, compact: bool = False) -> None:
        self.table = table
        self.step = 0
        self.born = self.evicted = 0
        self.used = 0  # positions given out so far, those taken back included
        self.index: HashIndex | CompactIndex = CompactIndex() if compact else HashIndex()
        self._keys = Chunks(2, half=False) if compact else None  # by position
        self.shared = HashIndex()  # shard -> position of the row that its rare keys share
        self.sightings = HashIndex()  # rare key -> steps that used it so far
        self._free = self._held = NONE
        name = hashed_name(table.name)
        self.tags = np.uint64(name), np.uint64(mix(np.uint64(name)))  # of own and of shared rows in the digest
        self.seed, self.shared_seed = row_seeds(table.name, seed)
        eviction = table.eviction
        self._counters = None if eviction is None else Chunks(2, half=False)
        self._ttl = None if eviction is None else eviction.ttl
        self._budget: int | None = None
        self.share(num_owners)
        self._next_sweep = 0

    def share(self, num_owners: int) -> None:
        """So many workers hold the table: what each may hold of what is declared for all."""
        eviction = self.table.eviction
        if eviction is not None and eviction.max_rows is not None:
            self._budget = -(-eviction.max_rows // num_owners)
        self._most_rare = -(-self.table.max_rare_keys // num_owners)

    def __len__(self) -> int:
        """Rows that keys have of their own, those past their ttl included until somebody looks."""
        return len(self.index)

    @property
    def shares_rows(self) -> bool:
        """Whether several keys of a batch may resolve to one position."""
        return self.table.admit_after > 1

    @property
    def in_use(self) -> int:
        """Positions that belong to a row, own or shared."""
        return self.used - len(self._free) - len(self._held)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.shared.nbytes + self.sightings.nbytes + self.in_use * self._position_bytes

    def nbytes_with(self, more: int) -> int:
        """The most that it can take while it resolves a batch with so many keys that have no row."""
        fresh = (self.used + more) * self._position_bytes
        if not self.shares_rows:
            return fresh + self.index.nbytes_with(more) + self.shared.nbytes + self.sightings.nbytes
        few = min(more, NUM_SHARDS - len(self.shared))
        sightings, shared = self.sightings.nbytes_with(more), self.shared.nbytes_with(few)
        return fresh + self.index.nbytes_with(more) + shared + sightings

    @property
    def _position_bytes(self) -> int:
        return (0 if self._counters is None else 8) + (0 if self._keys is None else 8)

    def key_at(self, positions: np.ndarray) -> np.ndarray:
        """The key, or the shard whose rare keys share it, that each position belongs to or belonged to last."""
        assert isinstance(self.index, CompactIndex)
        return self.index.key_at(positions)

    def num_missing(self, keys: np.ndarray) -> int:
        """How many of these keys have no row of their own."""
        positions = np.empty(len(keys), np.int64)
        self.index.find(keys, positions)
        return int((positions < 0).sum())

    # -- finding rows ------------------------------------------------------------------------------------------------

    def resolve(self, keys: np.ndarray, step: int) -> tuple[np.ndarray, list[Births]]:
        """The position of each of these distinct keys, and which of them are new."""
        self.step = step
        self._free, self._held = np.concatenate([self._free, self._held]), NONE
        positions = np.empty(len(keys), np.int64)
        self.index.find(keys, positions)
        if self._counters is not None:
            self._expire(keys, positions, step)
            # Found rows are marked as used first, so that making room for others cannot take them.
            records.count_use(self._counters.raw, positions[positions >= 0], step, first=False)
        missing = np.flatnonzero(positions < 0)
        if not len(missing):
            return positions, []
        rare = missing[:0]
        if self.shares_rows:
            rare, missing = self._admit(keys, missing)
        if self._budget is not None:
            self._make_room(len(missing), step)  # before any birth: a step over budget is refused and leaves none
        births = [self._share(keys, positions, rare)] if len(rare) else []
        positions[missing] = self._allocate(len(missing))
        self.index.insert(keys, positions, missing)
        self._count_first_use(positions[missing])
        self.born += len(missing)
        births.append(Births(self.seed, keys[missing], positions[missing]))
        return positions, births

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Like resolve, but changes nothing: -1 where there is no row. For evaluation."""
        positions = np.empty(len(keys), np.int64)
        self.index.find(keys, positions)
        if self._ttl is not None:
            positions[self._late(positions, self.step)] = -1
        if self.shares_rows:
            missing = np.flatnonzero(positions < 0)
            shared = np.empty(len(missing), np.int64)
            self.shared.find(shards(keys[missing]), shared)
            positions[missing] = shared
        return positions

    def find_any(self, keys: np.ndarray) -> np.ndarray:
        """Positions, -1 among them, of all rows that these keys have now or may have shared before: a rare key that has got a
        row of its own meanwhile leaves a shared one behind."""
        own = np.empty(len(keys), np.int64)
        self.index.find(keys, own)
        if self._ttl is not None:
            own[self._late(own, self.step)] = -1
        if not self.shares_rows:
            return own
        shared = np.empty(len(keys), np.int64)
        self.shared.find(shards(keys), shared)
        return np.concatenate([own, shared])

    # -- everything at once: digest, checkpoint ----------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys that have a row of their own, and its position, in blocks."""
        self.sweep()
        return self.index.blocks(BLOCK)

    def counters(self, positions: np.ndarray) -> np.ndarray:
        """Step of the last use and number of uses as two words [n, 2]; [n, 0] if the table does not evict."""
        if self._counters is None:
            return np.empty((len(positions), 0), np.float32)
        words = np.empty((len(positions), 2), np.float32)
        gather(self._counters.raw, positions, NONE, words)
        return words

    def restore(self, keys: np.ndarray, counters: np.ndarray, *, shared: bool = False) -> np.ndarray:
        """Gives positions to keys (or shards) that have none yet."""
        positions = self._allocate(len(keys))
        if shared:
            self._insert_shared(keys, positions, np.arange(len(keys)))
        else:
            self.index.insert(keys, positions, np.arange(len(keys)))
        if self._counters is not None:
            records.put(np.ascontiguousarray(counters), positions, self._counters.raw)
        return positions

    def admit(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of these distinct keys, rare ones too: each has a row of its own from here on, and counts as used by
        the last step. And which have just got it."""
        self.sweep()
        positions = np.empty(len(keys), np.int64)
        self.index.find(keys, positions)
        new = positions < 0
        missing = np.flatnonzero(new)
        self.sightings.delete(keys[missing])
        positions[missing] = self._allocate(len(missing))
        self.index.insert(keys, positions, missing)
        self._count_first_use(positions[missing])
        if self._counters is not None:
            records.count_use(self._counters.raw, positions[~new], self.step, first=False)
        self.born += len(missing)
        return positions, new

    def check_budget(self, more: int) -> None:
        """Raises ValueError if the table may not have so many more rows."""
        if self._budget is not None and len(self) + more > self._budget:
            assert self.table.eviction is not None
            raise ValueError(
                f"table {self.table.name!r}: {more:,} new rows beside {len(self):,} on this worker are over its part "
                f"({self._budget:,}) of the budget max_rows={self.table.eviction.max_rows:,}; raise max_rows or give fewer rows"
            )

    def sweep(self) -> None:
        """Drops rows past their ttl."""
        if self._ttl is None:
            return
        late = [NONE]
        for keys, positions in self.index.blocks(BLOCK):
            last_used, _ = self._read_counters(positions)
            late.append(keys[last_used < self.step - self._ttl])
        self._drop(np.concatenate(late))

    # -- births ------------------------------------------------------------------------------------------------------

    def _allocate(self, n: int) -> np.ndarray:
        reused, self._free = self._free[:n], self._free[n:]
        fresh = np.arange(self.used, self.used + n - len(reused))
        self.used += len(fresh)
        if self._counters is not None:
            self._counters.reserve(self.used)
        if isinstance(self.index, CompactIndex):
            assert self._keys is not None
            self._keys.reserve(self.used)
            self.index.key_rows = self._keys.raw
        return np.concatenate([reused, fresh])

    def _insert_shared(self, ids: np.ndarray, positions: np.ndarray, new: np.ndarray) -> None:
        self.shared.insert(ids, positions, new)
        if isinstance(self.index, CompactIndex):
            self.index.note(positions[new], ids[new])

    def _count_first_use(self, positions: np.ndarray) -> None:
        if self._counters is not None:
            records.count_use(self._counters.raw, positions, self.step, first=True)

    def _admit(self, keys: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts a sighting of each missing key: those still rare, and those that now get a row of their own. Refuses to count
        more keys than the table may."""
        candidates = keys[missing]
        seen = np.empty(len(missing), np.int64)
        self.sightings.find(candidates, seen)
        new = seen < 0
        seen = np.where(new, 1, seen + 1)
        admitted = seen >= self.table.admit_after
        again, rare, leaving = ~new & ~admitted, np.flatnonzero(new & ~admitted), candidates[~new & admitted]
        counted = len(self.sightings) + len(rare) - len(leaving)
        if len(rare) and counted > self._most_rare:
            raise ValueError(
                f"table {self.table.name!r}: step {self.step} would count {counted} rare keys on this worker, over its part "
                f"({self._most_rare}) of max_rare_keys={self.table.max_rare_keys}; raise max_rare_keys (a counted key takes up "
                f"to 64 bytes) and go on from a checkpoint, or start anew with a lower admit_after={self.table.admit_after}"
            )
        self.sightings.assign(candidates[again], seen[again])
        self.sightings.delete(leaving)
        self.sightings.insert(candidates, seen, rare)
        return missing[~admitted], missing[admitted]

    def _share(self, keys: np.ndarray, positions: np.ndarray, rare: np.ndarray) -> Births:
        """Points rare keys to the rows of their shards."""
        ids, back = np.unique(shards(keys[rare]), return_inverse=True)
        where = np.empty(len(ids), np.int64)
        self.shared.find(ids, where)
        new = np.flatnonzero(where < 0)
        where[new] = self._allocate(len(new))
        self._insert_shared(ids, where, new)
        self._count_first_use(where[new])
        positions[rare] = where[back]
        return Births(self.shared_seed, ids[new], where[new])

    # -- eviction ----------------------------------------------------------------------------------------------------

    def _read_counters(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._counters is not None
        last_used, uses = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        records.read_counters(self._counters.raw, positions, last_used, uses)
        return last_used, uses

    def _drop(self, keys: np.ndarray) -> None:
        self._held = np.concatenate([self._held, self.index.delete(keys)])
        self.evicted += len(keys)

    def _expire(self, keys: np.ndarray, positions: np.ndarray, step: int) -> None:
        """Rows of this batch that outlived their ttl are dropped, to be born anew; the rest of the table is swept now
        and then, which nobody can tell from sweeping it every step."""
        if self._ttl is None:
            return
        if step >= self._next_sweep:
            self.sweep()
            self._next_sweep = step + max(1, self._ttl // 8)
            self.index.find(keys, positions)
            return
        late = self._late(positions, step)
        self._drop(keys[late])
        positions[late] = -1

    def _late(self, positions: np.ndarray, step: int) -> np.ndarray:
        """Which of these positions, -1 where there is none, have a row that is past its ttl."""
        assert self._ttl is not None
        there = np.flatnonzero(positions >= 0)
        last_used, _ = self._read_counters(positions[there])
        return there[last_used < step - self._ttl]

    def _make_room(self, num_born: int, step: int) -> None:
        assert self._budget is not None and self.table.eviction is not None
        if len(self) + num_born <= self._budget:
            return
        self.sweep()  # rows past their ttl do not count: else the moment of the last sweep would show
        if len(self) + num_born <= self._budget:
            return
        lowest = _Lowest(len(self) + num_born - int(self._budget * KEPT))
        idle = 0
        for keys, positions in self.index.blocks(BLOCK):
            last_used, uses = self._read_counters(positions)
            score = last_used if self.table.eviction.policy == "lru" else (uses << 32) + last_used
            free = last_used < step
            idle += int(free.sum())
            lowest.add(score[free], keys[free])
        needed = len(self) + num_born - idle
        if needed > self._budget:
            raise ValueError(
                f"table {self.table.name!r}: step {step} alone uses {needed} rows on this worker, over its part "
                f"({self._budget}) of the budget max_rows={self.table.eviction.max_rows}; raise max_rows or use smaller batches"
            )
        self._drop(lowest.keys())


class _Lowest:
    """The n keys of lowest (score, key) among many that come in blocks, in linear time and memory for a few n."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._score, self._keys = [NONE], [NONE]
        self._size = 0

    def add(self, score: np.ndarray, keys: np.ndarray) -> None:
        self._score.append(score)
        self._keys.append(keys)
        self._size += len(keys)
        if self._size > 2 * self._n + BLOCK:
            self._cut()

    def keys(self) -> np.ndarray:
        self._cut()
        return self._keys[0]

    def _cut(self) -> None:
        score, keys = np.concatenate(self._score), np.concatenate(self._keys)
        if self._n < len(keys):
            bound = np.partition(score, self._n)[self._n]
            below, tied = score < bound, np.flatnonzero(score == bound)
            rest = self._n - int(below.sum())
            if rest < len(tied):
                tied = tied[np.argpartition(keys[tied], rest)[:rest]]
            chosen = np.concatenate([np.flatnonzero(below), tied])
            score, keys = score[chosen], keys[chosen]
        self._score, self._keys, self._size = [score], [keys], len(keys)


assert NUM_SHARDS == 1 << 16  # the documentation of Table.admit_after says so

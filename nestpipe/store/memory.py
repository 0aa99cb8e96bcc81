"""MemoryStore: one worker's part of one table, in memory."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from nestpipe.kernels import records, update
from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.keys import NUM_SHARDS, mix, shards
from nestpipe.kernels.rows import NONE, Rows, birth, first_rows, gather
from nestpipe.kernels.update import Gradients
from nestpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from nestpipe.store.chunks import Chunks
from nestpipe.tables import Normal, Table

KEPT = 15 / 16  # of the row budget after an eviction: so that selecting victims is paid once per many births


class StoreStats(NamedTuple):
    rows: int
    shared_rows: int
    bytes: int  # records, index and sighting counts together
    born: int
    evicted: int

    @property
    def bytes_per_row(self) -> float:
        return self.bytes / max(1, self.rows + self.shared_rows)


class MemoryStore:
    """Rows by key: found, born, updated, given up. A row and its optimizer state lie together in one record.

    Not for two threads at once. Steps passed to `resolve` must not decrease.
    """

    def __init__(self, table: Table, *, seed: int, world: int = 1) -> None:
        self.table = table
        self.seed = seed
        self.updates = 0
        self.lr = table.optimizer.lr
        half = table.dtype.itemsize == 2
        value_words = (table.dim + 1) // 2 if half else table.dim
        self._state_floats = table.optimizer.state_floats(table.dim)
        self.record_words = value_words + self._state_floats
        self._counters = self.record_words if table.eviction else None
        self._chunks = Chunks(self.record_words + (2 if table.eviction else 0), half=half)
        self._index = HashIndex()
        self._shared = HashIndex()  # shard -> position of the row that its rare keys share
        self._sightings = HashIndex()  # rare key -> steps that used it so far
        self._free = np.empty(0, np.int64)
        self._used = 0  # positions handed out so far
        self._step = 0
        self._born = self._evicted = 0
        name = int.from_bytes(hashlib.blake2b(table.name.encode(), digest_size=8).digest(), "little")
        self._tags = np.uint64(name), np.uint64(mix(np.uint64(name)))  # of own and of shared rows in the digest
        self._seed = np.uint64(mix(np.uint64(name ^ (seed % 2**64))))
        self._shared_seed = np.uint64(mix(self._seed))
        self._scratch = np.empty(table.dim, np.float32)
        self._update_scratch = update.scratch_for(table.dim)
        eviction = table.eviction
        self._budget = None if eviction is None or eviction.max_rows is None else -(-eviction.max_rows // world)
        self._next_sweep = 0

    def __len__(self) -> int:
        """Rows that keys have of their own, those past their ttl included until somebody looks; see `stats`."""
        return len(self._index)

    @property
    def rows(self) -> Rows:
        """Where rows lie, for gather and pool."""
        return self._chunks.rows

    @property
    def shares_rows(self) -> bool:
        """Whether several keys of a batch may resolve to one position."""
        return self.table.admit_after > 1

    # -- finding rows ------------------------------------------------------------------------------------------------

    def resolve(self, keys: np.ndarray, step: int) -> np.ndarray:
        """The position of each of these distinct keys; rows are born, counted and given up as the table says."""
        self._step = step
        positions = np.empty(len(keys), np.int64)
        self._index.find(keys, positions)
        if self._counters is not None:
            self._expire(keys, positions, step)
            # Found rows are marked as used first, so that making room for others cannot take them.
            records.touch(self.rows, positions[positions >= 0], self._counters, step)
        missing = np.flatnonzero(positions < 0)
        if len(missing):
            if self.shares_rows:
                missing = self._admit(keys, positions, missing)
            if self._budget is not None:
                self._make_room(len(missing), step)
            self._bear(self._index, self._seed, keys, positions, missing)
            self._born += len(missing)
        return positions

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Like resolve, but changes nothing: -1 where there is no row. For evaluation."""
        positions = np.empty(len(keys), np.int64)
        self._index.find(keys, positions)
        ttl = self.table.eviction.ttl if self.table.eviction else None
        if ttl is not None:
            found = np.flatnonzero(positions >= 0)
            last_used, _ = self._read_counters(positions[found])
            positions[found[last_used < self._step - ttl]] = -1
        if self.shares_rows:
            missing = np.flatnonzero(positions < 0)
            where = np.empty(len(missing), np.int64)
            self._shared.find(shards(keys[missing]), where)
            positions[missing] = where
        return positions

    def read(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """out[i] = values at positions[i], or what keys[i] would be born with where the position is negative."""
        gather(self.rows, positions, NONE, out)
        if len(positions) and positions.min() < 0:
            normal, a, b = self._init()
            if self.shares_rows:
                first_rows(self._shared_seed, shards(keys), positions, normal, a, b, self.rows.half, out)
            else:
                first_rows(self._seed, keys, positions, normal, a, b, self.rows.half, out)

    def update(self, positions: np.ndarray, grads: Gradients, scale: float) -> None:
        """Applies the row optimizer once to distinct positions, whose gradients are summed and multiplied by scale."""
        self.updates += 1
        optimizer, f32 = self.table.optimizer, np.float32
        common = (self.rows, positions, grads, self._update_scratch, f32(scale), f32(self.lr),
                  f32(optimizer.weight_decay), f32(optimizer.clip))  # fmt: skip
        match optimizer:
            case SGD():
                update.sgd(*common)
            case Adagrad():
                update.adagrad(*common, f32(optimizer.eps))
            case RowwiseAdagrad():
                update.rowwise_adagrad(*common, f32(optimizer.eps))
            case Adam():
                betas = float(optimizer.beta1), float(optimizer.beta2)
                update.adam(*common, *betas, f32(optimizer.eps), self.updates)
            case _:
                raise AssertionError(optimizer)

    # -- everything at once: digest, checkpoint ----------------------------------------------------------------------

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys that have a row, and its position, sorted by key."""
        self._sweep(self._step)
        return _sorted(self._index)

    def shared_items(self) -> tuple[np.ndarray, np.ndarray]:
        """Shards that have a row shared by rare keys, and its position, sorted by shard."""
        return _sorted(self._shared)

    def sightings(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys without a row of their own yet, and the number of steps that used each."""
        return _sorted(self._sightings)

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Values, optimizer state and counters at the given positions, as float32 words [n, words]."""
        words = self._chunks.rows.stride // 4
        out = np.empty((len(positions), words), np.float32)
        gather(self._chunks.raw, positions, NONE, out)
        return out

    def restore(
        self,
        items: tuple[np.ndarray, np.ndarray],
        shared: tuple[np.ndarray, np.ndarray],
        sightings: tuple[np.ndarray, np.ndarray],
        *,
        updates: int,
        step: int,
    ) -> None:
        """Puts (keys, records), (shards, records) and (keys, counts) into an empty store."""
        assert len(self) == 0 and len(self._shared) == 0
        for index, (keys, rows) in ((self._index, items), (self._shared, shared)):
            positions = self._allocate(len(keys))
            index.insert(keys, positions, np.arange(len(keys)))
            records.put(rows, positions, self._chunks.raw)
        keys, counts = sightings
        self._sightings.insert(keys, counts, np.arange(len(keys)))
        self.updates, self._step = updates, step

    def digest(self) -> tuple[int, int]:
        """Two 64-bit sums over (key, row, optimizer state); sums of several workers add up (mod 2^64)."""
        out = np.zeros(2, np.uint64)
        for tag, (keys, positions) in zip(self._tags, (self.items(), self.shared_items()), strict=True):
            for start in range(0, len(keys), 1 << 16):
                part = slice(start, start + (1 << 16))
                block = np.ascontiguousarray(self.records(positions[part])[:, : self.record_words])
                records.digest(keys[part], block, tag, out)
        return int(out[0]), int(out[1])

    def stats(self) -> StoreStats:
        self._sweep(self._step)
        used = (self._used - len(self._free)) * self._chunks.rows.stride
        indexes = self._index.nbytes + self._shared.nbytes + self._sightings.nbytes
        return StoreStats(len(self._index), len(self._shared), used + indexes, self._born, self._evicted)

    # -- births ------------------------------------------------------------------------------------------------------

    def _init(self) -> tuple[bool, float, float]:
        init = self.table.init
        return (True, 0.0, init.std) if isinstance(init, Normal) else (False, init.low, init.high)

    def _allocate(self, n: int) -> np.ndarray:
        reused, self._free = self._free[:n], self._free[n:]
        fresh = np.arange(self._used, self._used + n - len(reused))
        self._used += len(fresh)
        self._chunks.reserve(self._used)
        return np.concatenate([reused, fresh])

    def _bear(
        self, index: HashIndex, seed: np.uint64, keys: np.ndarray, positions: np.ndarray, born: np.ndarray
    ) -> None:
        positions[born] = self._allocate(len(born))
        index.insert(keys, positions, born)
        normal, a, b = self._init()
        initial = np.float32(getattr(self.table.optimizer, "initial", 0.0))
        birth(self.rows, seed, keys, positions, born, normal, a, b, initial, self._state_floats, self._scratch)
        if self._counters is not None:
            records.set_counters(self.rows, positions, born, self._counters, self._step, 1)

    def _admit(self, keys: np.ndarray, positions: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Counts a sighting of each missing key; points those still rare to a shared row; returns the others."""
        candidates = keys[missing]
        seen = np.empty(len(missing), np.int64)
        self._sightings.find(candidates, seen)
        new = seen < 0
        seen = np.where(new, 1, seen + 1)
        admitted = seen >= self.table.admit_after
        again = ~new & ~admitted
        self._sightings.assign(candidates[again], seen[again])
        self._sightings.insert(candidates, seen, np.flatnonzero(new & ~admitted))
        self._sightings.delete(candidates[~new & admitted], np.empty(int((~new & admitted).sum()), np.int64))

        rare = missing[~admitted]
        ids, back = np.unique(shards(keys[rare]), return_inverse=True)
        where = np.empty(len(ids), np.int64)
        self._shared.find(ids, where)
        self._bear(self._shared, self._shared_seed, ids, where, np.flatnonzero(where < 0))
        positions[rare] = where[back]
        return missing[admitted]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def _read_counters(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        last_used, uses = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        records.read_counters(self.rows, positions, self._counters, last_used, uses)
        return last_used, uses

    def _drop(self, keys: np.ndarray) -> None:
        positions = np.empty(len(keys), np.int64)
        self._index.delete(keys, positions)
        self._free = np.concatenate([self._free, positions])
        self._evicted += len(keys)

    def _expire(self, keys: np.ndarray, positions: np.ndarray, step: int) -> None:
        """Rows of this batch that outlived their ttl are dropped, to be born anew; the rest of the table is swept now
        and then, which nobody can tell from sweeping it every step."""
        assert self.table.eviction is not None
        ttl = self.table.eviction.ttl
        if ttl is None:
            return
        if step >= self._next_sweep:
            self._sweep(step)
            self._next_sweep = step + max(1, ttl // 8)
            self._index.find(keys, positions)
            return
        found = np.flatnonzero(positions >= 0)
        last_used, _ = self._read_counters(positions[found])
        late = found[last_used < step - ttl]
        self._drop(keys[late])
        positions[late] = -1

    def _sweep(self, step: int) -> None:
        if self.table.eviction is None or self.table.eviction.ttl is None:
            return
        keys, positions = self._index.items()
        last_used, _ = self._read_counters(positions)
        self._drop(keys[last_used < step - self.table.eviction.ttl])

    def _make_room(self, num_born: int, step: int) -> None:
        assert self._budget is not None and self.table.eviction is not None
        if len(self) + num_born <= self._budget:
            return
        self._sweep(step)  # rows past their ttl do not count: else the moment of the last sweep would show
        if len(self) + num_born <= self._budget:
            return
        keys, positions = self._index.items()
        last_used, uses = self._read_counters(positions)
        idle = last_used < step
        excess = len(self) + num_born - int(self._budget * KEPT)
        if len(self) + num_born - int(idle.sum()) > self._budget:
            needed = len(self) + num_born - int(idle.sum())
            raise ValueError(
                f"table {self.table.name!r}: step {step} alone uses {needed} rows on this worker, over its part "
                f"({self._budget}) of the budget max_rows={self.table.eviction.max_rows}; raise max_rows or use smaller batches"
            )
        keys = keys[idle]
        score = last_used[idle] if self.table.eviction.policy == "lru" else (uses[idle] << 32) + last_used[idle]
        self._drop(_lowest(score, keys, min(excess, len(keys))))


def _sorted(index: HashIndex) -> tuple[np.ndarray, np.ndarray]:
    keys, positions = index.items()
    order = np.argsort(keys)
    return keys[order], positions[order]


def _lowest(score: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
    """The n keys of lowest (score, key), in linear time."""
    if n == len(keys):
        return keys
    bound = np.partition(score, n)[n]
    below = keys[score < bound]
    tied = keys[score == bound]
    rest = n - len(below)
    return np.concatenate([below, np.partition(tied, rest)[:rest] if rest < len(tied) else tied])


assert NUM_SHARDS == 1 << 16  # the documentation of Table.admit_after says so

"""TableStore: what the stores of all tiers share: key work, the row optimizer, and everything at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from nestpipe.kernels import records, update
from nestpipe.kernels.average import average, average_row_scaled
from nestpipe.kernels.compact import CompactIndex
from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.keys import shards
from nestpipe.kernels.rows import Rows, birth, first_rows
from nestpipe.kernels.update import Gradients
from nestpipe.optim import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.store.directory import BLOCK, Births, Directory
from nestpipe.tables import Table

ALONE = np.zeros(1, np.int64)  # owners of a table that only worker 0 holds

Pairs = tuple[np.ndarray, np.ndarray]


class Occasion(NamedTuple):
    """What an update may depend on, besides the optimizer's settings.

    updates: of the table, this one included; the same in all replicas.
    replicas: how many groups of workers hold the table; see docs/two_d.md.
    sharers: int64, for each row how many of them update it in this batch, this one included; empty if nobody has counted.
    """

    updates: int
    replicas: int
    sharers: np.ndarray


# The kernel of each row optimizer, and the arguments that only it has.
Rule = tuple[Callable[..., None], Callable[[Any, Occasion], tuple[Any, ...]]]
UPDATES: dict[type[RowOptimizer], Rule] = {
    SGD: (update.sgd, lambda optimizer, now: ()),
    Adagrad: (update.adagrad, lambda optimizer, now: (np.float32(optimizer.eps),)),
    RowwiseAdagrad: (update.rowwise_adagrad, lambda optimizer, now: (np.float32(optimizer.eps),)),
    ScaledRowwiseAdagrad: (
        update.scaled_rowwise_adagrad,
        lambda optimizer, now: (np.float32(optimizer.eps), np.float32(optimizer.divisor(now.replicas))),
    ),
    Adam: (
        update.adam,
        lambda optimizer, now: (
            float(optimizer.beta1),
            float(optimizer.beta2),
            np.float32(optimizer.eps),
            now.updates,
        ),
    ),
}
BY_ROW: Rule = (  # of ScaledRowwiseAdagrad(scale="row")
    update.row_scaled_adagrad,
    lambda optimizer, now: (np.float32(optimizer.eps + optimizer.initial), now.replicas, now.sharers, now.updates),
)


def _rule_of(table: Table) -> Rule:
    optimizer = table.optimizer
    for kind in type(optimizer).__mro__:
        if kind in UPDATES:
            is_by_row = isinstance(optimizer, ScaledRowwiseAdagrad) and optimizer.is_by_row
            return BY_ROW if is_by_row and kind is ScaledRowwiseAdagrad else UPDATES[kind]
    raise ValueError(
        f"table {table.name!r}: optimizer {type(table.optimizer).__name__} has no kernel; register one in "
        f"nestpipe.store.table_store.UPDATES, see docs/extending.md"
    )


class StoreStats(NamedTuple):
    """Counts of one worker's part of a table; those of several workers add up."""

    rows: int
    shared_rows: int
    bytes: int  # in memory: records, index and sighting counts together
    born: int
    evicted: int
    hot_rows: int = 0  # on disk: rows that are in memory too, or only there so far
    file_bytes: int = 0
    hits: int = 0  # rows that a batch found in memory
    reads: int = 0  # rows that a batch read from the file
    writes: int = 0  # rows written to the file

    def of_copy(self) -> StoreStats:
        """Of a replica that another stands for: what it takes and does, not what it holds."""
        return self._replace(rows=0, shared_rows=0, born=0, evicted=0)

    @property
    def bytes_per_row(self) -> float:
        return self.bytes / max(1, self.rows + self.shared_rows)


class TableStore:
    """One worker's part of one table. A row and its optimizer state lie together in one record of `record_words`.

    resolve, fill, write_back and everything else that finds or moves rows belong to one thread, the store lane. `update`
    and reads of rows may run in another one at the same time, for rows of another batch.
    """

    def __init__(self, table: Table, directory: Directory, *, seed: int, owners: np.ndarray) -> None:
        self.table = table
        self.owners = owners  # the workers that hold the table
        self.seed = seed
        self.directory = directory
        self.births: list[Births] = []  # of the last resolve
        self.updates = 0
        self.replicas = 1  # groups of workers that hold the table
        self.lr = table.optimizer.lr
        self.half = table.dtype.itemsize == 2
        self._value_words = (table.dim + 1) // 2 if self.half else table.dim
        self._state_floats = table.optimizer.state_floats(table.dim)
        self.record_words = self._value_words + self._state_floats
        self._birth_scratch = np.empty(table.dim, np.float32)
        self._update_scratch = update.scratch_for(table.dim)
        self._rule = _rule_of(table)
        self.share = (
            0,
            1,
        )  # (i, n): this worker saves the i-th of n parts of its keys, others that hold the same the rest
        self._used_at: np.ndarray | None = None  # by position: the last step that used it; None: nobody asks

    def __len__(self) -> int:
        """Rows that keys have of their own, those past their ttl included until somebody looks; see `stats`."""
        return len(self.directory)

    def hand_to(self, owners: np.ndarray) -> None:
        """These workers hold the table; said before it has any row, and not of one on disk."""
        assert self.directory.used == 0 and self.table.tier != "disk"
        self.owners = owners
        self.directory.share(len(owners))

    @property
    def shares_rows(self) -> bool:
        """Whether several keys of a batch may resolve to one position."""
        return self.directory.shares_rows

    @property
    def counts(self) -> bool:
        """Whether a look-up leaves more behind than rows of new keys: uses that are counted, or rows that are elsewhere."""
        return self.table.tier == "disk" or self.shares_rows or self.table.eviction is not None

    @property
    def is_empty(self) -> bool:
        """Whether no key has been trained on yet."""
        return self.directory.used == 0 and len(self.directory.sightings) == 0

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Like resolve, but changes nothing: -1 where there is no row. For evaluation."""
        return self.directory.find(keys)

    def _update(
        self,
        rows: Rows,
        positions: np.ndarray,
        grads: Gradients,
        scale: float,
        sharers: np.ndarray,
        lr: float | None,
    ) -> None:
        assert len(sharers) in (0, len(positions))
        self.updates += 1
        optimizer, f32 = self.table.optimizer, np.float32
        common = (rows, positions, grads, self._update_scratch, f32(scale), f32(self.lr if lr is None else lr),
                  f32(optimizer.weight_decay), f32(optimizer.clip))  # fmt: skip
        apply, own_arguments = self._rule
        apply(*common, *own_arguments(optimizer, Occasion(self.updates, self.replicas, sharers)))

    def average(self, records_MNW: np.ndarray, out_NW: np.ndarray) -> None:
        """out_NW = what the replicas' `words` of N rows become when they are averaged: values and optimizer state."""
        assert records_MNW.shape[1:] == out_NW.shape and out_NW.shape[1] == self.record_words
        average_records = average_row_scaled if self._rule is BY_ROW else average
        average_records(records_MNW, self.table.dim, self.half, out_NW)

    # -- first values ------------------------------------------------------------------------------------------------

    def _bear(self, rows: Rows, births: Births) -> None:
        """Writes first values and first state at births.positions of rows."""
        normal, a, b = self.table.first_values
        initial = np.float32(self.table.optimizer.first_state)
        birth(rows, births.seed, births.keys, births.positions, normal, a, b, initial,
              self._state_floats, self._birth_scratch)  # fmt: skip

    def _read_unborn(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """out[i] = what keys[i] would read before it has a row, where the position is negative."""
        if len(positions) and positions.min() < 0:
            normal, a, b = self.table.first_values
            if self.shares_rows:
                first_rows(self.directory.shared_seed, shards(keys), positions, normal, a, b, self.half, out)
            else:
                first_rows(self.directory.seed, keys, positions, normal, a, b, self.half, out)

    # -- everything at once: digest, checkpoint ----------------------------------------------------------------------

    def items(self) -> Pairs:
        """Keys that have a row of their own, and its position, sorted by key."""
        self.directory.sweep()
        return _sorted(self.directory.index)

    def shared_items(self) -> Pairs:
        """Shards that have a row shared by rare keys, and its position, sorted by shard."""
        return _sorted(self.directory.shared)

    def sightings(self) -> Pairs:
        """Keys without a row of their own yet, and the number of steps that used each."""
        return _sorted(self.directory.sightings)

    def words(self, positions: np.ndarray) -> np.ndarray:
        """Values and optimizer state at the given positions, as float32 words [n, record_words]."""
        raise NotImplementedError

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Values, optimizer state and counters (if the table evicts) at the given positions, as words [n, words]."""
        return np.concatenate([self.words(positions), self.directory.counters(positions)], 1)

    @property
    def saved_words(self) -> int:
        """Words of a record with its counters."""
        return self.record_words + (0 if self.table.eviction is None else 2)

    def blocks(self, *, shared: bool = False) -> Iterator[Pairs]:
        """All keys (or shards) with their `records`, in blocks: a table may be larger than memory."""
        yield from self._with_records([self.shared_items()] if shared else self.directory.blocks())

    def saved_blocks(self, *, shared: bool = False) -> Iterator[Pairs]:
        """Like `blocks`, of those that this worker saves."""
        yield from self._with_records(self._saved([self.shared_items()] if shared else self.directory.blocks(), shared))

    def saved_keys(self) -> Iterator[np.ndarray]:
        return (keys for keys, _ in self._saved(self.directory.blocks()))

    def saved_sightings(self) -> Iterator[Pairs]:
        return self._saved(self.directory.sightings.blocks())

    def num_saved(self) -> tuple[int, int, int]:
        """Keys, shards whose rare keys share a row, and rare keys that this worker saves."""
        of = self.directory
        if self.share[1] == 1:
            return len(of), len(of.shared), len(of.sightings)
        every = (of.blocks(), False), ([self.shared_items()], True), (of.sightings.blocks(), False)
        own, shared, seen = (sum(len(keys) for keys, _ in self._saved(some, ids)) for some, ids in every)
        return own, shared, seen

    def _saved(self, blocks: Iterable[Pairs], are_shards: bool = False) -> Iterator[Pairs]:
        part, parts = self.share
        for keys, values in blocks:
            if parts == 1:
                yield keys, values
            else:
                mine = (keys if are_shards else shards(keys)) % parts == part
                yield keys[mine], values[mine]

    def _with_records(self, blocks: Iterable[Pairs]) -> Iterator[Pairs]:
        for keys, positions in blocks:
            for start in range(0, len(keys), self._block_rows):
                part = slice(start, start + self._block_rows)
                yield keys[part], self.records(positions[part])

    @property
    def tracks_changes(self) -> bool:
        return self._used_at is not None

    def track_changes(self) -> None:
        """From here on: which rows may have changed since a step, of those from now on."""
        if self._used_at is None:
            self._used_at = np.zeros(self.directory.used, np.uint32)

    def mark(self, positions: np.ndarray, step: int) -> None:
        """The batch of this step uses these: it will update them, and has counted them."""
        if self._used_at is None:
            return
        if len(self._used_at) < self.directory.used:
            larger = np.zeros(max(self.directory.used, 2 * len(self._used_at)), np.uint32)
            larger[: len(self._used_at)] = self._used_at
            self._used_at = larger
        self._used_at[positions] = step

    def _is_changed(self, positions: np.ndarray, since: int) -> np.ndarray:
        assert self._used_at is not None, "changes are not tracked"
        return self._used_at[positions] >= since

    def num_changed(self, since: int) -> int:
        """Keys that this worker saves whose own row the batch of step `since`, or a later one, may have changed."""
        return sum(len(keys) for keys, _ in self._changed(since))

    def changed_blocks(self, since: int) -> Iterator[Pairs]:
        """Like `saved_blocks`, of those."""
        yield from self._with_records(self._changed(since))

    def _changed(self, since: int) -> Iterator[Pairs]:
        for keys, positions in self._saved(self.directory.blocks()):
            some = self._is_changed(positions, since)
            yield keys[some], positions[some]

    @property
    def _block_rows(self) -> int:
        """Rows of a block: eight megabytes of them."""
        return max(1, min(BLOCK, (8 << 20) // (self.record_words * 4)))

    def freeze(self) -> None:
        """What is not in memory is kept as it is, for a process that is forked now; until `thaw`."""

    def thaw(self) -> None:
        """Of a forked process nothing more is expected."""

    def open_frozen(self) -> None:
        """In the forked process: from here on rows are read as they were."""

    def close_frozen(self) -> None:
        """In the forked process: none of them will be read any more."""

    def put(self, keys: np.ndarray, rows: np.ndarray, *, shared: bool = False) -> None:
        """Adds rows (what `records` gave) of keys, or of shards, that have none yet."""
        raise NotImplementedError

    def check_room(self, keys: np.ndarray) -> None:
        """Raises ValueError if rows of these distinct keys do not fit beside those that are there; changes nothing."""
        self.directory.sweep()
        self.directory.check_budget(self.directory.num_missing(keys))

    def give(self, keys: np.ndarray, words: np.ndarray, step: int) -> None:
        """From here on these distinct keys have these records (as `words` gives them), whether they had a row or not. Nobody
        else uses the store meanwhile; step: of the batch that comes next."""
        positions, new = self.directory.admit(keys)
        self._overwrite(positions, words, new)
        self.mark(positions, step)

    def _overwrite(self, positions: np.ndarray, words: np.ndarray, new: np.ndarray) -> None:
        """new: which of these positions have just been given out."""
        raise NotImplementedError

    def put_sightings(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self.directory.sightings.insert(keys, counts, np.arange(len(keys)))

    def resume(self, *, updates: int, step: int) -> None:
        """After the last `put`: goes on after so many updates, of which `step` was the last."""
        self.updates, self.directory.step = updates, step

    def digest(self) -> tuple[int, int]:
        """Two 64-bit sums over (key, row, optimizer state); sums of several workers add up (mod 2^64)."""
        out = np.zeros(2, np.uint64)
        for tag, shared in zip(self.directory.tags, (False, True), strict=True):
            for keys, rows in self.blocks(shared=shared):
                records.digest(keys, np.ascontiguousarray(rows[:, : self.record_words]), tag, out)
        return int(out[0]), int(out[1])


def _sorted(index: HashIndex | CompactIndex) -> Pairs:
    keys, positions = index.items()
    order = np.argsort(keys)
    return keys[order], positions[order]

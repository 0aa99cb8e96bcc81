"""A store in plain Python: a dict of rows, swept in every step. What MemoryStore must be indistinguishable from."""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from nestpipe.kernels import reference
from nestpipe.store.table_store import TableStore
from nestpipe.tables import Normal, Table


def table_seed(name: str, seed: int) -> int:
    """As a signed int64."""
    bits = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") ^ (seed % 2**64)
    return int(reference.mix(torch.tensor((bits + 2**63) % 2**64 - 2**63)))


def first_values(table: Table, seed: int, keys: list[int], *, shared: bool = False) -> torch.Tensor:
    """Of keys, or of shards whose rows are shared."""
    bits = table_seed(table.name, seed)
    bits = int(reference.mix(torch.tensor(bits))) if shared else bits
    init = table.init
    normal, a, b = (True, 0.0, init.std) if isinstance(init, Normal) else (False, init.low, init.high)
    keys_N = torch.tensor(keys, dtype=torch.int64)
    return reference.first_values(bits, keys_N, table.dim, normal=normal, a=a, b=b).to(table.dtype)


def restore(store: TableStore, into: TableStore) -> None:
    """Puts everything that a checkpoint holds of a store into an empty one."""
    for shared in (False, True):
        for keys, records in store.blocks(shared=shared):
            into.put(keys, records, shared=shared)
    into.put_sightings(*store.sightings())
    into.resume(updates=store.updates, step=store.directory.step)


@dataclasses.dataclass
class Row:
    values: torch.Tensor
    state: torch.Tensor
    last_used: int
    uses: int = 1


class OverBudget(Exception):
    pass


class ModelStore:
    """For tables with Adagrad (the state of which shows every update)."""

    def __init__(self, table: Table, *, seed: int) -> None:
        self.table, self.seed = table, seed
        self.rows: dict[int, Row] = {}
        self.shared: dict[int, Row] = {}
        self.sightings: dict[int, int] = {}
        self.step = self.born = self.evicted = 0

    def resolve(self, keys: list[int], step: int) -> list[Row]:
        """The row that each key has in this step."""
        self.step = step
        eviction = self.table.eviction
        if eviction and eviction.ttl:
            self._drop([key for key, row in self.rows.items() if row.last_used < step - eviction.ttl])
        for key in keys:
            if key in self.rows:
                self.rows[key].last_used = step
                self.rows[key].uses += 1
        admitted = []
        for key in keys:
            if key not in self.rows:
                self.sightings[key] = self.sightings.get(key, 0) + 1
                if self.sightings[key] >= self.table.admit_after:
                    del self.sightings[key]
                    admitted.append(key)
                elif self.shard(key) not in self.shared:
                    self.shared[self.shard(key)] = self._newborn(self.shard(key), shared=True)
        if eviction and eviction.max_rows and len(self.rows) + len(admitted) > eviction.max_rows:
            self._make_room(len(admitted), eviction.max_rows, eviction.policy)
        for key in admitted:
            self.rows[key] = self._newborn(key)
        self.born += len(admitted)
        return [self.rows[key] if key in self.rows else self.shared[self.shard(key)] for key in keys]

    def _make_room(self, num_born: int, budget: int, policy: str) -> None:
        idle = [key for key, row in self.rows.items() if row.last_used < self.step]
        if len(self.rows) - len(idle) + num_born > budget:
            raise OverBudget

        def rank(key: int) -> tuple[int, ...]:
            row = self.rows[key]
            return (row.last_used, key) if policy == "lru" else (row.uses, row.last_used, key)

        excess = len(self.rows) + num_born - budget * 15 // 16
        self._drop(sorted(idle, key=rank)[:excess])

    def _drop(self, keys: list[int]) -> None:
        for key in keys:
            del self.rows[key]
        self.evicted += len(keys)

    def _newborn(self, key: int, *, shared: bool = False) -> Row:
        (values,) = first_values(self.table, self.seed, [key], shared=shared)
        return Row(values, torch.full((self.table.dim,), self.table.optimizer.initial), self.step)

    def update(self, row: Row, grad: torch.Tensor) -> None:
        optimizer = self.table.optimizer
        settings = {"lr": optimizer.lr, "scale": 1.0, "eps": optimizer.eps}
        after = reference.adagrad(row.values[None], row.state[None], grad[None], **settings)
        row.values, row.state = after[0][0], after[1][0]

    def read(self, key: int) -> torch.Tensor:
        if key in self.rows:
            return self.rows[key].values
        if self.table.admit_after == 1:
            return first_values(self.table, self.seed, [key])[0]
        shard = self.shard(key)
        return (
            self.shared[shard].values
            if shard in self.shared
            else first_values(self.table, self.seed, [shard], shared=True)[0]
        )

    @staticmethod
    def shard(key: int) -> int:
        return int(reference.shards(torch.tensor([key])))

"""Averaging: tables whose replicas are averaged now and then; which of their rows wait for it, and doing it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nestpipe.arena import Arena
from nestpipe.engine.buffers import DualBuffer
from nestpipe.engine.context import Context
from nestpipe.exchange.averaging import Awaiting, average
from nestpipe.exchange.owner import OwnedKeys
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport
from nestpipe.kernels import records
from nestpipe.kernels.keys import Deduplicator
from nestpipe.kernels.rows import NONE, Rows, gather
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore


class Averaging:
    """Of the operations of a step: what averaged tables need of ROUTE and RETRIEVE, and AVERAGE."""

    def __init__(
        self,
        plan: ExchangePlan,
        stores: Sequence[MemoryStore | DiskStore],
        buffers: Sequence[DualBuffer | None],
        transport: Transport,
    ) -> None:
        self._plan, self._stores, self._buffers, self._transport = plan, stores, buffers, transport
        self._awaiting = {k: Awaiting(table.sync_every) for k, table in enumerate(plan.tables) if plan.is_averaged(k)}
        self._dedup = Deduplicator()  # of the store lane

    def begin(self, first: int) -> None:
        """The next batch is `first`, whatever was routed before."""
        for awaiting in self._awaiting.values():
            awaiting.begin(first)

    def route(self, ctx: Context) -> None:
        """Notes the keys of a batch; if it is one after which replicas are averaged, those that wait besides."""
        for k, awaiting in self._awaiting.items():
            if awaiting.is_due(ctx.step):
                ctx.revisited[k] = awaiting.before(ctx.step)
            awaiting.add(ctx.step, ctx.owner.tables[k].keys_V)

    def wanted(self, ctx: Context, k: int, positions: np.ndarray) -> np.ndarray:
        """Of the distinct rows that all groups use, those to be retrieved: this group's; or, before an average, all of them, and
        behind them those that steps before have used."""
        if k not in ctx.revisited:
            return _own(ctx.owner.tables[k], positions)
        store = self._stores[k]
        both = self._distinct(np.concatenate([positions, store.directory.find_any(ctx.revisited[k])]))
        store.mark(both[len(positions) :], ctx.step)
        return both

    def _distinct(self, positions: np.ndarray) -> np.ndarray:
        """In the order in which they come first, which is the same on all replicas; without those of rows given up meanwhile."""
        positions = positions[positions >= 0]
        distinct, places = np.empty_like(positions), np.empty(len(positions), np.int32)
        return distinct[: self._dedup(positions, distinct, places)]

    def average(self, ctx: Context) -> None:
        for k in ctx.revisited:
            self._average(k, ctx.rows[k], ctx.positions[k], ctx.arena)

    def _average(self, k: int, rows: Rows, positions: np.ndarray, arena: Arena) -> None:
        store, raw = self._stores[k], rows._replace(half=False)
        words = arena.take(f"records {k}", (len(positions), store.record_words), np.float32)
        gather(raw, positions, NONE, words)
        average(words, self._plan.peers[k].tolist(), self._transport, store.average, arena)
        records.put(words, positions, raw)

    def settle(self, steps: int) -> None:
        """Between steps, before tables are saved: what waits to be averaged is, so that all replicas are alike."""
        for k, awaiting in self._awaiting.items():
            store = self._stores[k]
            positions = self._distinct(store.directory.find_any(awaiting.before(steps)))
            if isinstance(store, MemoryStore):
                self._average(k, store.rows, positions, Arena())
            else:
                words, buffer = store.words(positions), self._buffers[k]
                self._average(k, store.rows_in(words), np.arange(len(positions)), Arena())
                store.write_back(positions, words)
                assert buffer is not None
                buffer.forget()  # the next batch is to read them from the tier, not from the batch before
            store.mark(positions, max(0, steps - 1))
            awaiting.settle(steps)


def _own(owned: OwnedKeys, positions: np.ndarray) -> np.ndarray:
    """Those that this group uses: rows of the others, which are not averaged yet, need not be brought here."""
    used = np.zeros(len(positions), bool)
    used[owned.row_E] = True
    owned.merge(np.where(used, np.cumsum(used) - 1, -1).astype(np.int32))
    return positions[used]

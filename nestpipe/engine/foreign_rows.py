"""Rows that another program has trained: into tables, each to the workers that hold its key, and optimizer state out again.

N: rows that this worker gives. D: values of a row. S: floats of optimizer state beside it. W: workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import one_list
from nestpipe.engine.step import Store
from nestpipe.engine.worker import Worker
from nestpipe.exchange.hot import HotKeys
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import owners_of, shards
from nestpipe.optim import Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.tables import HotRows

BLOCK_BYTES = 8 << 20
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # float64 would be rounded: the user's own choice
SUMS = (Adagrad, RowwiseAdagrad, ScaledRowwiseAdagrad)  # whose state is a sum of squares


@dataclasses.dataclass(frozen=True)
class Given:
    """What this worker gives of a table. state_NS: None begins with that of newborn rows."""

    keys_N: np.ndarray
    rows_ND: Tensor
    state_NS: Tensor | None

    def words(self, store: Store, part: slice, wanted: np.ndarray) -> np.ndarray:
        """Records of a part, those `wanted` of it, as the store keeps them: values, then state."""
        table, chosen = store.table, torch.from_numpy(wanted)
        rows = self.rows_ND[part][chosen].to(table.dtype)
        if store.half:
            bits = np.zeros((len(rows), table.dim + table.dim % 2), np.int16)
            bits[:, : table.dim] = rows.contiguous().view(torch.int16).numpy()
            values = bits.view(np.float32)
        else:
            values = rows.numpy()
        width = table.optimizer.state_floats(table.dim)
        if self.state_NS is None:
            state = np.full((len(rows), width), table.optimizer.first_state, np.float32)
        else:
            state = self.state_NS[part][chosen].numpy()
        return np.ascontiguousarray(np.concatenate([values, state], 1))


def put(worker: Worker, name: str, keys: Any, rows: Any, state: Any, *, updates: int | None) -> None:
    """Gives keys of a table their rows and optimizer state, from all workers to all that hold them. What is wrong with what is
    given is raised on all workers, and nothing has changed then."""
    transport, stores, step = worker.rows, _stores(worker, name), worker.training.steps
    what = f"rows of table {name!r}"
    declared = {"table": name, "updates": updates, "state": "none" if state is None else "some"}
    transport.compare({f"put_rows({argument})": value for argument, value in declared.items()})
    given = transport.together(lambda: _given(stores[0], keys, rows, state, updates=updates, steps=step), what=what)
    routes = [(store, owners) for store in stores for owners in _groups(store, transport)]
    hot = _hot(worker, name)

    def incoming(route: tuple[Store, np.ndarray], *, with_rows: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys (and records) that come here from all workers, block by block."""
        store, owners = route
        size = max(1, BLOCK_BYTES // (8 + store.record_words * 4))
        for part in _parts(len(given.keys_N), size, transport):
            keys = given.keys_N[part]
            wanted = np.flatnonzero(_belongs(store, keys, hot))
            sent = given.words(store, part, wanted) if with_rows else np.empty((len(wanted), 0), np.float32)
            yield _deliver(keys[wanted], sent, owners_of(shards(keys[wanted]), owners), transport)

    # First all keys, so that what cannot be is known before the first row is written.
    for store in stores:
        arrived = [keys for route in routes if route[0] is store for keys, _ in incoming(route, with_rows=False)]
        transport.together(lambda store=store, arrived=arrived: _check_arrived(store, arrived), what=what)  # type: ignore[misc]
    _settle_owners(worker, name)
    worker.ops.averaging.settle(step)
    try:
        for route in routes:
            for keys, words in incoming(route, with_rows=True):
                transport.together(lambda store=route[0], k=keys, w=words: store.give(k, w, step), what=what)  # type: ignore[misc]
    except BaseException as error:
        worker.training.torn = f"put_rows of table {name!r} ended half-way: {error}"
        raise
    for store, buffer in zip(worker.ops.stores, worker.ops.buffers, strict=True):
        if store in stores and updates is not None:
            store.updates = updates
        if store in stores and buffer is not None:
            buffer.forget()  # its copies of rows are older than what has been given


def state_of(worker: Worker, name: str, keys: Any) -> Tensor:
    """Optimizer state [N, S] beside the rows of any keys; that of a newborn row where there is none."""
    transport, stores = worker.rows, _stores(worker, name)
    transport.compare({"row_state(table)": name})
    keys_N = transport.together(lambda: one_list(keys).values.cpu().numpy(), what="row_state")
    hot = _hot(worker, name)
    out_NS = np.empty((len(keys_N), _width(stores[0])), np.float32)
    for store in stores:
        wanted = np.flatnonzero(_belongs(store, keys_N, hot))
        owners = owners_of(shards(keys_N[wanted]), store.owners)
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=transport.world)
        asked, asked_counts = _send(keys_N[wanted[order]], counts, transport)
        answer = _state_at(store, asked)
        received = np.empty((len(wanted), answer.shape[1]), np.float32)
        out_NS[wanted[order]] = transport.all_to_all(answer, asked_counts, received, counts)
    return torch.from_numpy(out_NS)


def keys_of(worker: Worker, name: str) -> Tensor:
    """Keys that have a row of their own, sorted: on each worker other ones, on all workers together each once."""
    parts = [keys for store in _stores(worker, name) for keys in store.saved_keys()]
    return torch.from_numpy(np.sort(np.concatenate([np.empty(0, np.int64), *parts])))


# -- what is given -----------------------------------------------------------------------------------------------------


def _given(store: Store, keys: Any, rows: Any, state: Any, *, updates: int | None, steps: int) -> Given:
    """Raises ValueError for what does not fit the table."""
    for what, values in (("rows", rows), ("state", state)):
        if not isinstance(values, Tensor) and (what == "rows" or values is not None):
            raise ValueError(f"{what} must be a tensor, got {type(values).__name__}; torch.from_numpy(...) makes one")
    state = None if state is None else state.detach().cpu()
    given = Given(one_list(keys).values.cpu().numpy(), rows.detach().cpu(), state)
    table, count = store.table, len(given.keys_N)
    if given.rows_ND.shape != (count, table.dim) or given.rows_ND.dtype not in FLOATS:
        raise ValueError(
            f"{count:,} keys need rows of shape ({count}, {table.dim}) in float32, bfloat16 or float16, got "
            f"{tuple(given.rows_ND.shape)} in {given.rows_ND.dtype}"
        )
    twice = _twice(given.keys_N)
    if twice is not None:
        raise ValueError(f"key {twice} is given twice; give every key once")
    _check_finite("rows", given.rows_ND, given.keys_N, table.dtype)
    if updates is not None and (type(updates) is not int or updates < 0):
        raise ValueError(f"updates must be a whole number of at least 0, got {updates!r}")
    if updates is not None and steps:
        raise ValueError(
            f"updates={updates} is for a trainer that has not trained yet; this one has done {steps} steps"
        )
    if updates is not None and store.updates not in (0, updates):
        raise ValueError(
            f"updates={updates}, but rows of this table were given with updates={store.updates} before; all have one number"
        )
    _check_state(store, given, updates)
    return given


def _check_state(store: Store, given: Given, updates: int | None) -> None:
    table, optimizer, count = store.table, store.table.optimizer, len(given.keys_N)
    width, state = _width(store), given.state_NS
    if state is None:
        if updates and width:
            raise ValueError(
                f"updates={updates} goes with the state that they have made: give state=, or leave updates= out"
            )
        return
    if state.shape != (count, width) or state.dtype != torch.float32:
        raise ValueError(
            f"{type(optimizer).__name__} of dim {table.dim} keeps {width} floats beside a row: state must be float32 of shape "
            f"({count}, {width}), got {tuple(state.shape)} in {state.dtype}"
        )
    _check_finite("state", state, given.keys_N, torch.float32)
    if isinstance(optimizer, SUMS) and count and width and float(state.min()) < 0:
        raise ValueError(f"state has {float(state.min())}, but that of {type(optimizer).__name__} is a sum of squares")
    if isinstance(optimizer, Adam) and updates is None and store.updates == 0:
        raise ValueError(
            "state of Adam goes with the number of updates that made it, for its bias correction: give updates="
        )


def _check_finite(what: str, values: Tensor, keys: np.ndarray, dtype: torch.dtype) -> None:
    """As the table will keep them: the largest of float32 are infinite in bfloat16."""
    for start in range(0, len(values), 1 << 16):
        part = values[start : start + (1 << 16)].to(dtype)
        bad = (~torch.isfinite(part)).flatten(1).any(1).nonzero()
        if len(bad):
            raise ValueError(f"{what} of key {keys[start + int(bad[0])]} have NaN or infinity")


def _twice(keys: np.ndarray) -> int | None:
    """The first key that is there more than once."""
    if len(keys) < 2 or (keys[1:] > keys[:-1]).all():
        return None
    ordered = np.sort(keys)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    return int(ordered[again[0]]) if len(again) else None


def _check_arrived(store: Store, parts: list[np.ndarray]) -> None:
    keys = np.concatenate([np.empty(0, np.int64), *parts])
    twice = _twice(keys)
    if twice is not None:
        raise ValueError(
            f"key {twice} is given by more than one worker; let each give a part (rank r of W: keys[r::W]), or one of them all"
        )
    store.check_room(keys)


# -- who holds what ----------------------------------------------------------------------------------------------------


def _stores(worker: Worker, name: str) -> list[Store]:
    """The table's own, and that of its hot rows."""
    return [store for store in worker.stores if store.table.name == name]


def _hot(worker: Worker, name: str) -> HotKeys | None:
    plan = worker.ops.plan
    return next((hot for table, hot in zip(plan.tables, plan.hot, strict=True) if table.name == name), None)


def _belongs(store: Store, keys: np.ndarray, hot: HotKeys | None) -> np.ndarray:
    """Which of these keys of the table are for this store of it."""
    is_hot = np.zeros(len(keys), bool) if hot is None else hot.contains(keys)
    return is_hot == isinstance(store.table, HotRows)


def _settle_owners(worker: Worker, name: str) -> None:
    """A table that has rows stays where it is: with all workers."""
    plan = worker.ops.plan
    for k in plan.unplaced:
        if plan.tables[k].name == name:
            plan.put(k, plan.owners[k], "it was given rows before the first batch")


def _groups(store: Store, transport: Transport) -> list[np.ndarray]:
    """The owners of every replica, in the same order on all workers."""
    told = transport.gather_objects(tuple(store.owners.tolist()))
    return [np.array(owners) for owners in dict.fromkeys(told)]


# -- what travels ------------------------------------------------------------------------------------------------------


def _parts(count: int, size: int, transport: Transport) -> Iterator[slice]:
    """As many on every worker, so that all take part in every exchange; the last ones may be empty."""
    most = int(transport.largest(np.array([count]))[0])
    for start in range(0, most, size):
        yield slice(start, start + size)


def _deliver(
    keys: np.ndarray, records: np.ndarray, owners: np.ndarray, transport: Transport
) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=transport.world)
    here, counts_here = _send(keys[order], counts, transport)
    received = np.empty((len(here), records.shape[1]), np.float32)
    if records.shape[1]:
        received = transport.all_to_all(np.ascontiguousarray(records[order]), counts, received, counts_here)
    return here, received


def _send(keys: np.ndarray, counts: np.ndarray, transport: Transport) -> tuple[np.ndarray, np.ndarray]:
    """Keys that lie in the order of their owners; what comes from all workers, and how many from each."""
    counts_here = transport.exchange_rows(np.ascontiguousarray(counts[:, None]), counted=False)[:, 0]
    return transport.all_to_all(keys, counts, np.empty(int(counts_here.sum()), np.int64), counts_here), counts_here


def _width(store: Store) -> int:
    return store.table.optimizer.state_floats(store.table.dim)


def _state_at(store: Store, keys: np.ndarray) -> np.ndarray:
    width = _width(store)
    state = np.full((len(keys), width), store.table.optimizer.first_state, np.float32)
    positions = store.find(keys)
    there = np.flatnonzero(positions >= 0)
    distinct, back = np.unique(positions[there], return_inverse=True)  # rare keys may share a row
    state[there] = store.words(distinct)[back, store.record_words - width :]
    return state

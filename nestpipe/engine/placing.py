"""Before the first batch: tables declared owners="auto" get their owners, and hot rows are chosen, from that batch or from a
checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nestpipe import process
from nestpipe.batch import Batch
from nestpipe.engine.step import StepOperations
from nestpipe.exchange import hot, placement
from nestpipe.exchange.hot import HotKeys

Read = Callable[[], Batch | None]
Counted = tuple[np.ndarray, np.ndarray]  # keys, and how often each is used


def place_by_first_batch(ops: StepOperations, read: Read) -> Read:
    """Takes the first batch of every worker and decides from what they have together; returns a `read` that begins with it.

    It is done before any lane runs: clustering goes by who owns what, and lanes that run ahead must not see two plans. What
    goes wrong here is raised by the `read`, where workers can tell each other.
    """
    batch: Batch | None = None
    counted: np.ndarray | None = None
    used: list[Counted] | None = None
    problem: Exception | None = None
    plan = ops.plan
    try:
        batch = read()
        if batch is not None:
            counted = placement.count(batch, plan, rank=ops.rows.rank, world=ops.rows.world)
            used = [hot.most_used(batch, plan.features_of[k], plan.tables[k].hot) for k in plan.unchosen]
    except Exception as error:
        problem = error

    def first() -> Batch | None:
        if problem is not None:
            raise problem
        return batch

    if placement.decide(plan, counted, ops.rows):
        _hand_over(ops)
    if plan.unchosen:
        _choose_hot_keys(ops, used, problem)
    reads: Iterator[Read] = itertools.chain([first], itertools.repeat(read))
    return lambda: next(reads)()


def _choose_hot_keys(ops: StepOperations, used: list[Counted] | None, problem: Exception | None) -> None:
    """used: by table, if this worker has a batch. Nothing is chosen if a worker has a problem, which it will tell: nobody trains
    on this batch. Tables that no worker has a key of wait for another call; those that have rows by then have no hot ones."""
    plan = ops.plan
    has_rows = [not ops.stores[k].is_empty for k in plan.unchosen]
    told = ops.rows.gather_objects((problem is None, used, has_rows))
    if not all(fine for fine, _, _ in told):
        return
    for i, k in enumerate(plan.unchosen):
        offered = [of_worker[i] for _, of_worker, _ in told if of_worker is not None]
        if any(has[i] for _, _, has in told):
            _choose(ops, k, HotKeys(), "it has rows already")
        elif any(len(keys) for keys, _ in offered):
            plan.hot[k] = hot.choose(offered, plan.tables[k].hot)


def _choose(ops: StepOperations, k: int, keys: HotKeys, why: str = "") -> None:
    ops.plan.hot[k] = keys
    if why and ops.rows.rank == 0:
        process.tell(f"table {ops.plan.tables[k].name}: no hot rows: {why}, and they are chosen from the first batch")


def place_as_saved(
    ops: StepOperations, table: str, owners: Sequence[int] | None, hot_keys: Sequence[int] | None
) -> None:
    """A checkpoint is about to be loaded. owners: who shall hold the table by it; None: it was not decided yet.
    hot_keys: those that were chosen, none of a table that was not to have any; None: they were not chosen yet."""
    for k in ops.plan.twins:
        if ops.plan.tables[k].name == table:
            ops.plan.hot[k] = None
            if hot_keys is not None:
                _choose(ops, k, HotKeys(hot_keys), "" if hot_keys else "the checkpoint has none")
    for k in ops.plan.unplaced:
        if ops.plan.tables[k].name == table and owners is not None:
            ops.plan.put(k, np.array(owners), "as the checkpoint says", pooled=len(owners) == 1)
    _hand_over(ops)


def _hand_over(ops: StepOperations) -> None:
    for store, owners in zip(ops.stores, ops.plan.owners, strict=True):
        if store.owners is not owners:
            store.hand_to(owners)

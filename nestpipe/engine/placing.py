"""Before the first batch: tables declared owners="auto" get their owners, from that batch or from a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nestpipe.batch import Batch
from nestpipe.engine.step import StepOperations
from nestpipe.exchange import placement

Read = Callable[[], Batch | None]


def place_by_first_batch(ops: StepOperations, read: Read) -> Read:
    """Takes the first batch of every worker and decides from what they have together; returns a `read` that begins with it.

    It is done before any lane runs: clustering goes by who owns what, and lanes that run ahead must not see two plans. What
    goes wrong here is raised by the `read`, where workers can tell each other.
    """
    batch: Batch | None = None
    counted: np.ndarray | None = None
    problem: Exception | None = None
    try:
        batch = read()
        if batch is not None:
            counted = placement.count(batch, ops.plan, rank=ops.rows.rank, world=ops.rows.world)
    except Exception as error:
        problem = error

    def first() -> Batch | None:
        if problem is not None:
            raise problem
        return batch

    if placement.decide(ops.plan, counted, ops.rows):
        _hand_over(ops)
    reads: Iterator[Read] = itertools.chain([first], itertools.repeat(read))
    return lambda: next(reads)()


def place_as_saved(ops: StepOperations, table: str, owners: Sequence[int] | None) -> None:
    """A checkpoint is about to be loaded. owners: who shall hold the table by it; None: it was not decided yet."""
    for k in ops.plan.unplaced:
        if ops.plan.tables[k].name == table and owners is not None:
            ops.plan.put(k, np.array(owners), "as the checkpoint says", pooled=len(owners) == 1)
    _hand_over(ops)


def _hand_over(ops: StepOperations) -> None:
    for store, owners in zip(ops.stores, ops.plan.owners, strict=True):
        if store.owners is not owners:
            store.hand_to(owners)

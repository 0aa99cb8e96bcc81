"""Which tables declared owners="auto" one worker holds whole: decided from the first batch, the same by all workers.

A bag that is pooled at the owner is one vector from each worker that has some of its keys. Where one worker has them all it is
one vector. But then that worker does all the work for the table and holds all its rows, so a table goes to one worker only
together with others that are dealt to the other workers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nestpipe.batch import Batch
from nestpipe.exchange.plan import WORTH_IT, ExchangePlan
from nestpipe.exchange.requests import wire_bytes
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import owners_of, shards

# No worker gets more than this times its even part of what is dealt, in bytes on the wire and in rows. Times WORTH_IT it is 1:
# the busiest link carries no more than it would if all workers shared the tables.
EVEN = 1.25


def count(batch: Batch, plan: ExchangePlan, *, rank: int, world: int) -> np.ndarray:
    """For each table, what this worker's batch costs on the wire as rows, as bags pooled by all workers, as bags pooled by one;
    and its distinct keys [K, 4]. Tables that a sequence reads are left out: their rows travel from wherever they are."""
    counted = np.zeros((len(plan.tables), 4), np.int64)
    for k, features in enumerate(plan.features_of):
        if any(feature.pooling is None for feature in features):
            continue
        lists = [batch.keys[feature.name] for feature in features]
        keys = np.concatenate([jagged.values.numpy() for jagged in lists])
        lengths = np.concatenate([np.diff(jagged.offsets.numpy()) for jagged in lists])
        weighted = any(feature.pooling == "mean" for feature in features) or any(j.weights is not None for j in lists)
        row, bag, key = wire_bytes(plan.tables[k].dim, keys, weighted=weighted)
        distinct = np.unique(keys)
        owner_of_row, owner_of_key = (owners_of(shards(some), np.arange(world)) for some in (distinct, keys))
        pieces = np.unique(np.repeat(np.arange(len(lengths)), lengths) * world + owner_of_key)  # of bags, by owner
        others = np.count_nonzero(pieces % world != rank), np.count_nonzero(owner_of_key != rank)
        whole = (np.count_nonzero(lengths) * bag + len(keys) * key) * (world - 1) // world
        counted[k] = (
            np.count_nonzero(owner_of_row != rank) * row,
            others[0] * bag + others[1] * key,
            whole,
            len(distinct),
        )
    return counted


def decide(plan: ExchangePlan, counted: np.ndarray | None, transport: Transport) -> bool:
    """Fixes the owners of all tables that are undecided, from what all workers have counted (None: one has no batch). False
    if none has: nothing is decided then."""
    world = transport.world
    told = np.zeros((len(plan.tables) + 1, 4), np.int64)
    if counted is not None:
        told[:-1], told[-1] = counted, 1
    transport.sum(told)
    if not told[-1, 0]:
        return False
    worth, why = {}, {}
    declared = np.zeros((2, world))
    for k, (as_rows, as_bags, whole, distinct) in enumerate(told[:-1].tolist()):
        table = plan.tables[k]
        load = np.array([whole, distinct * (table.dim + table.optimizer.state_floats(table.dim))], np.float64)
        if k not in plan.unplaced:
            # (Who holds a replica differs from worker to worker: all must deal by the same numbers.)
            if len(plan.peers[k]) == 1 and len(plan.owners[k]) < world:
                declared[:, plan.owners[k]] += (load / len(plan.owners[k]))[:, None]
            continue
        shared = as_bags if table.pooled_at == "owner" else min(as_rows, as_bags)
        why[k] = f"first batch: {shared / 1e6:.2f} MB if all hold it, {whole / 1e6:.2f} MB if one does"
        if not distinct:
            why[k] = "the first batch has no keys of it"
        elif whole <= WORTH_IT * shared:
            worth[k] = load
    dealt = deal(worth, declared)
    for k in plan.unplaced:
        if k in dealt:
            plan.put(k, np.array([dealt[k]]), why[k], pooled=True)
        else:
            uneven = "; workers would get uneven parts of such tables" if k in worth else ""
            plan.put(k, np.arange(world), why[k] + uneven)
    return True


def deal(loads: Mapping[int, np.ndarray], declared: np.ndarray) -> dict[int, int]:
    """A worker for each of these tables, or for as many of them as can be dealt evenly.

    loads: of each table, how much it is of two kinds (bytes, rows). declared: what workers have of tables that are not up for
    decision [2, W].
    """
    world, chosen = declared.shape[1], list(loads)
    while chosen:
        total = declared.sum(axis=1) + sum(loads[k] for k in chosen)
        parts = {k: loads[k] / total for k in chosen}
        chosen.sort(key=lambda k: (-parts[k].max(), k))
        held, has = {}, declared / total[:, None]
        limit = max(EVEN / world, has.max())
        for k in chosen:
            held[k] = int(np.argmin((has + parts[k][:, None]).max(axis=0)))
            has[:, held[k]] += parts[k]
        if has.max() <= limit:
            return held
        # One that is too much for any worker goes first; else the smallest, until what is left comes out even.
        chosen.pop(0 if parts[chosen[0]].max() > limit else -1)
    return {}

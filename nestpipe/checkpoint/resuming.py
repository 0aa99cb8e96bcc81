"""From a worker to what a checkpoint holds of it, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe import process
from nestpipe.checkpoint.loading import load, set_torch_rng
from nestpipe.checkpoint.manifest import Base
from nestpipe.checkpoint.saving import Content
from nestpipe.checkpoint.settings import Settings
from nestpipe.engine.placing import place_as_saved
from nestpipe.engine.worker import Worker
from nestpipe.tables import init_entry


def content_of(
    worker: Worker,
    *,
    config: Mapping[str, Any] | None,
    recipe: Mapping[str, Any] | None,
    run: str | None,
    base: Base | None,
    extra: Mapping[str, Any],
) -> Content:
    training, plan = worker.training, worker.ops.plan
    names = [plan.tables[k].name for k in plan.declared]
    measured = training.setting.is_auto and training.tuning is None
    settings = Settings(
        lr_factor=worker.lr_factor,
        pooled_at_owner={name: plan.at_owner[k] for k, name in enumerate(names)},
        owners={name: _owners(worker, k) for k, name in enumerate(names)},
        replicas={name: len(plan.peers[k]) for k, name in enumerate(names) if len(plan.peers[k]) > 1},
        hot={names[k]: None if (hot := plan.hot[k]) is None else hot.keys.tolist() for k in plan.twins},
        micro_batches=training.engine.schedule.micro_batches if measured else None,
        config=config,
        run=run,
        balance=worker.ops.squares if training.setting.balance == "auto" else None,
        inits={plan.tables[k].name: init_entry(plan.tables[k].init) for k in plan.declared},
        features=[dataclasses.asdict(feature) for feature in plan.features],
        recipe=recipe,
        extra=extra,
    )
    return Content(worker.stores, worker.dense, training.steps, training.position, settings, base, training.data_state)


def _owners(worker: Worker, k: int) -> list[int] | None:
    plan = worker.ops.plan
    if len(plan.peers[k]) > 1:
        return list(range(worker.world))
    return None if k in plan.unplaced else plan.owners[k].tolist()


def load_into(worker: Worker, path: Path, tables: Sequence[str] | None) -> Settings:
    """All or nothing. Returns what else was saved."""
    training, ops = worker.training, worker.ops
    worker.rows.compare({"load(tables)": None if tables is None else sorted(tables)})
    used = training.steps > 0 or training.torn is not None or not all(store.is_empty for store in worker.stores)
    if worker.rows.any(used):
        raise ValueError(
            f"load into a trainer that has not trained yet; this one has done {training.steps} steps"
            + (
                ""
                if training.steps
                else " but has rows already (of put_rows, or of a first step that failed). Make a new one"
            )
        )
    with worker.all_or_nothing():
        loaded = load(
            path,
            worker.stores,
            worker.dense,
            worker.rows,
            tables=tables,
            hot=lambda table: next(
                (hot for k, hot in enumerate(ops.plan.hot) if ops.plan.tables[k].name == table), None
            ),
            place=functools.partial(place_as_saved, ops),
        )
    settings = loaded.settings
    # With another number of workers the data is cut otherwise: as many batches of all workers are passed over.
    same = len(loaded.positions) == worker.world
    position = loaded.positions[worker.rank] if same else sum(loaded.positions) // worker.world
    training.start_at(loaded.step, position, loaded.data_states[worker.rank] if same else None)
    if not same and any(state is not None for state in loaded.data_states):
        training.data_lost = (
            f"{path} was saved by {len(loaded.positions)} workers, each of which has a state of its data, and here are "
            f"{worker.world}: go on with as many workers as it was saved by, or give the data from where it is to go on"
        )
    if loaded.torch_rng is not None:
        set_torch_rng(loaded.torch_rng)
    # Those of the dense optimizer have come with it: a scheduler of the user's own may have set them.
    worker.scale_row_lr(settings.lr_factor)
    if worker.dense.lr_scheduler is not None:
        worker.dense.scale_lr(settings.lr_factor)
    if training.tuning is not None and settings.micro_batches:  # measured before
        training.tuning = None
        training.cut_into(settings.micro_batches)
        if worker.rank == 0:
            process.tell(f"micro-batches: {settings.micro_batches} [auto; as measured before the checkpoint]")
    if training.measures_balance and settings.balance is not None:
        training.balance_by(settings.balance, "as measured before the checkpoint")
    for k in ops.plan.undecided:
        name = ops.plan.tables[k].name
        # What is best with one owner is no guide for several, nor is what is best with replicas without.
        if settings.replicas.get(name, 1) != len(ops.plan.peers[k]):
            continue
        if len(settings.owners.get(name) or ()) != 1 or len(ops.plan.owners[k]) == 1:
            ops.plan.resume(k, settings.pooled_at_owner.get(name))
    return settings

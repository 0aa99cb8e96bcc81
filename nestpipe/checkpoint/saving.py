"""Writing a checkpoint: every worker its own part, then the first worker the manifest.

Its part complete, each worker tells so in a small file; when all have, the first one writes the manifest and gives the folder its
name. Before that nobody takes it for a checkpoint; whatever goes wrong, the ones before it stay as they are. `save` does it while
training waits, `background` in forked processes while it goes on.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as tensors_to_bytes

from nestpipe import weights
from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import (
    DENSE,
    OPTIMIZER,
    OPTIMIZER_SETTINGS,
    Base,
    Manifest,
    state_file,
    table_file,
)
from nestpipe.checkpoint.settings import Settings
from nestpipe.engine.dense import Dense
from nestpipe.engine.lr_scheduler import state_of
from nestpipe.errors import TrainingError
from nestpipe.exchange.transport import Transport
from nestpipe.files import check_local
from nestpipe.sealed import checksum, partial_of, sync_file, sync_folder, write_durably
from nestpipe.store.table_store import TableStore
from nestpipe.tensorfile import TensorWriter

PATIENCE = 3600.0  # seconds that the first worker waits for the parts of the others

Part = tuple[str, Callable[[Path], None]]  # a file's name and what writes it


@dataclasses.dataclass(frozen=True)
class Content:
    """What there is to save, on one worker, all of one instant.

    position: batches that this worker has taken from its data. data_state: what the data said of itself then, if it does.
    base: the full checkpoint, in the same folder, since which only what changed is written; None: all is.
    """

    stores: Sequence[TableStore]
    dense: Dense
    step: int
    position: int
    settings: Settings
    base: Base | None = None
    data_state: Any = None

    @property
    def of_tables(self) -> list[list[TableStore]]:
        """Of each table its store, and that of its hot rows if it has one."""
        by_name: dict[str, list[TableStore]] = {}
        for store in self.stores:
            by_name.setdefault(store.table.name, []).append(store)
        return list(by_name.values())


def check_new(path: Path, transport: Transport) -> None:
    """Raises ValueError if there is something already. All workers call it, before `save`."""
    check_local(path)
    if transport.gather_objects(os.path.exists(path))[0]:
        raise ValueError(f"{path} exists already; save each checkpoint to a new folder")


def save(path: Path, content: Content, transport: Transport) -> None:
    """Returns when the checkpoint is there; what goes wrong on one worker is raised on all, and nothing is left of it."""
    partial = partial_of(path)
    first = transport.rank == 0
    try:
        transport.together((lambda: make_empty(partial)) if first else None, what="checkpoint")
        parts: list[Part] = []
        make = bound(parts_of, content, transport.rank, transport.world)
        transport.together(lambda: parts.extend(make()), what="checkpoint")
        transport.together(lambda: write_parts(partial, parts, transport.rank), what="checkpoint")
        complete = bound(finish, partial, path, content, transport.world)
        transport.together(complete if first else None, what="checkpoint")
    except TrainingError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


# -- a worker's part ---------------------------------------------------------------------------------------------------


def parts_of(content: Content, rank: int, world: int) -> list[Part]:
    """The files that a worker has to write. What torch holds is copied here and now."""
    since = None if content.base is None else content.base.step
    parts: list[Part] = [
        (table_file(stores[0].table.name, rank, world), bound(_save_table, stores=stores, since=since))
        for stores in content.of_tables
    ]
    state = {
        "position": content.position,
        "data": content.data_state,
        "torch_rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    parts.append((state_file(rank, world), _writer(json.dumps(state).encode())))
    if rank == 0:
        parts.append((DENSE, _writer(weights.to_bytes(content.dense.model))))
        if content.dense.optimizer is not None:
            parts += _optimizer_parts(content.dense.optimizer, content.dense.lr_scheduler)
    for store in content.stores:
        store.records(np.empty(0, np.int64))  # its kernels are loaded now, not by a process that must not take locks
    return parts


def _save_table(path: Path, *, stores: Sequence[TableStore], since: int | None) -> None:
    """All keys with their records; or all keys, and the records of those that changed since a step."""
    for store in stores:
        store.directory.sweep()  # what is past its ttl is not saved; the numbers below hold from here on
    own, shared, seen = map(sum, zip(*(store.num_saved() for store in stores), strict=True))
    rows = own if since is None else sum(store.num_changed(since) for store in stores)
    words = stores[0].saved_words
    layout: dict[str, tuple[type, tuple[int, ...]]] = {
        "keys": (np.int64, (own,)),
        "records": (np.float32, (rows, words)),
        "shared": (np.int64, (shared,)),
        "shared_records": (np.float32, (shared, words)),
        "seen": (np.int64, (seen,)),
        "sightings": (np.int64, (seen,)),
    }
    if since is not None:
        layout["changed"] = (np.int64, (rows,))
    with TensorWriter(path, layout) as file:
        for store in stores:
            _append(file, store, since)
    for store in stores:
        store.close_frozen()  # if it is: gives back room on the disk before the next table is written


def _append(file: TensorWriter, store: TableStore, since: int | None) -> None:
    if since is not None:
        for keys in store.saved_keys():
            file.append("keys", keys)
        for keys, records in store.changed_blocks(since):
            file.append("changed", keys)
            file.append("records", records)
    else:
        for keys, records in store.saved_blocks():
            file.append("keys", keys)
            file.append("records", records)
    for ids, records in store.saved_blocks(shared=True):
        file.append("shared", ids)
        file.append("shared_records", records)
    for keys, counts in store.saved_sightings():
        file.append("seen", keys)
        file.append("sightings", counts)


def _writer(content: bytes) -> Callable[[Path], None]:
    return lambda path: write_durably(path, content)


def _optimizer_parts(optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> list[Part]:
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                plain[f"{index}.{name}"] = value
    groups = [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    settings = {"plain": plain, "param_groups": groups}
    if lr_scheduler is not None:
        settings["lr_scheduler"] = [type(lr_scheduler).__name__, state_of(lr_scheduler)]
    text = (json.dumps(settings, indent=1) + "\n").encode()
    return [(OPTIMIZER, _writer(tensors_to_bytes(tensors))), (OPTIMIZER_SETTINGS, _writer(text))]


def write_parts(partial: Path, parts: Sequence[Part], rank: int) -> None:
    """A worker's files, then word that they are there, or that they will not be."""
    done = done_file(partial, rank)
    try:
        files = {name: _written(partial, name, write) for name, write in parts}
        waiting = done.with_suffix(".partial")
        write_durably(waiting, json.dumps(files).encode())
        waiting.rename(done)
    except BaseException as error:
        for name, _ in parts:  # room for others
            (partial / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # then the first worker gives up after its patience
            tell_failure(partial, rank, error)
        raise


def _written(partial: Path, name: str, write: Callable[[Path], None]) -> tuple[int, int]:
    write(partial / name)
    sync_file(partial / name)
    return checksum(partial / name)


def done_file(partial: Path, rank: int) -> Path:
    """What a worker writes when its part is complete, or will never be: {name: (bytes, CRC-32)} of its files, or why not."""
    return partial / f"done-{rank}.json"


def tell_failure(partial: Path, rank: int, problem: BaseException) -> None:
    done_file(partial, rank).write_text(json.dumps({"failed": str(problem)}))


# -- the first worker, when all parts are there --------------------------------------------------------------------------


def wait_for_all(partial: Path, world: int) -> None:
    deadline = time.monotonic() + PATIENCE
    missing = set(range(world))
    while missing:
        missing = {rank for rank in missing if not done_file(partial, rank).exists()}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} has not written its part within {PATIENCE:.0f} s")
        if missing:
            time.sleep(0.02)


def finish(partial: Path, path: Path, content: Content, world: int) -> int:
    """Writes the manifest, and the checkpoint gets its name. Returns the CRC-32 of the manifest."""
    files: dict[str, tuple[int, int]] = {}
    for rank in range(world):
        values = json.loads(done_file(partial, rank).read_text())
        if "failed" in values:
            raise OSError(f"rank {rank} has not written its part: {values['failed']}")
        files |= {name: (size, crc) for name, (size, crc) in values.items()}
    for rank in range(world):
        done_file(partial, rank).unlink()
    tables = [declared(stores[0]) for stores in content.of_tables]
    crc = manifests.write(Manifest(partial, content.step, world, tables, content.settings, files, content.base))
    partial.rename(path)
    sync_folder(path.parent)
    return crc


def declared(store: TableStore) -> dict[str, Any]:
    """What the manifest says of a table; who loads it must have declared the same."""
    table = store.table
    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": str(table.dtype),
        "optimizer": table.optimizer.state_kind,
        "counters": table.eviction is not None,
        "admit_after": table.admit_after,
        "seed": store.seed,
        "updates": store.updates,
    }

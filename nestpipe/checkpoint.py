"""Saving and loading: one folder per checkpoint, one file per worker and table, no code in any of them.

    manifest.json                       what is in it; written last
    dense.safetensors                   the model's weights
    dense-optimizer.safetensors/.json   its optimizer's tensors and settings
    table-NAME.I-of-W.safetensors       worker I's keys and records (values, optimizer state, counters)

Tables are written and read in blocks: one may be larger than memory.
The folder is written under another name and renamed when complete, so a half-written one is never loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from nestpipe.engine.dense import Dense
from nestpipe.errors import TrainingError
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import owners_of, shards
from nestpipe.store.table_store import TableStore
from nestpipe.tensorfile import TensorReader, TensorWriter

FORMAT = 1
BLOCK_BYTES = 8 << 20


def save(
    path: Path,
    stores: Sequence[TableStore],
    dense: Dense,
    transport: Transport,
    *,
    step: int,
    settings: dict[str, Any],
) -> None:
    """settings: what else the trainer wants back from `load`."""
    if path.exists():
        raise ValueError(f"{path} exists already; save each checkpoint to a new folder")
    partial = path.with_name(f".{path.name}.partial")
    first = transport.rank == 0

    def make_folder() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def write_tables() -> None:
        for store in stores:
            _save_table(partial / _table_file(store, transport.rank, transport.world), store)

    def write_rest() -> None:
        # Clones, because the format refuses tensors that share memory: tied weights.
        weights = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in dense.model.state_dict().items()
        }
        save_tensors(weights, partial / "dense.safetensors")
        if dense.optimizer is not None:
            _save_optimizer(partial, dense.optimizer)
        manifest = {
            "format": FORMAT,
            "step": step,
            "world": transport.world,
            "tables": [_declared(store) for store in stores],
            "settings": settings,
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(path)

    try:
        transport.together(make_folder if first else None, what="checkpoint")
        transport.together(write_tables, what="checkpoint")
        transport.together(write_rest if first else None, what="checkpoint")
    except TrainingError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(path: Path, stores: Sequence[TableStore], dense: Dense, transport: Transport) -> tuple[int, dict[str, Any]]:
    """Every worker reads all files of a table and keeps the keys that are its own now. Returns step and settings."""
    if not (path / "manifest.json").is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no manifest.json")
    manifest = json.loads((path / "manifest.json").read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"{path} has format {manifest['format']}, this version of nestpipe reads {FORMAT}")
    saved = {table["name"]: table for table in manifest["tables"]}
    for store in stores:
        if store.table.name not in saved:
            raise ValueError(f"{path} has no table {store.table.name!r}; it has {', '.join(sorted(saved))}")
        for what, value in _declared(store).items():
            if what != "updates" and saved[store.table.name][what] != value:
                raise ValueError(
                    f"table {store.table.name!r}: {what} is {value!r} here but {saved[store.table.name][what]!r} in {path}"
                )
    transport.together(lambda: _read_all(path, manifest, stores, dense, transport), what="checkpoint")
    return int(manifest["step"]), manifest["settings"]


def _read_all(
    path: Path, manifest: dict[str, Any], stores: Sequence[TableStore], dense: Dense, transport: Transport
) -> None:
    saved = {table["name"]: table for table in manifest["tables"]}
    dense.model.load_state_dict(load_tensors(path / "dense.safetensors"))
    if dense.optimizer is not None:
        _load_optimizer(path, dense.optimizer)
    for store in stores:
        for worker in range(manifest["world"]):
            _load_table(path / _table_file(store, worker, manifest["world"]), store, transport)
        # The last step is the last one that was trained on.
        store.resume(updates=saved[store.table.name]["updates"], step=max(0, manifest["step"] - 1))


def _table_file(store: TableStore, rank: int, world: int) -> str:
    return f"table-{quote(store.table.name, safe='')}.{rank}-of-{world}.safetensors"


def _declared(store: TableStore) -> dict[str, Any]:
    table = store.table
    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": str(table.dtype),
        "optimizer": type(table.optimizer).__name__,
        "counters": table.eviction is not None,
        "admit_after": table.admit_after,
        "seed": store.seed,
        "updates": store.updates,
    }


def _save_table(path: Path, store: TableStore) -> None:
    directory = store.directory
    directory.sweep()  # what is past its ttl is not saved; the numbers below hold from here on
    own, shared, seen = len(directory), len(directory.shared), len(directory.sightings)
    layout = {
        "keys": (np.int64, (own,)),
        "records": (np.float32, (own, store.saved_words)),
        "shared": (np.int64, (shared,)),
        "shared_records": (np.float32, (shared, store.saved_words)),
        "seen": (np.int64, (seen,)),
        "sightings": (np.int64, (seen,)),
    }
    with TensorWriter(path, layout) as file:
        for keys, records in store.blocks():
            file.append("keys", keys)
            file.append("records", records)
        for ids, records in store.blocks(shared=True):
            file.append("shared", ids)
            file.append("shared_records", records)
        for keys, counts in directory.sightings.blocks():
            file.append("seen", keys)
            file.append("sightings", counts)


def _load_table(path: Path, store: TableStore, transport: Transport) -> None:
    """Puts the rows of a file whose keys belong to this worker into its store."""
    file = TensorReader(path)

    def own(keys: str, values: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        row_bytes = 8 + int(np.prod(file.shape(values)[1:])) * 4
        size = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, file.shape(keys)[0], size):
            some = file.read(keys, start, start + size)
            shard = some if keys == "shared" else shards(some)
            mine = owners_of(shard, store.owners) == transport.rank
            if mine.any():
                yield some[mine], file.read(values, start, start + size)[mine]

    with file:
        for some, records in own("keys", "records"):
            store.put(some, records)
        for some, records in own("shared", "shared_records"):
            store.put(some, records, shared=True)
        for some, counts in own("seen", "sightings"):
            store.put_sightings(some, counts)


def _save_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous()
            else:
                plain[f"{index}.{name}"] = value
    save_tensors(tensors, path / "dense-optimizer.safetensors")
    settings = {"plain": plain, "param_groups": state["param_groups"]}
    (path / "dense-optimizer.json").write_text(json.dumps(settings, indent=1) + "\n")


def _load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    settings = json.loads((path / "dense-optimizer.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*load_tensors(path / "dense-optimizer.safetensors").items(), *settings["plain"].items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": settings["param_groups"]})

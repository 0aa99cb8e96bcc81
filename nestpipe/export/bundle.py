"""Writing a bundle, full or a delta, in blocks: a table may be larger than memory. serve/manifest.py says what is in it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nestpipe import sealed
from nestpipe.checkpoint.manifest import DENSE as SAVED_DENSE
from nestpipe.checkpoint.manifest import Manifest as Saved
from nestpipe.checkpoint.rows import ROWS, Block, SavedTable
from nestpipe.export.changes import changes_since
from nestpipe.export.source import checkpoint_of, need_declarations, sound
from nestpipe.kernels.index import EMPTY, fewest_slots, place
from nestpipe.sealed import Damaged
from nestpipe.serve import manifest as manifests
from nestpipe.serve.manifest import DENSE, DTYPES, GONE, Base, Manifest, StoredTable
from nestpipe.serve.rows import BLOCK, Layer, TableRows
from nestpipe.tables import Feature, Table, init_of
from nestpipe.tensorfile import TensorWriter


def export_bundle(source: Path, out: Path, *, since: Path | None = None, dtype: str | None = None) -> Manifest:
    """Writes the newest checkpoint of a run (or the one that is given) as a bundle to a new folder, which appears when it is
    complete. Training may go on meanwhile.

    since: an earlier bundle of the same run, which `out` is to lie beside: only what changed since is written, a delta.
    dtype: "bfloat16" halves the rows of tables in float32; predictions are then no longer those of the trainer to the bit.
    """
    with sealed.new_folder(out) as partial, sound(checkpoint_of(source)) as chain:
        settings, newest = need_declarations(chain), chain[0]
        earlier = None if since is None else manifests.chain(since)
        inits, features = settings.inits or {}, [Feature(**feature) for feature in settings.features or ()]
        tables = [
            _declared(entry, inits.get(entry["name"]), dtype, earlier[0] if earlier else None)
            for entry in newest.tables
        ]
        shutil.copyfile(newest.path / SAVED_DENSE, partial / DENSE)
        if earlier is None:
            stored = [_write_all(partial, table, SavedTable(chain, table.name)) for table in tables]
        else:
            _check_same(earlier[0], newest, tables, features)
            stored = [_write_changes(partial, table, SavedTable(chain, table.name), earlier) for table in tables]
        files = {}
        for path in sorted(partial.iterdir()):
            sealed.sync_file(path)
            files[path.name] = sealed.checksum(path)
        base = None if earlier is None else Base(earlier[0].path.resolve().name, earlier[0].crc, earlier[0].version)
        manifest = Manifest(
            partial, newest.step, settings.run, settings.config, settings.recipe, stored, features, files, base
        )
        manifests.write(manifest)
    return manifests.read(out)


def _declared(entry: Mapping[str, Any], init: Any, dtype: str | None, earlier: Manifest | None) -> StoredTable:
    """entry: what the checkpoint says of a table. A delta has its rows as the earlier bundle has them."""
    trained = DTYPES[entry["dtype"].removeprefix("torch.")]
    name, dim, admit_after = (entry[what] for what in ("name", "dim", "admit_after"))
    table = Table(name, dim, dtype=trained, init=init_of(init), admit_after=admit_after)
    before = [stored.dtype for stored in (earlier.tables if earlier else ()) if stored.name == name]
    stored_as = DTYPES[dtype] if dtype is not None else before[0] if before else trained
    return StoredTable(table, entry["seed"], torch.bfloat16 if trained == torch.bfloat16 else stored_as, keys=0)


def _check_same(earlier: Manifest, newest: Saved, tables: Sequence[StoredTable], features: Sequence[Feature]) -> None:
    """Raises ValueError unless a delta can build on the earlier bundle."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"{earlier.path} cannot be what a delta builds on: {reason}; export a full bundle instead")

    if earlier.run is None or earlier.run != newest.settings.run:
        raise refuse(f"it is of run {earlier.run}, {newest.path} of run {newest.settings.run}")
    if features != earlier.features:
        raise refuse("the features are others")
    names, names_before = ([stored.name for stored in some] for some in (tables, earlier.tables))
    if names != names_before:
        raise refuse(f"it has the tables {', '.join(names_before)}, {newest.path} has {', '.join(names)}")
    for stored, before in zip(tables, earlier.tables, strict=True):
        if dataclasses.replace(before, keys=0) != stored:
            raise refuse(f"its table {stored.name!r} was declared, or is stored, otherwise")


# -- a table's file ----------------------------------------------------------------------------------------------------


def _write_all(folder: Path, stored: StoredTable, saved: SavedTable) -> StoredTable:
    num_keys, num_shared = saved.counts()
    with _writer(folder, stored, Counts(num_keys, num_shared)) as file:
        slots, first, shared = _empty_slots(file), 0, [np.empty(0, np.int64)]
        for keys, values in _as_stored(saved.blocks(), stored):
            _place(slots, keys, first, saved)
            file.append("keys", keys)
            file.append("rows", values)
            first += len(keys)
        for ids, values in _as_stored(saved.shared_blocks(), stored):
            shared.append(ids)
            file.append("rows", values)
        _append_shared(file, np.concatenate(shared), num_keys, gone=shared[0])
    return dataclasses.replace(stored, keys=num_keys)


def _write_changes(folder: Path, stored: StoredTable, saved: SavedTable, earlier: Sequence[Manifest]) -> StoredTable:
    before = TableRows(
        earlier[0].table(stored.name), [Layer.open(one, one.table(stored.name)) for one in reversed(earlier)]
    )
    own, of_shards = (_as_stored(blocks, stored) for blocks in (saved.blocks(), saved.shared_blocks()))
    changes = changes_since(before, own, of_shards, folder / "values.spool")
    counts = Counts(len(changes.keys), len(changes.shared), len(changes.gone), len(changes.gone_shared))
    with _writer(folder, stored, counts) as file:
        slots = _empty_slots(file)
        _place(slots, changes.keys, 0, saved)
        place(slots, changes.gone, GONE, step=0)
        for values in changes.blocks(ROWS):
            file.append("rows", values)
        file.append("keys", changes.keys)
        _append_shared(file, changes.shared, counts.keys, gone=changes.gone_shared)
    changes.values.unlink()
    return dataclasses.replace(stored, keys=saved.counts()[0])


class Counts(NamedTuple):
    """Of what a table's file holds: keys and shards with a row, and those whose row in the base is gone."""

    keys: int
    shared: int
    gone: int = 0
    gone_shared: int = 0


def _writer(folder: Path, stored: StoredTable, counts: Counts) -> TensorWriter:
    kind = np.uint16 if stored.dtype == torch.bfloat16 else np.float32
    return TensorWriter(
        folder / stored.file,
        {
            "slots": (np.int64, (fewest_slots(counts.keys + counts.gone), 2)),
            "rows": (kind, (counts.keys + counts.shared, stored.table.dim)),
            "keys": (np.int64, (counts.keys,)),
            "shared": (np.int64, (counts.shared + counts.gone_shared,)),
            "shared_at": (np.int64, (counts.shared + counts.gone_shared,)),
        },
    )


def _empty_slots(file: TensorWriter) -> np.ndarray:
    """The index in the pages of the file: the system can write them out when memory is short."""
    slots = file.mapped("slots")
    for start in range(0, len(slots), BLOCK):
        slots[start : start + BLOCK, 1] = EMPTY
    return slots


def _append_shared(file: TensorWriter, ids: np.ndarray, first: int, *, gone: np.ndarray) -> None:
    """first: the position of the first shard's row."""
    every = np.concatenate([ids, gone])
    positions = np.concatenate([np.arange(first, first + len(ids)), np.full(len(gone), GONE, np.int64)])
    order = np.argsort(every)
    file.append("shared", every[order])
    file.append("shared_at", positions[order])


def _place(slots: np.ndarray, keys: np.ndarray, first: int, saved: SavedTable) -> None:
    try:
        place(slots, keys, first)
    except ValueError as error:
        raise Damaged(f"{saved.chain[0].path}, table {saved.name!r}: {error}; export another checkpoint") from None


def _as_stored(blocks: Iterable[Block], stored: StoredTable) -> Iterator[Block]:
    for keys, values in blocks:
        if stored.dtype == torch.bfloat16 and values.dtype == np.float32:
            yield keys, torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            yield keys, values

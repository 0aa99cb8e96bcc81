"""`nestpipe checkpoint inspect | verify | export`: what is in it, is it sound, and its rows for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import Manifest, table_file
from nestpipe.errors import did_you_mean
from nestpipe.files import whole
from nestpipe.tensorfile import TensorReader

ROWS = 1 << 16  # of a row group in Parquet


def inspect(path: Path) -> str:
    """The manifest in words; nothing but headers is read."""
    if not (path / manifests.MANIFEST).exists() and manifests.complete(path):
        return "\n".join(_line(checkpoint) for checkpoint in manifests.complete(path))
    newest = manifests.chain(path)[0]
    kind = "all rows" if newest.base is None else f"rows changed since {newest.base.name}, which it needs"
    lines = [
        f"{path}: step {newest.step}, saved by {newest.world} worker(s), {newest.num_bytes / 1e6:,.1f} MB, {kind}",
    ]
    for table in newest.tables:
        keys, records = _counts(newest, table["name"])
        held = f"{keys:,} keys" + ("" if records == keys else f", {records:,} records in it")
        lines.append(
            f"table {table['name']}: {held}, dim {table['dim']}, {table['dtype'].removeprefix('torch.')}, "
            f"{table['optimizer']}, {table['updates']:,} updates"
        )
    for section, entries in (newest.settings.config or {}).items():
        lines.append(
            f"config [{section}]: " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in entries.items())
        )
    lines.append(
        f"files: {len(newest.files)}, each with a checksum; `nestpipe checkpoint verify {path}` reads them all"
    )
    return "\n".join(lines)


def _line(path: Path) -> str:
    try:
        manifest = manifests.read(path)
    except manifests.Damaged as error:
        return f"{path.name}: {error}"
    kind = "full" if manifest.base is None else f"changes since {manifest.base.name}"
    return f"{path.name}: {manifest.num_bytes / 1e6:,.1f} MB, {kind}"


def _counts(manifest: Manifest, name: str) -> tuple[int, int]:
    keys = records = 0
    for worker in range(manifest.world):
        with TensorReader(manifest.path / table_file(name, worker, manifest.world)) as file:
            keys += file.shape("keys")[0]
            records += file.shape("records")[0]
    return keys, records


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, or with those in a folder; nothing: all is sound."""
    paths = [path] if (path / manifests.MANIFEST).exists() or not manifests.complete(path) else manifests.complete(path)
    return [problem for checkpoint in paths for problem in manifests.problems(checkpoint)]


def export(path: Path, table: str, out: Path) -> int:
    """The rows of a table as a Parquet file: key, and its values as a list of floats; returns how many."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chain = manifests.require_sound(path)
    declared = {entry["name"]: entry for entry in chain[0].tables}
    if table not in declared:
        raise ValueError(f"{path} has no table {table!r}, {did_you_mean(table, list(declared))}")
    dim, half = int(declared[table]["dim"]), declared[table]["dtype"] == "torch.bfloat16"
    schema = pa.schema([("key", pa.int64()), ("values", pa.list_(pa.float32(), dim))])
    rows = 0
    with whole(out) as partial, pq.ParquetWriter(partial, schema) as writer:
        for keys, records in _rows(chain, table):
            values = _values(records, dim, half)
            columns = [pa.array(keys), pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            rows += len(keys)
    return rows


def _values(records: np.ndarray, dim: int, half: bool) -> np.ndarray:
    """Values as float32, of records whose first words they are."""
    if not half:
        return np.ascontiguousarray(records[:, :dim])
    words = np.ascontiguousarray(records).view(np.uint16).reshape(len(records), -1)[:, :dim].astype(np.uint32)
    return (words << 16).view(np.float32)


def _rows(chain: list[Manifest], table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    newest = chain[0]
    changed, kept = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for file, keys in _files(newest, table):
        for start in range(0, file.shape(keys)[0], ROWS):
            some = file.read(keys, start, start + ROWS)
            if len(chain) > 1:
                changed.append(some)
            yield some, file.read("records", start, start + ROWS)
        if len(chain) > 1:
            kept.append(file.read("keys", 0, file.shape("keys")[0]))
    if len(chain) > 1:
        missing = np.setdiff1d(np.concatenate(kept), np.concatenate(changed))
        for file, keys in _files(chain[1], table):
            for start in range(0, file.shape(keys)[0], ROWS):
                some = file.read(keys, start, start + ROWS)
                wanted = np.isin(some, missing)
                if wanted.any():
                    yield some[wanted], file.read("records", start, start + ROWS)[wanted]


def _files(manifest: Manifest, table: str) -> Iterator[tuple[TensorReader, str]]:
    for worker in range(manifest.world):
        with TensorReader(manifest.path / table_file(table, worker, manifest.world)) as file:
            yield file, "changed" if file.has("changed") else "keys"

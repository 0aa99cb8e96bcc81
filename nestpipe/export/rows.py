"""The rows of a table for other programs: Parquet, or npy for nearest-neighbour indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.rows import SavedTable, widened
from nestpipe.errors import did_you_mean
from nestpipe.export.source import checkpoint_of, sound
from nestpipe.files import whole

Append = Callable[[np.ndarray, np.ndarray], None]  # keys and their values, float32


def export_rows(source: Path, out: Path, *, table: str | None = None, kind: str = "parquet") -> tuple[str, int]:
    """Writes the rows that keys of a table have of their own; returns the table and how many there are.

    kind: "parquet": columns `key` (int64) and `values` (a list of floats). "npy": `out` has the values, float32 [N, dim], and a
        file beside it the keys, int64 [N]: rows.npy and rows.keys.npy.
    table: may be left out if there is one only.
    """
    if kind not in WRITERS:
        raise ValueError(f"rows as {kind!r}, {did_you_mean(kind, list(WRITERS))}")
    path = checkpoint_of(source)
    # What is written gets its name when `writing` ends: after the checkpoint has been found to be sound.
    with contextlib.ExitStack() as writing, sound(path) as chain:
        names = [entry["name"] for entry in chain[0].tables]
        if table is None and len(names) != 1:
            raise ValueError(f"{path} has the tables {', '.join(names)}: say which one with --table")
        saved = SavedTable(chain, names[0] if table is None else table)
        rows, _ = saved.counts()
        append = writing.enter_context(WRITERS[kind](out, rows, saved.dim))
        for keys, values in saved.blocks():
            append(keys, widened(values))
    return saved.name, rows


@contextlib.contextmanager
def _parquet(out: Path, num_rows: int, dim: int) -> Iterator[Append]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("key", pa.int64()), ("values", pa.list_(pa.float32(), dim))])
    with whole(out) as partial, pq.ParquetWriter(partial, schema) as writer:

        def append(keys: np.ndarray, values: np.ndarray) -> None:
            columns = [pa.array(keys), pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))

        yield append


@contextlib.contextmanager
def _npy(out: Path, num_rows: int, dim: int) -> Iterator[Append]:
    if out.suffix != ".npy":
        raise ValueError(f"cannot write {out} as npy: choose a name that ends in .npy")
    keys_out = out.with_name(f"{out.stem}.keys.npy")
    with (
        whole(keys_out) as keys_partial,
        whole(out) as partial,
        keys_partial.open("wb") as keys_file,
        partial.open("wb") as file,
    ):
        for into, kind, shape in ((keys_file, np.int64, (num_rows,)), (file, np.float32, (num_rows, dim))):
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(into, header)

        def append(keys: np.ndarray, values: np.ndarray) -> None:
            keys_file.write(np.ascontiguousarray(keys).data)
            file.write(np.ascontiguousarray(values).data)

        yield append


WRITERS: dict[str, Callable[[Path, int, int], contextlib.AbstractContextManager[Append]]] = {
    "parquet": _parquet,
    "npy": _npy,
}

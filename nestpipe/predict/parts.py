"""Files of workers, put together in the order of the data."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.files import whole

GROUP = 1 << 16  # rows that are put together before they are written
NUMBER = b"number"  # of a batch in the data, beside its rows


def parts_into(parts: list[Path], out: Path, expected: int) -> None:
    """All batches in the order of the data, with the number of each row."""
    if not expected:
        raise ValueError("there is nothing to predict: the data has no samples there")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(pa.OSFile(str(part))) for part in parts if part.exists()]
        readers = [stack.enter_context(pa.ipc.open_stream(file)) for file in files]
        schemas = [reader.schema for reader in readers]
        odd = next((schema for schema in schemas if schema != schemas[0]), None)
        if odd is not None:
            raise ValueError(f"batches differ in what they give: {_in_words(schemas[0])} and {_in_words(odd)}")
        partial = stack.enter_context(whole(out))
        schema = pa.schema([("row", pa.int64()), *schemas[0]]) if schemas else pa.schema([])
        rows = 0
        with pq.ParquetWriter(partial, schema) as writer:
            for table in _grouped(heapq.merge(*map(_numbered, readers), key=lambda pair: pair[0])):
                writer.write_table(table.add_column(0, "row", pa.array(np.arange(rows, rows + len(table)))))
                rows += len(table)
        if rows != expected:
            raise ValueError(
                f"of {expected:,} rows {rows:,} are in {out.parent}: workers on other machines have written theirs elsewhere; "
                f"choose an --out in a folder that all workers see"
            )


def _numbered(reader: pa.ipc.RecordBatchStreamReader) -> Iterator[tuple[int, pa.RecordBatch]]:
    while True:
        try:
            records, beside = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield int(beside[NUMBER]), records


def _grouped(batches: Iterator[tuple[int, pa.RecordBatch]]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for _, records in batches:
        held.append(records)
        if sum(map(len, held)) >= GROUP:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)

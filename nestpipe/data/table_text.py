"""Blocks of delimited text -> typed columns, by Arrow; a bad row is named by file, line and value."""

from __future__ import annotations

import csv

import pyarrow as pa
import pyarrow.csv as pa_csv

from nestpipe.data.files import LineBlock, line_blocks, shown, wrong_columns

INTEGER, NUMBER = pa.int64(), pa.float64()


def read_header(path: str, *, needed: list[str]) -> list[str]:
    """The column names in the first line; ValueError if a needed one is not there."""
    first = next(iter(line_blocks([path], block_bytes=1)), None)
    if first is None:
        raise ValueError(f"{path} is empty; remove it from the list or write it again")
    try:
        names = next(csv.reader([first.text.decode("utf-8-sig", "replace").rstrip("\r\n")]), [])
    except csv.Error as error:
        raise ValueError(f"{path}, line 1: {shown(first.text)} is no header ({error}); write the file again") from None
    for name in needed:
        if name not in names:
            raise ValueError(
                f"{path}, line 1: no column {name!r} in the header {shown(first.text)}; give the column that you mean"
            )
    return names


def read_columns(block: LineBlock, *, names: list[str], types: dict[str, pa.DataType], delimiter: str) -> pa.Table:
    """The columns of `types`, all rows; the other columns are skipped. `names`: all columns of the file."""
    try:
        return pa_csv.read_csv(
            pa.BufferReader(block.text),
            read_options=pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block.text) + 1),
            # Empty lines must not vanish, or the line numbers after them would be wrong.
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, quote_char=False, ignore_empty_lines=False),
            # No nulls: an empty field where a key or a number should be is an error.
            convert_options=pa_csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise _bad_row(block, names, types, delimiter, error) from error


def _bad_row(
    block: LineBlock, names: list[str], types: dict[str, pa.DataType], delimiter: str, error: Exception
) -> ValueError:
    """Arrow does not say which line it could not convert, so look for it; this is slow and happens once."""
    for number, line in enumerate(block.text.split(b"\n")[:-1], start=block.first_line):
        fields = line.rstrip(b"\r").split(delimiter.encode())
        if len(fields) != len(names):
            return wrong_columns(block.path, number, len(fields), len(names))
        for name, field in zip(names, fields, strict=True):
            if name in types and not _converts(field, types[name]):
                kind = "an integer of 64 bits" if types[name] == INTEGER else "a number"
                return ValueError(
                    f"{block.path}, line {number}: {name} is {shown(field)}, not {kind}; correct or remove the row"
                )
    last = block.first_line + block.num_lines - 1
    return ValueError(f"{block.path}, lines {block.first_line} to {last}: {error}")


def _converts(field: bytes, kind: pa.DataType) -> bool:
    try:
        pa.array([field.decode()]).cast(kind)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return False
    return True

"""Blocks of delimited text -> typed columns, by Arrow; a bad row is named by file, line and value."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv as pa_csv

from nestpipe.data.files import LineBlock, line_blocks, shown, wrong_columns

INTEGER, NUMBER = pa.int64(), pa.float64()


def read_header(path: str, *, needed: list[str], delimiter: str = ",") -> list[str]:
    """The column names in the first line; ValueError if a needed one is not there."""
    first = next(iter(line_blocks([path], block_bytes=1)), None)
    if first is None:
        raise ValueError(f"{path} is empty; remove it from the list or write it again")
    try:
        line = first.text.decode("utf-8-sig", "replace").rstrip("\r\n")
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error as error:
        raise ValueError(f"{path}, line 1: {shown(first.text)} is no header ({error}); write the file again") from None
    for name in needed:
        if name not in names:
            raise ValueError(
                f"{path}, line 1: no column {name!r} in the header {shown(first.text)}; give the column that you mean"
            )
    return names


def read_columns(
    block: LineBlock,
    *,
    names: list[str],
    types: dict[str, pa.DataType],
    delimiter: str,
    quoted: bool = False,
    missing: Sequence[str] = (),
) -> pa.Table:
    """The columns of `types`, all rows; the other columns are skipped. `names`: all columns of the file.

    quoted: fields may stand in double quotes. missing: fields that are null; others, where a number should be, are an error.
    """
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(block.text),
            read_options=pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block.text) + 1),
            # Empty lines must not vanish, or the line numbers after them would be wrong.
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter, quote_char='"' if quoted else False, ignore_empty_lines=False
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=list(missing),
                strings_can_be_null=bool(missing),
            ),
        )
    except pa.ArrowInvalid as error:
        raise _bad_row(block, names, types, delimiter, quoted, missing, error) from error
    if table.num_rows != block.num_lines:
        raise _broken_field(block)
    if len(names) > 1 and (row := _empty_line(block.text)) is not None:  # which Arrow takes for a row of nothing
        raise wrong_columns(block.path, block.first_line + row, 1, len(names))
    return table


def _empty_line(text: bytes) -> int | None:
    """The first line with nothing in it, counted from 0. (A carriage return elsewhere is a line of its own to Arrow.)"""
    starts = [0] if text.startswith((b"\n", b"\r\n")) else []
    starts += [where + 1 for where in (text.find(b"\n\n"), text.find(b"\n\r\n")) if where >= 0]
    return text.count(b"\n", 0, min(starts)) if starts else None


def _broken_field(block: LineBlock) -> ValueError:
    """A quoted field that goes on in the next line, or lines that end without a newline: rows could no longer be counted by
    lines."""
    lines = block.text.split(b"\n")
    row = next((row for row, line in enumerate(lines) if line.count(b'"') % 2), None)
    if row is None:
        row = next((row for row, line in enumerate(lines) if _has_return(line)), 0)
        return _stray_return(block.path, block.first_line + row, lines[row])
    return ValueError(
        f"{block.path}, line {block.first_line + row}: {shown(lines[row])} has a quote that does not end in its line; a field "
        f"must not hold line breaks: write the file without them, or as Parquet; or set quoted = false if quotes are text"
    )


def _has_return(line: bytes) -> bool:
    return b"\r" in line.removesuffix(b"\r")


def _stray_return(path: str, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path}, line {number}: {shown(line)} has a carriage return in it; end lines with a newline alone"
    )


def _bad_row(
    block: LineBlock,
    names: list[str],
    types: dict[str, pa.DataType],
    delimiter: str,
    quoted: bool,
    missing: Sequence[str],
    error: Exception,
) -> ValueError:
    """Arrow does not say which line it could not convert, so look for it; this is slow and happens once."""
    for number, line in enumerate(block.text.split(b"\n")[:-1], start=block.first_line):
        fields = _split(line.rstrip(b"\r"), delimiter, quoted)
        if len(fields) != len(names):
            if quoted and line.count(b'"') % 2:
                return _broken_field(block)
            return wrong_columns(block.path, number, len(fields), len(names))
        if _has_return(line):
            return _stray_return(block.path, number, line)
        for name, field in zip(names, fields, strict=True):
            if name in types and field.decode("latin-1") not in missing and not _converts(field, types[name]):
                kind = "an integer of 64 bits" if types[name] == INTEGER else "a number"
                return ValueError(
                    f"{block.path}, line {number}: {name} is {shown(field)}, not {kind}; correct or remove the row"
                )
    last = block.first_line + block.num_lines - 1
    return ValueError(f"{block.path}, lines {block.first_line} to {last}: {error}")


def _split(line: bytes, delimiter: str, quoted: bool) -> list[bytes]:
    if not quoted or b'"' not in line:
        return line.split(delimiter.encode())
    # Latin-1, in which every byte is a character.
    return [field.encode("latin-1") for field in next(csv.reader([line.decode("latin-1")], delimiter=delimiter), [])]


def _converts(field: bytes, kind: pa.DataType) -> bool:
    if pa.types.is_binary(kind):
        return True
    try:
        pa.array([field.decode()]).cast(kind)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return False
    return True

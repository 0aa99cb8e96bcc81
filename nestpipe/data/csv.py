"""CSV: delimited text, with or without a header; keys are strings unless declared otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.columns import Columns, Origin
from nestpipe.data.files import LineBlock, SplitFiles, find_text_files
from nestpipe.data.stream import Unparsed
from nestpipe.data.table_text import INTEGER, NUMBER, read_columns, read_header
from nestpipe.data.tabular import Tabular
from nestpipe.errors import did_you_mean


class CSV(Tabular):
    """Key features and `dense["dense"]` [B, n] from delimited text. Keys are hashes of the text as it stands ("7" and "07" are
    two), but for those of `integers`.

    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    columns: the names of all columns, if the files have no header; else the first line of each has them.
    delimiter: one character; "\\t" for tabs.
    missing: what a field may hold that stands for nothing; an empty field by default.
    quoted: whether fields may stand in double quotes, which then are not part of them. No field may hold a line break.
    integers: the key columns whose integers are the keys themselves, of 64 bits.
    valid, test: files of their own; without them a tenth of the lines each is held out, by a hash of the line number.
    shuffle_buffer: how many training rows are held to be mixed, while files come in another order at every epoch; 0 keeps the
        order of the rows, and of the files by name.

    keys, dense, label, binary_label, buckets, crosses, log1p, fill: as those of `nestpipe.data.Parquet`.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        keys: list[str] | dict[str, str],
        dense: list[str] | None = None,
        label: str | None = None,
        binary_label: bool = True,
        columns: list[str] | None = None,
        delimiter: str = ",",
        missing: list[str] | None = None,
        quoted: bool = True,
        integers: list[str] | None = None,
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        shuffle_buffer: int = 65_536,
        block_bytes: int = 1 << 18,
        buckets: dict[str, dict[str, Any]] | None = None,
        crosses: dict[str, list[str]] | None = None,
        log1p: list[str] | None = None,
        fill: float | None = None,
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), block_bytes=(block_bytes, 1))
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise ValueError(f"delimiter is {delimiter!r}; it must be one character, such as ',' or '\\t'")
        mapping = Columns.declared(
            keys=keys,
            dense=dense,
            label=label,
            binary_label=binary_label,
            buckets=buckets,
            crosses=crosses,
            log1p=log1p,
            fill=fill,
            integers=integers or [],
        )
        super().__init__(
            mapping, SplitFiles.named(path, valid, test, find=find_text_files), shuffle_buffer=shuffle_buffer
        )
        self._has_header, self._block_bytes = columns is None, block_bytes
        self._delimiter, self._quoted = delimiter, quoted
        self._missing = tuple([""] if missing is None else missing)
        self._headers: dict[str, list[str]] = {}
        for file in dict.fromkeys(file for split in dataset.SPLITS for file in self._files.files(split)):
            names = read_header(file, needed=mapping.names, delimiter=delimiter) if columns is None else columns
            self._headers[file] = _checked(names, mapping.names, f"{file}, line 1" if columns is None else "columns")
        self._fit()

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        blocks = self._files.blocks(
            split,
            rank=rank,
            world=world,
            seed=seed,
            epoch=epoch,
            shuffled=self._shuffle_buffer > 0,
            block_bytes=self._block_bytes,
            skip_lines=int(self._has_header),
        )
        for block in blocks:
            kept = self._files.mask(split, first=block.first_line, count=block.num_lines)
            yield Unparsed(int(kept.sum()), partial(self._piece, block, kept))

    def _piece(self, block: LineBlock, kept: np.ndarray) -> Batch:
        """Checks all lines, gives those that are kept."""
        table = read_columns(
            block,
            names=self._headers[block.path],
            types=self._types(),
            delimiter=self._delimiter,
            quoted=self._quoted,
            missing=self._missing,
        )
        return self._kept(self._mapping.batch(table, Origin(block.path, block.first_line, "line")), kept)

    def _types(self) -> dict[str, pa.DataType]:
        """Text stays bytes, of any encoding. A column of text that is also a number is read as text, and converted later."""
        types = {name: NUMBER for name in self._mapping.number_names}
        for name in self._mapping.keys.values():
            types[name] = INTEGER if name in (self._mapping.integers or ()) else pa.binary()
        return types


def _checked(names: list[str], needed: list[str], where: str) -> list[str]:
    for name in needed:
        if name not in names:
            raise ValueError(f"{where}: column {name!r}, {did_you_mean(name, names)}")
        if names.count(name) > 1:
            raise ValueError(f"{where}: {names.count(name)} columns are named {name!r}; give each a name of its own")
    return names

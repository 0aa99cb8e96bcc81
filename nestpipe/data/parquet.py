"""Parquet: any columns as keys, dense inputs and label, streamed by row group through Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.columns import Columns, Origin, Rows
from nestpipe.data.files import SplitFiles, find_files
from nestpipe.data.remote import arrow_input, is_url
from nestpipe.data.stream import Unparsed
from nestpipe.data.tabular import Tabular


class Parquet(Tabular):
    """Key features from columns of integers or strings, or of lists of either, `dense["dense"]` [B, n] from number columns.

    path: a path, a glob pattern or a list of them, here or at a URL (s3://, gs://, hdfs:// or any other that fsspec opens).
    keys: the key columns, each a feature of the same name; or a table of feature = column. Integers are keys as they are,
        strings are hashed (see `nestpipe.hash_strings`), those of a dictionary once.
    dense: the number columns, in the order in which they go into `dense["dense"]`; none by default.
    label: the label column; without it batches have no labels. `binary_label`: only 0 and 1 are accepted.
    valid, test: files of their own; without them a tenth of the rows each is held out, by a hash of the row's number in
        its file.
    shuffle_buffer: how many training rows are held to be mixed; 0 leaves the order inside a row group. The order of the
        row groups is shuffled in any case.
    buckets: more features, from numbers: {feature = {column = ..., quantiles = 20}}, see `nestpipe.data.Bucket`.
    crosses: more features, from others: {feature = [feature, feature, ...]}, one key for each combination.
    log1p: those of `dense` that are given as log(1 + x), 0 for negative ones.
    fill: what a missing or NaN dense number counts as. Without it, it stays NaN, which the trainer refuses or skips, as it is
        told to.
    integers: the key columns that hold integers; the files say so themselves. Given, files must agree.

    A missing key is an empty list; a bucket of nothing and a cross with a part missing are, too.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        keys: list[str] | dict[str, str],
        dense: list[str] | None = None,
        label: str | None = None,
        binary_label: bool = True,
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        shuffle_buffer: int = 65_536,
        rows_per_read: int = 8_192,
        buckets: dict[str, dict[str, Any]] | None = None,
        crosses: dict[str, list[str]] | None = None,
        log1p: list[str] | None = None,
        fill: float | None = None,
        integers: list[str] | None = None,
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), rows_per_read=(rows_per_read, 1))
        columns = Columns.declared(
            keys=keys,
            dense=dense,
            label=label,
            binary_label=binary_label,
            buckets=buckets,
            crosses=crosses,
            log1p=log1p,
            fill=fill,
            integers=integers,
        )
        super().__init__(columns, SplitFiles.named(path, valid, test, find=find_files), shuffle_buffer=shuffle_buffer)
        self._rows_per_read = rows_per_read
        self._group_sizes: dict[str, list[int]] = {}  # rows of each row group, by file
        schemas = {}
        for file in dict.fromkeys(file for split in dataset.SPLITS for file in self._files.files(split)):
            with _open(file) as parquet:
                schemas[file] = parquet.schema_arrow
                groups = range(parquet.num_row_groups)
                self._group_sizes[file] = [parquet.metadata.row_group(number).num_rows for number in groups]
        self._mapping = self._mapping.with_integers_of(schemas)
        self._fit()

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        """None is read before it is parsed: what a run passes over that goes on from the middle is not."""
        groups: list[tuple[str, int, int]] = []
        for file in self._files.files(split):
            first_rows = np.cumsum([0, *self._group_sizes[file]]).tolist()
            groups += [(file, number, first_row) for number, first_row in enumerate(first_rows[:-1])]
        if split == "train":  # the same order on every rank, so that each group has one taker
            groups = [groups[where] for where in dataset.generator(seed, epoch).permutation(len(groups))]
        # With fewer groups than ranks some ranks would have nothing: then deal out parts of groups instead.
        by_group = len(groups) >= world
        turn = 0
        for file, number, first_row in groups[rank::world] if by_group else groups:
            group = RowGroup(file, number, self._columns, self._rows_per_read)
            last_row = first_row + self._group_sizes[file][number]
            for part, row in enumerate(range(first_row, last_row, self._rows_per_read)):
                if by_group or turn % world == rank:
                    kept = self._files.mask(split, first=row, count=min(self._rows_per_read, last_row - row))
                    yield Unparsed(int(kept.sum()), partial(self._read_piece, group, part, kept, file, row))
                turn += 1

    def _read_piece(self, group: RowGroup, part: int, kept: np.ndarray, file: str, first_row: int) -> Batch:
        return self._piece(group.read(part, len(kept)), kept, file, first_row)

    def _piece(self, records: Rows, kept: np.ndarray, file: str, first_row: int) -> Batch:
        """Checks all rows, gives those that are kept."""
        return self._kept(self._mapping.batch(records, Origin(file, first_row)), kept)


class RowGroup:
    """The columns of a row group in parts of so many rows, each read when it is asked for. Parts are decoded in their order: who
    asks for an earlier one again begins at the group's front."""

    def __init__(self, file: str, number: int, columns: list[str], rows_per_read: int) -> None:
        self._file, self._number, self._columns, self._rows_per_read = file, number, columns, rows_per_read
        self._parts: Iterator[Rows] = iter(())
        self._next = 0  # the part that comes next
        self._last: Rows | None = None  # the one before it

    def read(self, part: int, num_rows: int) -> Rows:
        if self._last is None or part < self._next - 1:
            self._parts, self._next = self._from_front(), 0
        while self._next <= part:
            self._last = next(self._parts, None)
            self._next += 1
        if self._last is None or self._last.num_rows != num_rows:
            raise ValueError(
                f"{self._file}, row group {self._number}: it has other rows than when the run began; put the file back that was "
                f"there, or start a new run"
            )
        return self._last

    def _from_front(self) -> Iterator[Rows]:
        try:
            with _open(self._file) as parquet:
                yield from _recut(
                    parquet.iter_batches(
                        batch_size=self._rows_per_read,
                        row_groups=[self._number],
                        columns=self._columns,
                        use_threads=False,
                    ),
                    self._rows_per_read,
                )
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable(f"{self._file}, row group {self._number}", error, self._file) from error


def _recut(parts: Iterator[pa.RecordBatch], num_rows: int) -> Iterator[Rows]:
    """Arrow may give fewer rows at a time than it is asked for."""
    held: list[pa.RecordBatch] = []
    for records in parts:
        held.append(records)
        if sum(part.num_rows for part in held) < num_rows:
            continue
        table = records if len(held) == 1 else pa.Table.from_batches(held)
        yield table.slice(0, num_rows)
        held = [part for part in [records.slice(records.num_rows - (table.num_rows - num_rows))] if part.num_rows]
    if held:
        yield held[0] if len(held) == 1 else pa.Table.from_batches(held)


def _open(file: str) -> pq.ParquetFile:
    try:
        # At a URL, all columns of a row group in few requests rather than each column in many.
        return pq.ParquetFile(arrow_input(file), pre_buffer=is_url(file))
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(f"{file} is not a whole Parquet file", error, file) from error


def _unreadable(what: str, error: Exception, file: str) -> ValueError:
    remedy = "write it again, or, if it is sound, look at the connection" if is_url(file) else "write it again"
    return ValueError(f"{what} ({error}); {remedy}")

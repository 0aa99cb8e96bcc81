"""Parquet: any columns as keys, dense inputs and label, streamed by row group through Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.files import SplitFiles, find_files
from nestpipe.data.stream import Streamed, Unparsed


class Parquet(Streamed):
    """Key features from integer columns or columns of lists of integers, `dense["dense"]` [B, n] from number columns.

    path: a path, a glob pattern or a list of them.
    keys: the key columns, each a feature of the same name; or a table of feature = column.
    dense: the number columns, in the order in which they go into `dense["dense"]`; none by default.
    label: the label column; without it batches have no labels. `binary_label`: only 0 and 1 are accepted.
    valid, test: files of their own; without them a tenth of the rows each is held out, by a hash of the row's number in
        its file.
    shuffle_buffer: how many training rows are held to be mixed; 0 leaves the order inside a row group. The order of the
        row groups is shuffled in any case.

    A missing key is an empty list. A missing or NaN number stays NaN, which the trainer refuses or skips, as it is told
    to.
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
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), rows_per_read=(rows_per_read, 1))
        super().__init__(shuffle_buffer=shuffle_buffer)
        self._keys = dict(keys) if isinstance(keys, dict) else {name: name for name in keys}
        if not self._keys:
            raise ValueError("keys names no column; name at least one key column")
        self.features = tuple(self._keys)
        self._dense, self._label, self._binary_label = list(dense or []), label, binary_label
        self._columns = list(dict.fromkeys([*self._keys.values(), *self._dense, *([label] if label else [])]))
        self._files = SplitFiles.named(path, valid, test, find=find_files)
        self._rows_per_read = rows_per_read
        for file in {file for split in dataset.SPLITS for file in self._files.files(split)}:
            self._check_schema(file)

    def _check_schema(self, file: str) -> None:
        with _open(file) as parquet:
            schema = parquet.schema_arrow
        for column in self._columns:
            if column not in schema.names:
                raise ValueError(f"{file}: no column {column!r}; it has {', '.join(schema.names)}")
            kind = schema.field(column).type
            if column in self._keys.values() and not pa.types.is_integer(_item_type(kind)):
                raise ValueError(
                    f"{file}: key column {column!r} is {kind}; keys are integers or lists of integers: "
                    f"hash or number them first"
                )
            if column in (*self._dense, self._label) and not (
                pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            ):
                raise ValueError(
                    f"{file}: column {column!r} is {kind}, not a number; cast it, or drop it from dense and label"
                )

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        groups: list[tuple[str, int, int]] = []
        for file in self._files.files(split):
            with _open(file) as parquet:
                first_row = 0
                for number in range(parquet.num_row_groups):
                    groups.append((file, number, first_row))
                    first_row += parquet.metadata.row_group(number).num_rows
        if split == "train":  # the same order on every rank, so that each group has one taker
            groups = [groups[where] for where in dataset.generator(seed, epoch).permutation(len(groups))]
        # With fewer groups than ranks some ranks would have nothing: then deal out parts of groups instead.
        by_group = len(groups) >= world
        part = 0
        for file, number, row in groups[rank::world] if by_group else groups:
            with _open(file) as parquet:
                for records in self._records(parquet, file, number):
                    if by_group or part % world == rank:
                        kept = self._files.mask(split, first=row, count=records.num_rows)
                        yield Unparsed(int(kept.sum()), partial(self._piece, records, kept, file, row))
                    row += records.num_rows
                    part += 1

    def _records(self, parquet: pq.ParquetFile, file: str, group: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from parquet.iter_batches(
                batch_size=self._rows_per_read, row_groups=[group], columns=self._columns, use_threads=False
            )
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file}, row group {group}: {error}; write the file again") from error

    def _piece(self, records: pa.RecordBatch, kept: np.ndarray, file: str, first_row: int) -> Batch:
        """Checks all rows, gives those that are kept."""
        parts = {name: _keys_of(records.column(column), column, file, first_row) for name, column in self._keys.items()}
        dense: dict[str, torch.Tensor | Jagged] = {}
        if self._dense:
            numbers = [_numbers_of(records.column(column)) for column in self._dense]
            dense["dense"] = torch.from_numpy(np.stack(numbers, axis=1))
        labels = None
        if self._label:
            values = _numbers_of(records.column(self._label))
            bad = np.flatnonzero((values != 0) & (values != 1))
            if self._binary_label and len(bad):
                raise ValueError(
                    f"{file}, row {first_row + bad[0]}: {self._label} is {values[bad[0]]:g}, not 0 or 1; "
                    f"correct the row, or set binary_label = false"
                )
            labels = torch.from_numpy(values)
        return Batch(parts, dense, labels).select(torch.from_numpy(np.flatnonzero(kept)))


def _open(file: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} is not a whole Parquet file ({error}); write it again") from error


def _item_type(kind: pa.DataType) -> pa.DataType:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def _keys_of(column: pa.Array, name: str, file: str, first_row: int) -> Jagged:
    if column.type == _item_type(column.type):
        values, lengths = column.drop_null(), column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        values, lengths = (
            column.flatten(),
            column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64),
        )
        if values.null_count:
            place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            raise ValueError(f"{file}, row {row}: the list in {name} holds a null; remove it from the list")
    try:
        keys = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{file}, rows {first_row} to {first_row + len(column) - 1}, {name}: {error}; keys have 64 bits, signed"
        ) from error
    return Jagged.from_lengths(torch.from_numpy(keys.copy()), torch.from_numpy(lengths))


def _numbers_of(column: pa.Array) -> np.ndarray:
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float32)

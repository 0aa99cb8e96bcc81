"""Rows of any program as batches: of a Hugging Face data set, of torchdata, of a database."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from nestpipe.batch import Batch
from nestpipe.data.columns import Columns, Origin
from nestpipe.data.dataset import check_at_least
from nestpipe.strings import is_list


class Collate:
    """Makes one Batch of rows: a list of dicts, or an Arrow table. It is what a DataLoader takes as `collate_fn`.

    keys: the names of columns of integers or strings, or lists of either, each a feature of the same name; or a table of
        feature = column. Strings are hashed (`nestpipe.hash_strings`).
    dense: the columns of numbers that go into `dense["dense"]`. label: that of the label; `binary_label`: only 0 and 1.
    """

    def __init__(
        self,
        *,
        keys: list[str] | dict[str, str],
        dense: list[str] | None = None,
        label: str | None = None,
        binary_label: bool = True,
    ) -> None:
        self._columns = Columns.declared(keys=keys, dense=dense, label=label, binary_label=binary_label)
        self._integers: dict[str, bool] = {}  # of each key column whether it holds integers, once that is seen

    def __call__(self, rows: Sequence[Mapping[str, Any]] | pa.Table | pa.RecordBatch) -> Batch:
        if not isinstance(rows, pa.Table | pa.RecordBatch):
            rows = pa.table({name: self._column(name, rows) for name in self._columns.names})
        columns = self._columns.with_integers_of({"the rows": rows.schema})
        assert columns.integers is not None
        for name in self._columns.keys.values():
            kind = rows.schema.field(name).type
            if pa.types.is_null(kind.value_type if is_list(kind) else kind):
                continue  # nothing in it
            if self._integers.setdefault(name, name in columns.integers) != (name in columns.integers):
                raise ValueError(
                    f"the rows: {name!r} is {kind} here and was not before; give integers or strings, not both"
                )
        return columns.batch(rows, Origin("the rows"))

    def _column(self, name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
        try:
            return pa.array([row[name] for row in rows])
        except KeyError:
            has = next(row for row in rows if name not in row)
            raise ValueError(f"a row has no {name!r}; it has {', '.join(map(str, has))}") from None
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"the rows: {name!r} cannot be a column ({error}); give values of one type") from error


def from_rows(
    rows: Iterable[Any],
    *,
    batch_size: int,
    keys: list[str] | dict[str, str],
    dense: list[str] | None = None,
    label: str | None = None,
    binary_label: bool = True,
) -> RowBatches:
    """Batches of any rows that can be gone through: dicts, of which `batch_size` make a batch (the last may be smaller), or Arrow
    tables, each a batch of its own.

    `from_rows(datasets.load_dataset("org/name", split="train", streaming=True), batch_size=1024, keys=["user", "item"],
    label="click")`. Where the rows have `state_dict()` and `load_state_dict()`, as those of a Hugging Face IterableDataset and of
    torchdata's nodes do, so do the batches: a checkpoint then holds where they stand (`Trainer.data_state`).

    keys, dense, label, binary_label: see Collate. Each worker gives its own rows.
    """
    check_at_least(batch_size=(batch_size, 1))
    collate = Collate(keys=keys, dense=dense, label=label, binary_label=binary_label)
    return RowBatches(rows, batch_size, collate)


class RowBatches(Iterable[Batch]):
    """See `from_rows`. It can be gone through as often as the rows can."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]

    def __init__(self, rows: Iterable[Any], batch_size: int, collate: Collate) -> None:
        self._rows, self._batch_size, self._collate = rows, batch_size, collate
        if hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict"):
            # No row is taken before its batch is asked for: what the rows say is where the last batch ends.
            self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

    def __iter__(self) -> Iterator[Batch]:
        rows = iter(self._rows)
        for first in rows:
            if isinstance(first, pa.Table | pa.RecordBatch):
                yield self._collate(first)
            elif isinstance(first, Mapping):
                yield self._collate([first, *itertools.islice(rows, self._batch_size - 1)])
            else:
                raise ValueError(f"the rows are {type(first).__name__}s; give dicts, or Arrow tables")

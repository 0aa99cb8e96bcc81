"""Columns: which columns of a table are keys, inputs and labels, and the batch that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.data.transforms import Bucket, crossed, log1p
from nestpipe.errors import did_you_mean
from nestpipe.strings import NullInList, flattened, hash_strings, is_list, is_text

Rows: TypeAlias = "pa.RecordBatch | pa.Table"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where rows come from, for messages. first: the number of the first of them, in this unit."""

    file: str = "the table"
    first: int = 0
    unit: str = "row"

    def at(self, row: int) -> str:
        return f"{self.file}, {self.unit} {self.first + row}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """From an Arrow table to a Batch, as training reads its files: `bundle.columns.batch(pa.table({...}))` is what
    `bundle.predict` takes.

    The arguments are those of `nestpipe.data.Parquet`. integers: the key columns whose integers are the keys; strings are
    hashed in all others. None: not known yet.
    """

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dense: tuple[str, ...] = ()
    label: str | None = None
    binary_label: bool = True
    buckets: Mapping[str, Bucket] = dataclasses.field(default_factory=dict)
    crosses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    log1p: tuple[str, ...] = ()
    fill: float | None = None
    integers: tuple[str, ...] | None = None
    precision: Any = np.float32  # of dense inputs

    @classmethod
    def declared(
        cls,
        *,
        keys: list[str] | dict[str, str],
        dense: list[str] | None = None,
        label: str | None = None,
        binary_label: bool = True,
        buckets: Mapping[str, Mapping[str, Any]] | None = None,
        crosses: Mapping[str, list[str]] | None = None,
        log1p: list[str] | None = None,
        fill: float | None = None,
        integers: list[str] | None = None,
    ) -> Columns:
        """As a config has it; ValueError for what does not fit together."""
        columns = cls(
            keys=dict(keys) if isinstance(keys, dict) else {name: name for name in keys},
            dense=tuple(dense or ()),
            label=label,
            binary_label=binary_label,
            buckets={name: Bucket.declared(name, entries) for name, entries in (buckets or {}).items()},
            crosses={name: tuple(parts) for name, parts in (crosses or {}).items()},
            log1p=tuple(log1p or ()),
            fill=fill,
            integers=None if integers is None else tuple(integers),
        )
        columns._check()
        return columns

    def _check(self) -> None:
        if not self.features:
            raise ValueError("keys names no column; name at least one key column")
        for name in self.features:
            if self.features.count(name) > 1:
                raise ValueError(f"two of keys, buckets and crosses are named {name!r}; give one of them another name")
        single = (*self.keys, *self.buckets)
        for name, parts in self.crosses.items():
            if len(parts) < 2 or len(set(parts)) < len(parts):
                raise ValueError(f"crosses.{name} is {list(parts)}; name two or more different features")
            for part in parts:
                if part not in single:
                    raise ValueError(f"crosses.{name}: {part!r} of keys and buckets, {did_you_mean(part, single)}")
        for what, names, known in (
            ("log1p", self.log1p, self.dense),
            ("integers", self.integers or (), tuple(dict.fromkeys(self.keys.values()))),
        ):
            for name in names:
                if name not in known:
                    of = "dense" if what == "log1p" else "the key columns"
                    raise ValueError(f"{what}: {name!r} of {of}, {did_you_mean(name, known)}")

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.keys, *self.buckets, *self.crosses)

    @property
    def names(self) -> list[str]:
        """All columns that are read, each once."""
        return list(dict.fromkeys([*self.keys.values(), *self.number_names]))

    @property
    def number_names(self) -> list[str]:
        buckets = [bucket.column for bucket in self.buckets.values()]
        return list(dict.fromkeys([*self.dense, *buckets, *([self.label] if self.label else [])]))

    # -- what is learned from files ------------------------------------------------------------------------------------

    def with_integers_of(self, schemas: Mapping[str, pa.Schema]) -> Columns:
        """Which key columns hold integers, as these files have them. ValueError for columns that a file does not have or that
        fit no use, and for files that disagree. One in which a column holds nulls only agrees with all."""
        holds = {} if self.integers is None else {name: name in self.integers for name in self.keys.values()}
        for file, schema in schemas.items():
            self._check_file(schema, file)
            for column in dict.fromkeys(self.keys.values()):
                kind = schema.field(column).type
                integers = _are_integers(kind, column, file)
                if integers is not None and holds.setdefault(column, integers) != integers:
                    one, other = ("strings", "integers") if integers else ("integers", "strings")
                    raise ValueError(
                        f"{file}: key column {column!r} is {kind}, and holds {one} in other files, or as `integers` says: the "
                        f"{other} here would be other keys; write it as {one}"
                    )
        found = tuple(name for name in dict.fromkeys(self.keys.values()) if holds.get(name))
        return dataclasses.replace(self, integers=found) if self.integers is None else self

    def _check_file(self, schema: pa.Schema, file: str) -> None:
        for column in self.names:
            if column not in schema.names:
                raise ValueError(f"{file}: no column {column!r}; it has {', '.join(schema.names)}")
            kind = schema.field(column).type
            if column in self.number_names and not _is_number(kind):
                raise ValueError(
                    f"{file}: column {column!r} is {kind}, not a number; cast it, or drop it from dense, buckets and label"
                )
        for name, parts in self.crosses.items():
            for part in parts:
                if part in self.keys and is_list(schema.field(self.keys[part]).type):
                    raise ValueError(
                        f"{file}: column {self.keys[part]!r} holds lists, of which crosses.{name} can make no single key"
                    )

    @property
    def unfitted(self) -> dict[str, str]:
        """Columns of the buckets whose quantiles are not computed yet, by bucket."""
        return {name: bucket.column for name, bucket in self.buckets.items() if not bucket.is_fitted}

    def fitted(self, sample: Mapping[str, np.ndarray]) -> Columns:
        """sample: for each bucket of `unfitted` numbers of its column."""
        buckets = {name: self.buckets[name].fitted(numbers) for name, numbers in sample.items()}
        return dataclasses.replace(self, buckets={**self.buckets, **buckets})

    # -- rows ----------------------------------------------------------------------------------------------------------

    def batch(self, rows: Rows, origin: Origin | None = None) -> Batch:
        """All rows as one batch. ValueError that names the row for what cannot be one."""
        origin = origin or Origin()
        for name in self.names:
            if name not in rows.schema.names:
                raise ValueError(f"{origin.file}: column {name!r}, {did_you_mean(name, rows.schema.names)}")
        numbers = {name: _numbers_of(_column(rows, name), name, origin) for name in self.number_names}
        keys = {name: self._keys_of(_column(rows, column), column, origin) for name, column in self.keys.items()}
        for name, bucket in self.buckets.items():
            try:
                values, present = bucket.keys(numbers[bucket.column])
            except ValueError as error:
                raise ValueError(f"{origin.file}, buckets.{name}: {error}") from error
            keys[name] = _jagged(values, present)
        for name, parts in self.crosses.items():
            keys[name] = _cross([keys[part] for part in parts], f"{origin.file}, crosses.{name}")
        dense: dict[str, torch.Tensor | Jagged] = {}
        if self.dense:
            dense["dense"] = torch.from_numpy(np.stack([self._input(name, numbers[name]) for name in self.dense], 1))
        return Batch(keys, dense, None if self.label is None else self._labels(numbers[self.label], origin))

    def _keys_of(self, column: pa.Array, name: str, origin: Origin) -> Jagged:
        try:
            values, lengths = flattened(column)
        except NullInList as error:
            raise ValueError(
                f"{origin.at(error.row)}: the list in {name} holds a null; remove it from the list"
            ) from None
        assert self.integers is not None, "the schema of a file, or the config, says it"
        if name not in self.integers:
            if not (is_text(values.type) or pa.types.is_null(values.type)):
                raise ValueError(f"{origin.file}: {name} is {column.type}; it holds strings in the training data")
            return _jagged(hash_strings(values), lengths)
        if is_text(values.type):
            raise ValueError(f"{origin.file}: {name} is {column.type}; it holds integers in the training data")
        try:
            keys = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            last = origin.first + len(column) - 1
            raise ValueError(
                f"{origin.file}, {origin.unit}s {origin.first} to {last}, {name}: {error}; keys have 64 bits, signed"
            ) from error
        return _jagged(keys.copy(), lengths)

    def _input(self, name: str, numbers: np.ndarray) -> np.ndarray:
        if self.fill is not None:
            numbers = np.where(np.isnan(numbers), self.fill, numbers)
        return (log1p(numbers) if name in self.log1p else numbers).astype(self.precision)

    def _labels(self, values: np.ndarray, origin: Origin) -> torch.Tensor:
        bad = np.flatnonzero((values != 0) & (values != 1))
        if self.binary_label and len(bad):
            raise ValueError(
                f"{origin.at(bad[0])}: {self.label} is {values[bad[0]]:g}, not 0 or 1; "
                f"correct the row, or set binary_label = false"
            )
        return torch.from_numpy(values.astype(np.float32))


def _column(rows: Rows, name: str) -> pa.Array:
    column = rows.column(name)
    return column.unify_dictionaries().combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _are_integers(kind: pa.DataType, column: str, file: str) -> bool | None:
    """Whether keys of this type are integers, or strings; None if there are none of them."""
    item = kind.value_type if is_list(kind) else kind
    item = item.value_type if pa.types.is_dictionary(item) else item
    if pa.types.is_null(item):
        return None
    if not (pa.types.is_integer(item) or is_text(item)):
        raise ValueError(
            f"{file}: key column {column!r} is {kind}; keys are integers, strings or lists of them: cast it, or make buckets "
            f"of it"
        )
    return pa.types.is_integer(item)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


def _numbers_of(column: pa.Array, name: str, origin: Origin) -> np.ndarray:
    """float64, NaN for a missing one. Text of a column that is also a key is read as a number."""
    try:
        text = column.cast(pa.string()) if is_text(column.type) else column
        return text.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"{origin.file}, {origin.unit}s {origin.first} to {origin.first + len(column) - 1}: {name} is no number ({error}); "
            f"correct the rows"
        ) from error


def _jagged(values: np.ndarray, lengths: Iterable[Any]) -> Jagged:
    return Jagged.from_lengths(torch.from_numpy(values), torch.from_numpy(np.asarray(lengths, np.int64)))


def _cross(parts: list[Jagged], what: str) -> Jagged:
    """A row in which one of the parts is missing has none."""
    if any(int(part.lengths.max()) > 1 for part in parts if len(part)):
        raise ValueError(f"{what}: one of its features is a list of several keys, of which it can make no single key")
    lengths = np.stack([part.lengths.numpy() for part in parts]).min(0)
    kept = torch.from_numpy(np.flatnonzero(lengths))
    return _jagged(crossed([part.select(kept).values.numpy() for part in parts]), lengths)

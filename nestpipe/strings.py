"""Strings as keys: a 64-bit hash that is the same on every machine, in every process and every version.

The key of a string is XXH64 (seed 0) of its bytes, UTF-8 for text, taken as int64. The chance that any two of n strings share
a key is about n^2 / 2^65: see docs/strings.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from nestpipe.kernels.strings import hash_each

Strings: TypeAlias = "Iterable[str | bytes] | pa.Array | pa.ChunkedArray"


def hash_strings(strings: Strings) -> np.ndarray:
    """The keys of strings, one int64 each: `trainer.rows("item", hash_strings(["shoe", "sock"]))`.

    strings: str or bytes in a list or NumPy array, or an Arrow array of any type that holds either; the entries of a dictionary
        are hashed once. No nulls.
    """
    array = _arrow(strings)
    if array.null_count:
        place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"string {place} is null and has no key; drop nulls first (Jagged.from_strings takes them)")
    if pa.types.is_null(array.type):
        return np.empty(0, np.int64)
    if pa.types.is_dictionary(array.type):
        indices, dictionary = array.indices, array.dictionary
        if dictionary.null_count or len(dictionary) > len(indices):  # of a part of a large file: most of it is not used
            return hash_strings(array.dictionary_decode())
        return hash_strings(dictionary)[indices.to_numpy(zero_copy_only=False)]
    if not is_text(array.type):
        raise ValueError(f"strings are needed, got {array.type}; integers are keys as they are (Jagged.from_lists)")
    if not _has_offsets(array.type):  # views, and bytes of one size
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
    _, ends, data = array.buffers()
    out = np.empty(len(array), np.int64)
    if len(array):
        kind = np.int64 if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type) else np.int32
        offsets = np.frombuffer(ends, kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        hash_each(np.frombuffer(data or b"", np.uint8), offsets, out)
    return out


def hash_lists(lists: Iterable[Any] | pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The keys of lists of strings end to end, and the lengths of the lists. An entry may also be a single string, or nothing."""
    values, lengths = flattened(_arrow(lists))
    return hash_strings(values), lengths


def flattened(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The values of a column of lists, or of single values, and how many each row has: a null has none.

    Raises NullInList for a list with a null in it.
    """
    if not is_list(column.type):
        if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
            column = column.dictionary_decode()
        lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        return column.drop_null() if column.null_count else column, lengths
    values = column.flatten()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_dictionary(values.type) and values.dictionary.null_count:
        values = values.dictionary_decode()
    if values.null_count:
        place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise NullInList(int(np.searchsorted(np.cumsum(lengths), place, side="right")))
    return values, lengths


class NullInList(ValueError):
    """A list holds a null. row: which."""

    def __init__(self, row: int) -> None:
        super().__init__(f"list {row} holds a null; remove it from the list")
        self.row = row


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of the type are strings or bytes; those of a dictionary are what it holds."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    return _has_offsets(kind) or is_view or pa.types.is_fixed_size_binary(kind)


def _has_offsets(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _arrow(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.unify_dictionaries().combine_chunks()
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, str | bytes):
        raise ValueError(f"a list of strings is needed, got the single string {values!r:.60}")
    try:
        return pa.array(values if isinstance(values, np.ndarray | list) else list(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"strings are needed, or lists of strings, all of one kind, got {values!r:.80} ({error})"
        ) from error

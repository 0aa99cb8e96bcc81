"""Safetensors files in parts: written and read a block at a time, so that a tensor may be larger than memory.

The format: eight bytes with the length of a JSON header, the header with the type, shape and place of each tensor, the bytes.
The library's own functions want whole tensors, or map the file, which counts as memory of the process.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

ALIGNED = 64  # the first tensor starts at a cache line; the format asks for eight
TYPES: dict[str, type] = {
    "I64": np.int64,
    "F32": np.float32,
    "BF16": np.uint16,
}  # NumPy has the bits of a bfloat16 only
NAMES = {kind: name for name, kind in TYPES.items()}


class _TensorFile:
    def __init__(self, path: Path, mode: str) -> None:
        self._file: Any = path.open(mode)  # buffered, in bytes

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class TensorWriter(_TensorFile):
    """layout: type and shape of each tensor; their rows are appended in any order, and must all be there at the end."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[type, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        offset = 0
        for name, (kind, shape) in layout.items():
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
            header[name] = {"dtype": NAMES[kind], "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
            self._next[name], self._end[name] = offset, offset + num_bytes
            offset += num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        super().__init__(path, "w+b")  # mapping it needs to read too
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._data = 8 + len(text)
        self._layout = layout

    def append(self, name: str, rows: np.ndarray) -> None:
        kind, shape = self._layout[name]
        assert rows.dtype == kind and rows.shape[1:] == shape[1:]
        self._file.seek(self._data + self._next[name])
        self._file.write(np.ascontiguousarray(rows).data)
        self._next[name] += rows.nbytes

    def mapped(self, name: str) -> np.ndarray:
        """A tensor to be written in any order, in the pages of the file; counts as appended. Not to be used after the end."""
        kind, shape = self._layout[name]
        first, last = self._next[name], self._end[name]
        self._file.flush()
        # Else a page that the disk has no room for would end the process, when it is written to.
        os.posix_fallocate(self._file.fileno(), self._data + first, last - first)
        pages = mmap.mmap(self._file.fileno(), self._data + last)
        self._next[name] = last
        return np.frombuffer(pages, kind, int(np.prod(shape)), self._data + first).reshape(shape)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            assert self._next == self._end, "rows came or went while they were being saved"


class TensorReader(_TensorFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path = path
        try:
            length = int.from_bytes(self._file.read(8), "little")
            size = os.fstat(self._file.fileno()).st_size
            if length > size:
                raise ValueError("the header is longer than the file")
            self._header = json.loads(self._file.read(length))
            self._data = 8 + length
            needed = max((entry["data_offsets"][1] for entry in self._header.values() if "dtype" in entry), default=0)
            if self._data + needed > size:
                raise ValueError(f"{self._data + needed} bytes are expected, {size} are there")
        except (ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._header

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def mapped(self) -> dict[str, np.ndarray]:
        """All tensors, read-only, in the pages of the file, which all processes share. They outlive the reader."""
        pages = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        tensors = {}
        for name, entry in self._header.items():
            if "dtype" in entry:
                kind, shape = TYPES[entry["dtype"]], entry["shape"]
                count = int(np.prod(shape, dtype=np.int64))
                tensors[name] = np.frombuffer(pages, kind, count, self._data + entry["data_offsets"][0]).reshape(shape)
        return tensors

    def read(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first to last (not included) of a tensor; fewer at its end."""
        entry = self._header[name]
        kind, (length, *rest) = np.dtype(TYPES[entry["dtype"]]), entry["shape"]
        row_bytes = kind.itemsize * int(np.prod(rest, dtype=np.int64))
        out = np.empty((max(0, min(last, length) - first), *rest), kind)
        self._file.seek(self._data + entry["data_offsets"][0] + first * row_bytes)
        if out.size and self._file.readinto(out.data) != out.nbytes:
            raise ValueError(f"{self._path} ended while {name!r} was read")
        return out

"""Text in blocks of whole lines, and where they lie in their files: so that what is known to be there need not be read again."""

from __future__ import annotations

import array
import contextlib
import functools
import gzip
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from nestpipe.data.remote import READ_BYTES, is_url, look, open_input

log = logging.getLogger("nestpipe")
_FIX = "complete the row or cut it off"


class LineBlock:
    """Whole lines of one file, each with its newline; the first is line `first_line` (the first of a file is 1).

    text: or what reads it, where `num_lines` is known: then it is read when it is asked for, and kept.
    """

    def __init__(
        self, path: str, first_line: int, text: bytes | Callable[[], bytes], num_lines: int | None = None
    ) -> None:
        self.path, self.first_line, self._text = path, first_line, text
        self.num_lines = self.text.count(b"\n") if num_lines is None else num_lines

    @property
    def text(self) -> bytes:
        if not isinstance(self._text, bytes):
            self._text = self._text()
        return self._text


class _Cut(NamedTuple):
    """What decides where the blocks of a file are. Another size, and it is another file."""

    path: str
    size: int
    block_bytes: int
    skip_lines: int


class Known:
    """The blocks of one file from its beginning on, as far as it has been read; the first one is its header, perhaps empty."""

    def __init__(self, size: int, learned: Callable[[int], None]) -> None:
        self.size, self._learned = size, learned
        self.num_bytes, self.num_lines = array.array("q"), array.array("q")

    def __len__(self) -> int:
        return len(self.num_bytes)

    def add(self, number: int, num_bytes: int, num_lines: int) -> None:
        if number == len(self):  # else another reader of the same file was here before
            self.num_bytes.append(num_bytes)
            self.num_lines.append(num_lines)
            self._learned(number)


class LineIndex:
    """Which blocks of lines files have: learned while they are read, and used when they are read again, in a later epoch or by a
    run that goes on. Then a worker reads only blocks of its own, and those that are passed over are not read at all.

    file: where it is kept, so that another process finds it; None: only in memory.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._target: TextIO | None = None
        self._known: dict[_Cut, Known] = {}
        self._last: _Cut | None = None  # what was written of last
        if file is not None:
            with contextlib.suppress(OSError):  # there is none yet
                self._read(file.read_text())

    def __reduce__(self) -> tuple[Any, ...]:
        return LineIndex, (self._file,)  # who gets it reads the file

    def of(self, path: str, *, block_bytes: int, skip_lines: int) -> Known:
        size = look(path).num_bytes if is_url(path) else os.path.getsize(path)
        return self._of(_Cut(path, size, block_bytes, skip_lines))

    def _of(self, cut: _Cut) -> Known:
        if cut not in self._known:
            self._known[cut] = Known(cut.size, lambda number: self._write(cut, number))
        return self._known[cut]

    def _read(self, text: str) -> None:
        known: Known | None = None
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                if isinstance(entry, dict):
                    known = self._of(_Cut(**entry))
                elif known is not None and entry[0] == len(known):
                    known.num_bytes.append(entry[1])
                    known.num_lines.append(entry[2])
            except (ValueError, TypeError):  # its end, where a process was killed while it wrote
                known = None

    def _write(self, cut: _Cut, number: int) -> None:
        if self._file is None:
            return
        try:
            if self._target is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._target = self._file.open("a", buffering=1)  # by lines: what is there when a process dies is whole
                self._target.write("\n")
            known = self._known[cut]
            if self._last != cut:
                self._last = cut
                self._target.write(json.dumps(cut._asdict()) + "\n")
            self._target.write(json.dumps([number, known.num_bytes[number], known.num_lines[number]]) + "\n")
        except OSError as error:
            log.warning(
                f"{self._file} cannot be written ({error}): if the run goes on later, it reads again what it has read"
            )
            self._file = None


def line_blocks(
    paths: list[str],
    *,
    rank: int = 0,
    world: int = 1,
    block_bytes: int = 1 << 18,
    skip_lines: int = 0,
    index: LineIndex | None = None,
) -> Iterator[LineBlock]:
    """Every world-th block of about `block_bytes`, counted through all files. The others are read, not parsed; or, where `index`
    knows them, not read either. (What is compressed has to be read from its beginning.)"""
    count = 0
    for path in paths:
        known = Known(0, lambda number: None)
        if index is not None and not path.endswith(".gz"):
            known = index.of(path, block_bytes=block_bytes, skip_lines=skip_lines)
        for block in _blocks(path, known, block_bytes, skip_lines, neighbours=world == 1):
            if count % world == rank:
                yield block
            count += 1


def _blocks(path: str, known: Known, block_bytes: int, skip_lines: int, *, neighbours: bool) -> Iterator[LineBlock]:
    """neighbours: whether blocks are read one behind the other."""
    number = offset = 0
    line = 1
    ranges = _Ranges(path, READ_BYTES if neighbours else block_bytes)
    while number < len(known):
        num_bytes, num_lines = known.num_bytes[number], known.num_lines[number]
        if number:  # not the header
            yield LineBlock(path, line, functools.partial(ranges.read, offset, num_bytes, num_lines), num_lines)
        number, offset, line = number + 1, offset + num_bytes, line + num_lines
    if number and offset == known.size:
        return
    with _open(path, min(READ_BYTES, max(1 << 16, 32 * block_bytes))) as file:
        try:
            if number:
                file.seek(offset)
            else:
                header = b"".join(file.readline() for _ in range(skip_lines))
                known.add(0, len(header), header.count(b"\n"))
                number, line = 1, line + header.count(b"\n")
            while text := file.read(block_bytes):
                if not text.endswith(b"\n"):
                    text += file.readline()
                num_lines = text.count(b"\n")
                if not text.endswith(b"\n"):
                    raise _cut_off(path, line + num_lines, text[text.rfind(b"\n") + 1 :])
                known.add(number, len(text), num_lines)
                yield LineBlock(path, line, text, num_lines)
                number, line = number + 1, line + num_lines
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or cut off after line {line - 1} ({error}); fetch it again") from error


class _Ranges:
    """Blocks of a file that are read when they are asked for, if they are."""

    def __init__(self, path: str, read_bytes: int) -> None:
        self._path, self._read_bytes = path, read_bytes
        self._file: BinaryIO | None = None

    def read(self, offset: int, num_bytes: int, num_lines: int) -> bytes:
        if self._file is None:
            self._file = open_input(self._path, read_bytes=self._read_bytes)
        self._file.seek(offset)
        text = self._file.read(num_bytes)
        if len(text) != num_bytes or not text.endswith(b"\n") or text.count(b"\n") != num_lines:
            raise ValueError(
                f"{self._path} has changed since it was read for this run: there are other lines at byte {offset}. Put the file "
                f"back that was there, or start a new run"
            )
        return text


def shown(text: bytes) -> str:
    """A piece of a file as it may stand in a message."""
    text = text.rstrip(b"\r\n")
    return repr((text if len(text) <= 60 else text[:57] + b"...").decode("utf-8", "replace"))


def wrong_columns(path: str, line: int, got: int, expected: int) -> ValueError:
    return ValueError(
        f"{path}, line {line}: {got} columns instead of {expected}; if the file was cut off there, {_FIX}"
    )


def _cut_off(path: str, line: int, text: bytes) -> ValueError:
    return ValueError(f"{path} ends in the middle of line {line}, {shown(text)}, with no newline after it; {_FIX}")


def _open(path: str, read_bytes: int) -> BinaryIO:
    file = open_input(path, read_bytes=read_bytes)
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.endswith(".gz") else file

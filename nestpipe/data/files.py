"""Finding files, reading them in blocks of whole lines, and which lines are held out."""

from __future__ import annotations

import dataclasses
import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

import numpy as np

from nestpipe.data.dataset import SPLITS
from nestpipe.data.draws import buckets

Paths = str | list[str]  # a path, a glob pattern or a list of them
_FIX = "complete the row or cut it off"


def find_files(path: Paths) -> list[str]:
    """The files that a path, a glob pattern or a list of them names, in a fixed order; ValueError if there are none."""
    files: list[str] = []
    for pattern in [path] if isinstance(path, str) else path:
        # An exact name first: brackets in it are not a pattern then.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; check the path (relative paths start at {os.getcwd()})")
        for match in matches:
            if os.path.isdir(match):
                raise ValueError(f"{match!r} is a folder; name its files, for example {os.path.join(match, '*')!r}")
            if os.path.getsize(match) == 0:
                raise ValueError(f"{match} is empty; remove it from the list or write it again")
        files += matches
    if not files:
        raise ValueError("the list of paths is empty; name at least one file")
    return files


def find_text_files(path: Paths) -> list[str]:
    """`find_files`, and no file may end in the middle of a line: better to hear that before training."""
    names = find_files(path)
    for name in names:
        if name.endswith(".gz"):
            continue  # only reading it all would tell; `line_blocks` does
        with open(name, "rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                for _ in line_blocks([name]):
                    pass
    return names


@dataclasses.dataclass(frozen=True, eq=False)
class LineBlock:
    """Whole lines of one file, each with its newline; the first is line `first_line` (the first of a file is 1)."""

    path: str
    first_line: int
    text: bytes

    @property
    def num_lines(self) -> int:
        return self.text.count(b"\n")


def line_blocks(
    paths: list[str], *, rank: int = 0, world: int = 1, block_bytes: int = 1 << 18, skip_lines: int = 0
) -> Iterator[LineBlock]:
    """Every world-th block of about `block_bytes`, counted through all files. Others are read, not parsed."""
    index = 0
    for path in paths:
        with _open(path) as file:
            line = 1
            try:
                for _ in range(skip_lines):
                    line += file.readline().endswith(b"\n")
                while text := file.read(block_bytes):
                    if not text.endswith(b"\n"):
                        text += file.readline()
                    if not text.endswith(b"\n"):
                        raise _cut_off(path, line + text.count(b"\n"), text[text.rfind(b"\n") + 1 :])
                    if index % world == rank:
                        yield LineBlock(path, line, text)
                    line += text.count(b"\n")
                    index += 1
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{path} is damaged or cut off after line {line - 1} ({error}); fetch it again"
                ) from error


def shown(text: bytes) -> str:
    """A piece of a file as it may stand in a message."""
    text = text.rstrip(b"\r\n")
    return repr((text if len(text) <= 60 else text[:57] + b"...").decode("utf-8", "replace"))


def _cut_off(path: str, line: int, text: bytes) -> ValueError:
    return ValueError(f"{path} ends in the middle of line {line}, {shown(text)}, with no newline after it; {_FIX}")


def wrong_columns(path: str, line: int, got: int, expected: int) -> ValueError:
    return ValueError(
        f"{path}, line {line}: {got} columns instead of {expected}; if the file was cut off there, {_FIX}"
    )


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


class SplitFiles:
    """Which files make a split, and which of their rows.

    A split with files of its own has all their rows. Otherwise it is held out of the training files: a tenth of the
    rows for "valid", another tenth for "test", by a hash of the row's number in its file. Training never sees a row
    that is held out.
    """

    def __init__(self, *, train: list[str], valid: list[str] | None, test: list[str] | None) -> None:
        self._files = {"train": train, "valid": valid, "test": test}

    @classmethod
    def named(
        cls, train: Paths, valid: Paths | None, test: Paths | None, *, find: Callable[[Paths], list[str]]
    ) -> SplitFiles:
        """Of paths and patterns, as `find_files` or `find_text_files` finds them."""
        return cls(train=find(train), valid=find(valid) if valid else None, test=find(test) if test else None)

    def files(self, split: str) -> list[str]:
        return self._files[split] or self._files["train"] or []

    def mask(self, split: str, *, first: int, count: int) -> np.ndarray:
        """Which of the rows first .. first + count - 1 of a file of the split belong to it."""
        if split != "train" and self._files[split]:
            return np.ones(count, bool)
        bucket = buckets(first, count, 10)
        held_out = {name: bucket == number for number, name in enumerate(SPLITS[1:]) if not self._files[name]}
        if split != "train":
            return held_out[split]
        mask = np.ones(count, bool)
        for part in held_out.values():
            mask &= ~part
        return mask

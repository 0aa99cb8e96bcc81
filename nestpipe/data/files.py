"""Finding files, and which of their rows are held out."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nestpipe.data import remote
from nestpipe.data.dataset import SPLITS, generator
from nestpipe.data.draws import buckets
from nestpipe.data.lines import LineBlock, LineIndex, line_blocks, shown, wrong_columns

__all__ = ["LineBlock", "LineIndex", "line_blocks", "shown", "wrong_columns"]  # of text files, beside what is here

Paths = str | list[str]  # a path, a glob pattern or a list of them; URLs too


def find_files(path: Paths) -> list[str]:
    """The files that a path, a glob pattern or a list of them names, in a fixed order; ValueError if there are none.

    Each on this machine, or a URL: s3://, gs://, hdfs://, or any other that fsspec opens.
    """
    files: list[str] = []
    for pattern in [path] if isinstance(path, str) else path:
        pattern = remote.local_path(pattern)
        files += _at_url(pattern) if remote.is_url(pattern) else _here(pattern)
    if not files:
        raise ValueError("the list of paths is empty; name at least one file")
    return files


def _here(pattern: str) -> list[str]:
    # An exact name first: brackets in it are not a pattern then.
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    if not matches:
        raise ValueError(f"no file matches {pattern!r}; check the path (relative paths start at {os.getcwd()})")
    for match in matches:
        if os.path.isdir(match):
            raise ValueError(f"{match!r} is a folder; name its files, for example {os.path.join(match, '*')!r}")
        _check_size(match, os.path.getsize(match))
    return matches


def _at_url(pattern: str) -> list[str]:
    exact = remote.look(pattern)
    matches = [pattern] if exact.kind != "missing" else remote.matching(pattern)
    if not matches:
        raise ValueError(f"no file matches {pattern!r}; check the name of the bucket or host, and the path behind it")
    for match in matches:
        entry = exact if match == pattern else remote.look(match)
        if entry.kind == "folder":
            raise ValueError(f"{match!r} is a folder; name its files, for example {match.rstrip('/') + '/*'!r}")
        _check_size(match, entry.num_bytes)
    return matches


def _check_size(file: str, num_bytes: int) -> None:
    if num_bytes == 0:
        raise ValueError(f"{file} is empty; remove it from the list or write it again")


def find_text_files(path: Paths) -> list[str]:
    """`find_files`, and no file may end in the middle of a line: better to hear that before training."""
    names = find_files(path)
    for name in names:
        if name.endswith(".gz"):
            continue  # only reading it all would tell; `line_blocks` does
        with remote.open_input(name, read_bytes=1) as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                for _ in line_blocks([name]):
                    pass
    return names


class SplitFiles:
    """Which files make a split, and which of their rows.

    A split with files of its own has all their rows. Otherwise it is held out of the training files: a tenth of the
    rows for "valid", another tenth for "test", by a hash of the row's number in its file. Training never sees a row
    that is held out.
    """

    def __init__(self, *, train: list[str], valid: list[str] | None, test: list[str] | None) -> None:
        self._files = {"train": train, "valid": valid, "test": test}
        self._index = LineIndex()  # of "train"
        self._other_index = LineIndex()  # of the others, which another process may read

    @classmethod
    def named(
        cls, train: Paths, valid: Paths | None, test: Paths | None, *, find: Callable[[Paths], list[str]]
    ) -> SplitFiles:
        """Of paths and patterns, as `find_files` or `find_text_files` finds them."""
        return cls(train=find(train), valid=find(valid) if valid else None, test=find(test) if test else None)

    def files(self, split: str) -> list[str]:
        return self._files[split] or self._files["train"] or []

    def remember(self, file: Path) -> None:
        """Keeps in a file where the lines of training files lie."""
        self._index = LineIndex(file)

    def blocks(
        self,
        split: str,
        *,
        rank: int,
        world: int,
        seed: int,
        epoch: int,
        shuffled: bool,
        block_bytes: int,
        skip_lines: int = 0,
    ) -> Iterator[LineBlock]:
        """The lines of one rank in text files. shuffled: at "train" files come in an order of this seed and epoch."""
        files = self.files(split)
        if shuffled and split == "train":  # the same order on every rank, so that each block has one taker
            files = [files[where] for where in generator(seed, epoch).permutation(len(files))]
        index = self._index if split == "train" else self._other_index
        return line_blocks(files, rank=rank, world=world, block_bytes=block_bytes, skip_lines=skip_lines, index=index)

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

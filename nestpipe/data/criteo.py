"""Criteo: display advertising logs, tab-separated: label, 13 integers, 26 categories in hexadecimal, gaps where
missing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.files import LineBlock, SplitFiles, find_text_files, shown, wrong_columns
from nestpipe.data.stream import Streamed, Unparsed
from nestpipe.kernels.jit import kernel

_NUM_DENSE, _NUM_KEYS = 13, 26
_NUM_COLUMNS = 1 + _NUM_DENSE + _NUM_KEYS
_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45


class Criteo(Streamed):
    """Keys "C1" .. "C26" (the hexadecimal number itself; a missing one is an empty list), `dense["dense"]` [B, 13] as
    log(1 + max(x, 0)) with 0 for a missing one, labels 0 or 1.

    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    valid, test: files of their own; without them a tenth of the lines each is held out, by a hash of the line number.
    shuffle_buffer: how many training rows are held to be mixed, while files come in another order at every epoch; 0 keeps the
        order of the rows, and of the files by name.
    """

    features = tuple(f"C{number}" for number in range(1, _NUM_KEYS + 1))

    def __init__(
        self,
        *,
        path: str | list[str],
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        shuffle_buffer: int = 65_536,
        block_bytes: int = 1 << 18,
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), block_bytes=(block_bytes, 1))
        super().__init__(shuffle_buffer=shuffle_buffer)
        self._files = SplitFiles.named(path, valid, test, find=find_text_files)
        self._block_bytes = block_bytes

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        for block in self._files.blocks(
            split,
            rank=rank,
            world=world,
            seed=seed,
            epoch=epoch,
            shuffled=self._shuffle_buffer > 0,
            block_bytes=self._block_bytes,
        ):
            kept = self._files.mask(split, first=block.first_line, count=block.num_lines)
            yield Unparsed(int(kept.sum()), partial(parse, block, kept=kept))


def parse(block: LineBlock, *, kept: np.ndarray) -> Batch:
    """The rows of a block that are kept; the others are not looked at."""
    count = int(kept.sum())
    labels, dense = np.empty(count, np.float32), np.zeros((count, _NUM_DENSE), np.float32)
    keys, present = np.zeros((_NUM_KEYS, count), np.int64), np.zeros((_NUM_KEYS, count), np.bool_)
    row, column = _parse(np.frombuffer(block.text, np.uint8), kept, labels, dense, keys, present)
    if row >= 0:
        raise _bad_row(block, row, column)
    return Batch(
        keys={
            f"C{number + 1}": dataset.jagged(keys[number][present[number]], dataset.offsets_of(present[number]))
            for number in range(_NUM_KEYS)
        },
        dense={"dense": torch.from_numpy(dense)},
        labels=torch.from_numpy(labels),
    )


def _bad_row(block: LineBlock, row: int, column: int) -> ValueError:
    line = block.first_line + row
    fields = block.text.split(b"\n", row + 1)[row].rstrip(b"\r").split(b"\t")
    if len(fields) != _NUM_COLUMNS:  # then the values are probably in the wrong columns as well
        return wrong_columns(block.path, line, len(fields), _NUM_COLUMNS)
    if column == 0:
        what, kind = "the label", "0 or 1"
    elif column <= _NUM_DENSE:
        what, kind = f"integer I{column}", "an integer or nothing"
    else:
        what, kind = f"category C{column - _NUM_DENSE}", "1 to 16 hexadecimal digits or nothing"
    return ValueError(
        f"{block.path}, line {line}: {what} is {shown(fields[column])}, not {kind}; correct or remove the row"
    )


@kernel
def _parse(
    text: np.ndarray, kept: np.ndarray, labels: np.ndarray, dense: np.ndarray, keys: np.ndarray, present: np.ndarray
) -> tuple[int, int]:
    """Fills the arrays; returns the line and column of the first bad value, or (-1, -1). `text` ends with a newline."""
    where, row = 0, 0
    for line in range(len(kept)):
        if not kept[line]:
            while text[where] != _NEWLINE:
                where += 1
            where += 1
            continue
        column, last = 0, False
        while not last:
            begin = where
            while text[where] != _TAB and text[where] != _NEWLINE:
                where += 1
            end = where
            last = text[where] == _NEWLINE
            if last and end > begin and text[end - 1] == _RETURN:
                end -= 1
            where += 1
            good = True
            if column == 0:
                good = end - begin == 1 and (text[begin] == 48 or text[begin] == 49)
                labels[row] = text[begin] - 48
            elif column >= _NUM_COLUMNS:
                good = False
            elif end > begin:
                if column <= _NUM_DENSE:
                    good, value = _integer(text, begin, end)
                    dense[row, column - 1] = np.log1p(max(value, 0))
                else:
                    good, key = _hexadecimal(text, begin, end)
                    keys[column - _NUM_DENSE - 1, row] = key
                    present[column - _NUM_DENSE - 1, row] = True
            if not good:
                return line, column
            column += 1
        if column != _NUM_COLUMNS:
            return line, column
        row += 1
    return -1, -1


@kernel
def _integer(text: np.ndarray, begin: int, end: int) -> tuple[bool, np.int64]:
    negative = text[begin] == _MINUS
    begin += negative
    value = np.int64(0)
    for where in range(begin, end):
        digit = np.int64(text[where]) - 48
        if digit < 0 or digit > 9:
            return False, value
        value = value * 10 + digit
    # 18 digits always fit; no count in a log has more.
    return 0 < end - begin <= 18, -value if negative else value


@kernel
def _hexadecimal(text: np.ndarray, begin: int, end: int) -> tuple[bool, np.int64]:
    value = np.uint64(0)
    for where in range(begin, end):
        byte = np.int64(text[where])
        if 48 <= byte <= 57:
            digit = byte - 48
        elif 97 <= (byte | 32) <= 102:  # | 32: capital letters to small ones
            digit = (byte | 32) - 87
        else:
            return False, np.int64(0)
        value = (value << np.uint64(4)) | np.uint64(digit)
    return end - begin <= 16, np.int64(value)

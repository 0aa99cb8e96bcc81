"""Sequences: text files with one user a line, `user item item ...`, items in time order."""

from __future__ import annotations

from array import array

import numpy as np

from nestpipe.data.dataset import offsets_of
from nestpipe.data.files import LineBlock, find_text_files, line_blocks, shown
from nestpipe.data.histories import Histories, HistoryDataset


class Sequences(HistoryDataset):
    """One history per line, users and items being integers. The split and the other arguments: see
    HistoryDataset.

    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        max_length: int = 50,
        num_negatives: int = 16,
        negatives_per: str = "sample",
        log_q: bool = False,
        num_clicked: int = 0,
        pairs: bool = False,
    ) -> None:
        super().__init__(
            read_histories(find_text_files(path)),
            max_length=max_length,
            num_negatives=num_negatives,
            negatives_per=negatives_per,
            log_q=log_q,
            num_clicked=num_clicked,
            pairs=pairs,
        )


def read_histories(paths: list[str]) -> Histories:
    numbers, lengths, users = array("q"), array("q"), array("q")
    for block in line_blocks(paths):
        for line, text in enumerate(block.text.split(b"\n")[:-1], start=block.first_line):
            fields = text.split()
            if len(fields) < 2:
                raise ValueError(
                    f"{block.path}, line {line}: {shown(text)} has no items; each line is `user item item ...`: "
                    f"add items or remove it"
                )
            try:
                before = len(numbers)
                numbers.extend(map(int, fields))
            except (ValueError, OverflowError):
                raise _bad_key(block, line, fields) from None
            if b"_" in text:  # int() takes 1_000, which no other reader of the file would
                raise _bad_key(block, line, fields)
            users.append(numbers[before])
            lengths.append(len(fields) - 1)
    if not users:
        raise ValueError(f"{', '.join(paths)}: no user in it; each line is `user item item ...`")
    both = np.frombuffer(numbers, np.int64)
    counts = np.frombuffer(lengths, np.int64)
    is_user = offsets_of(counts + 1)[:-1]
    return Histories(np.frombuffer(users, np.int64), np.delete(both, is_user), offsets_of(counts))


def _bad_key(block: LineBlock, line: int, fields: list[bytes]) -> ValueError:
    for field in fields:
        digits = field[1:] if field[:1] in b"+-" else field
        if not digits.isdigit() or not -(2**63) <= int(field) < 2**63:
            break
    return ValueError(
        f"{block.path}, line {line}: {shown(field)} is not an integer of 64 bits; number users and items first"
    )

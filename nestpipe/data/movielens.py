"""MovieLens: ratings.dat (`::`), ratings.csv or u.data (tabs), one history per user in the order of the timestamps."""

from __future__ import annotations

import numpy as np

from nestpipe.data.files import LineBlock, find_text_files, line_blocks, shown
from nestpipe.data.histories import Histories, HistoryDataset
from nestpipe.data.table_text import INTEGER, NUMBER, read_columns

_NAMES = ["userId", "movieId", "rating", "timestamp"]
_TYPES = {"userId": INTEGER, "movieId": INTEGER, "rating": NUMBER, "timestamp": INTEGER}


class MovieLens(HistoryDataset):
    """The rated movies of each user, `dense["timestamps"]` beside them; the format is seen from the first line.

    The split and the other arguments: see HistoryDataset.
    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    min_rating: ratings below it are left out.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        min_rating: float = 0.0,
        max_length: int = 50,
        num_negatives: int = 16,
        negatives_per: str = "sample",
        log_q: bool = False,
        num_clicked: int = 0,
        pairs: bool = False,
    ) -> None:
        histories = read_ratings(find_text_files(path), min_rating=min_rating)
        super().__init__(
            histories,
            max_length=max_length,
            num_negatives=num_negatives,
            negatives_per=negatives_per,
            log_q=log_q,
            num_clicked=num_clicked,
            pairs=pairs,
        )


def read_ratings(paths: list[str], *, min_rating: float) -> Histories:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("userId", "movieId", "timestamp")}
    for path in paths:
        delimiter, header = _format_of(path)
        for block in line_blocks([path], block_bytes=1 << 20, skip_lines=header):
            if delimiter == "::":  # Arrow takes one character; no field holds a tab
                block = LineBlock(block.path, block.first_line, block.text.replace(b"::", b"\t"))
            table = read_columns(block, names=_NAMES, types=_TYPES, delimiter="," if delimiter == "," else "\t")
            kept = table.column("rating").to_numpy() >= min_rating
            for name, parts in columns.items():
                parts.append(table.column(name).to_numpy()[kept])
    users, items, times = (np.concatenate(parts or [np.empty(0, np.int64)]) for parts in columns.values())
    if not len(users):
        raise ValueError(f"{', '.join(paths)}: no rating of {min_rating} or more; lower min_rating")
    return Histories.from_events(users=users, items=items, times=times)


def _format_of(path: str) -> tuple[str, int]:
    """The delimiter, and the number of header lines."""
    first = next(iter(line_blocks([path], block_bytes=1)), None)
    if first is None:
        raise ValueError(f"{path} is empty; write it again")
    for delimiter in ("::", "\t", ","):
        fields = first.text.strip().split(delimiter.encode())
        if len(fields) == 4:
            return delimiter, int(fields[0] == b"userId")
    raise ValueError(
        f"{path}, line 1: {shown(first.text)} is not a rating; expected user, movie, rating and timestamp, separated "
        f"by '::', tabs or commas"
    )

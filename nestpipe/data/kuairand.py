"""KuaiRand: the interaction logs (`log_standard_*.csv`), as click samples or as histories."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.files import LineBlock, SplitFiles, find_text_files, line_blocks
from nestpipe.data.histories import Histories, HistoryDataset
from nestpipe.data.stream import Streamed, Unparsed
from nestpipe.data.table_text import INTEGER, read_columns, read_header


class KuaiRand(Streamed):
    """One sample per shown video: keys "user", "video", "tab" and "hour" (0 to 23), `dense["dense"]` [B, 1] the log of
    the video's duration in seconds, labels 0 or 1.

    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    valid, test: files of their own; without them a tenth of the lines each is held out, by a hash of the line number.
    label: any 0/1 column: is_click, is_like, long_view, ...
    shuffle_buffer: how many training rows are held to be mixed, while files come in another order at every epoch; 0 keeps the
        order of the rows, and of the files by name.
    """

    features = ("user", "video", "tab", "hour")

    def __init__(
        self,
        *,
        path: str | list[str],
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        label: str = "is_click",
        shuffle_buffer: int = 65_536,
        block_bytes: int = 1 << 18,
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), block_bytes=(block_bytes, 1))
        super().__init__(shuffle_buffer=shuffle_buffer)
        self._files = SplitFiles.named(path, valid, test, find=find_text_files)
        self._types = {name: INTEGER for name in ("user_id", "video_id", "tab", "hourmin", "duration_ms", label)}
        self._label, self._block_bytes = label, block_bytes
        files = {file for split in dataset.SPLITS for file in self._files.files(split)}
        self._headers = {file: read_header(file, needed=list(self._types)) for file in files}

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        for block in self._files.blocks(
            split,
            rank=rank,
            world=world,
            seed=seed,
            epoch=epoch,
            shuffled=self._shuffle_buffer > 0,
            block_bytes=self._block_bytes,
            skip_lines=1,
        ):
            kept = np.flatnonzero(self._files.mask(split, first=block.first_line, count=block.num_lines))
            yield Unparsed(len(kept), partial(self._piece, block, kept))

    def _piece(self, block: LineBlock, kept: np.ndarray) -> Batch:
        table = read_columns(block, names=self._headers[block.path], types=self._types, delimiter=",")
        labels = checked_flags(block, table, self._label)[kept]
        keys = {
            "user": table.column("user_id").to_numpy(),
            "video": table.column("video_id").to_numpy(),
            "tab": table.column("tab").to_numpy(),
            "hour": table.column("hourmin").to_numpy() // 100,  # 1530 is half past three in the afternoon
        }
        seconds = np.maximum(table.column("duration_ms").to_numpy()[kept], 0) / 1000
        one_each = np.arange(len(kept) + 1)
        return Batch(
            keys={
                name: Jagged(torch.from_numpy(column[kept]), torch.from_numpy(one_each.copy()))
                for name, column in keys.items()
            },
            dense={"dense": torch.from_numpy(np.log1p(seconds).astype(np.float32)[:, None])},
            labels=torch.from_numpy(labels.astype(np.float32)),
        )


class KuaiRandSequences(HistoryDataset):
    """The videos to which each user reacted well (`positive`, a 0/1 column), in the order of time.

    The split and the other arguments: see HistoryDataset.
    path: a path, a glob pattern or a list of them, here or at a URL (s3://, ...); `.gz` is read too.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        positive: str = "is_click",
        max_length: int = 50,
        num_negatives: int = 16,
        negatives_per: str = "sample",
        log_q: bool = False,
        num_clicked: int = 0,
        pairs: bool = False,
    ) -> None:
        histories = read_positive(find_text_files(path), positive=positive)
        super().__init__(
            histories,
            max_length=max_length,
            num_negatives=num_negatives,
            negatives_per=negatives_per,
            log_q=log_q,
            num_clicked=num_clicked,
            pairs=pairs,
        )


def read_positive(paths: list[str], *, positive: str) -> Histories:
    types = {name: INTEGER for name in ("user_id", "video_id", "time_ms", positive)}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("user_id", "video_id", "time_ms")}
    for path in paths:
        names = read_header(path, needed=list(types))
        for block in line_blocks([path], block_bytes=1 << 20, skip_lines=1):
            table = read_columns(block, names=names, types=types, delimiter=",")
            kept = checked_flags(block, table, positive) == 1
            for name, parts in columns.items():
                parts.append(table.column(name).to_numpy()[kept])
    users, videos, times = (np.concatenate(parts or [np.empty(0, np.int64)]) for parts in columns.values())
    if not len(users):
        raise ValueError(f"{', '.join(paths)}: no row with {positive} = 1; give another column as positive")
    store = Histories.from_events(users=users, items=videos, times=times)
    assert store.times is not None
    # Ordered by milliseconds, given in seconds like every other dataset.
    return Histories(store.users, store.items, store.offsets, store.times // 1000)


def checked_flags(block: LineBlock, table: pa.Table, name: str) -> np.ndarray:
    flags = table.column(name).to_numpy()
    bad = np.flatnonzero((flags != 0) & (flags != 1))
    if len(bad):
        raise ValueError(
            f"{block.path}, line {block.first_line + bad[0]}: {name} is {flags[bad[0]]}, not 0 or 1; "
            f"correct or remove the row"
        )
    return flags

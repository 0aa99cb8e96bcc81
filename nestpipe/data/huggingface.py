"""Hugging Face data sets: Arrow files that `datasets` keeps, by columns as Parquet has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.columns import Columns, Origin
from nestpipe.data.files import SplitFiles
from nestpipe.data.stream import Unparsed
from nestpipe.data.tabular import Tabular
from nestpipe.errors import did_you_mean


class HuggingFace(Tabular):
    """A data set of the Hugging Face Hub, or a folder that `save_to_disk` has written, read through `datasets`: the library maps
    its files into memory. Rows are read in pieces, shuffled over all of the data; a run that goes on reads nothing of what it
    passes over.

    path: its name, `org/name`, or a folder. name: of several that it has, this one (a "configuration").
    train, valid, test: names of splits. Without the latter two a tenth of the training rows each is held out, by a hash of the
        row's number.
    keys, dense, label, binary_label, buckets, crosses, log1p, fill, integers: see Parquet.
    shuffle_buffer: how many training rows are held to be mixed. rows_per_read: in a piece.

    What is too large to be kept here is read from the Hub as Parquet is: kind = "parquet", path =
    "hf://datasets/org/name/data/train-*.parquet".
    """

    def __init__(
        self,
        *,
        path: str,
        keys: list[str] | dict[str, str],
        name: str | None = None,
        dense: list[str] | None = None,
        label: str | None = None,
        binary_label: bool = True,
        train: str = "train",
        valid: str | None = None,
        test: str | None = None,
        shuffle_buffer: int = 65_536,
        rows_per_read: int = 8_192,
        buckets: dict[str, dict[str, Any]] | None = None,
        crosses: dict[str, list[str]] | None = None,
        log1p: list[str] | None = None,
        fill: float | None = None,
        integers: list[str] | None = None,
    ) -> None:
        dataset.check_at_least(shuffle_buffer=(shuffle_buffer, 0), rows_per_read=(rows_per_read, 1))
        columns = Columns.declared(
            keys=keys,
            dense=dense,
            label=label,
            binary_label=binary_label,
            buckets=buckets,
            crosses=crosses,
            log1p=log1p,
            fill=fill,
            integers=integers,
        )
        splits = SplitFiles(train=[train], valid=[valid] if valid else None, test=[test] if test else None)
        super().__init__(columns, splits, shuffle_buffer=shuffle_buffer)
        self._path, self._rows_per_read = path, rows_per_read
        self._splits: dict[str, Any] = {}
        schemas = {}
        for split in dict.fromkeys(filter(None, (train, valid, test))):
            rows = _loaded(path, name, split)
            schemas[f"{path}, {split}"] = rows.features.arrow_schema
            # Without an index of rows Arrow's own slices are read: filtered and sorted ones have one.
            self._splits[split] = rows.with_format("arrow", columns=self._columns)
        self._mapping = self._mapping.with_integers_of(schemas)
        self._fit()

    def remember(self, file: Path) -> None:
        """There is nothing to be learned of them: any row can be read alone."""

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Unparsed]:
        name = self._files.files(split)[0]
        count = len(self._splits[name])
        # A few for each rank, however few rows there are.
        size = max(1, min(self._rows_per_read, -(-count // (4 * world))))
        first_rows = np.arange(0, count, size)
        if split == "train":  # the same order on every rank, so that each piece has one taker
            first_rows = dataset.generator(seed, epoch).permutation(first_rows)
        for first in first_rows[rank::world].tolist():
            kept = self._files.mask(split, first=first, count=min(size, count - first))
            yield Unparsed(int(kept.sum()), partial(self._piece, name, first, kept))

    def _piece(self, name: str, first: int, kept: np.ndarray) -> Batch:
        """Checks all rows, gives those that are kept."""
        rows = self._splits[name][first : first + len(kept)]
        return self._kept(self._mapping.batch(rows, Origin(f"{self._path}, {name}", first)), kept)


def _loaded(path: str, name: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            'data.kind = "huggingface" needs the library `datasets`: pip install "nestpipe[datasets]"'
        ) from error
    saved = any(os.path.exists(os.path.join(path, file)) for file in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, name)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{path} is not a data set that can be loaded: {error}; give a name on the Hub, or a folder of save_to_disk"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        loaded = {"train": loaded}
    if split not in loaded:
        raise ValueError(f"{path}: split {split!r}, {did_you_mean(split, list(loaded))}")
    return loaded[split]

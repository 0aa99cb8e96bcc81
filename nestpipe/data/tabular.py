"""What Parquet and CSV share: files of columns that are keys, inputs and labels, and buckets fitted to training rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data.columns import Columns
from nestpipe.data.files import SplitFiles
from nestpipe.data.stream import Streamed
from nestpipe.data.transforms import SAMPLE

# The arguments that say what becomes of columns, in Parquet and CSV.
ENTRIES = ("keys", "dense", "label", "binary_label", "buckets", "crosses", "log1p", "fill", "integers")


class Tabular(Streamed):
    """Rows in files of columns. Classes give `_pieces` and call `_fit` when files can be read."""

    fits = ("buckets", "integers")  # arguments that a run saves as the training data has made them

    def __init__(self, columns: Columns, files: SplitFiles, *, shuffle_buffer: int) -> None:
        super().__init__(shuffle_buffer=shuffle_buffer)
        self._mapping, self._files = columns, files

    @property
    def features(self) -> tuple[str, ...]:
        """The names in `batch.keys`: those of keys, buckets and crosses."""
        return self._mapping.features

    @property
    def buckets(self) -> dict[str, dict[str, Any]]:
        """The argument `buckets` with the boundaries that were computed: give it to read other files by the same ones."""
        return {name: bucket.entries() for name, bucket in self._mapping.buckets.items()}

    @property
    def integers(self) -> list[str]:
        """The key columns whose integers are the keys; in all others strings are hashed."""
        return list(self._mapping.integers or ())

    @staticmethod
    def _kept(rows: Batch, kept: np.ndarray) -> Batch:
        """Those of a split. kept: True for each of them."""
        return rows if kept.all() else rows.select(torch.from_numpy(np.flatnonzero(kept)))

    @property
    def _columns(self) -> list[str]:
        return self._mapping.names

    @staticmethod
    def check_entries(entries: Mapping[str, Any]) -> None:
        """ValueError for arguments that do not fit together, before any file is opened."""
        columns_of(entries)

    def _fit(self) -> None:
        """Computes the quantiles that are declared, from the first rows of the training split in the order of seed 0."""
        unfitted = self._mapping.unfitted
        if not unfitted:
            return
        reading = copy.copy(self)
        names = tuple(dict.fromkeys(unfitted.values()))
        reading._mapping, reading._shuffle_buffer = Columns(dense=names, precision=np.float64), 0
        first = next(reading.batches("train", batch_size=SAMPLE, rank=0, world=1, seed=0), None)
        if first is None:
            raise ValueError(f"there is no training row to compute the quantiles of {', '.join(unfitted)} from")
        numbers = dict(zip(names, first.dense["dense"].T.numpy(), strict=True))  # type: ignore[union-attr]
        self._mapping = self._mapping.fitted({name: numbers[column] for name, column in unfitted.items()})


def columns_of(entries: Mapping[str, Any]) -> Columns:
    """Of the arguments of Parquet or CSV, such as a run's config has them in [data]."""
    return Columns.declared(**{name: value for name, value in entries.items() if name in ENTRIES and value is not None})

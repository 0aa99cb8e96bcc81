"""Negatives: keys that a sample's next items are compared with, drawn uniformly over all items."""

from __future__ import annotations

import numpy as np

from nestpipe.data import dataset
from nestpipe.data.draws import uniform_lists

PER = ("sample", "position")


def check_negatives(num_negatives: int, negatives_per: str) -> None:
    dataset.check_at_least(num_negatives=(num_negatives, 0))
    if negatives_per not in PER:
        raise ValueError(f"negatives_per is {negatives_per!r}; use one of {', '.join(PER)}")


def draw_negatives(
    stream: np.uint64, samples: np.ndarray, lengths: np.ndarray, num_items: int, *, num_negatives: int, per: str
) -> tuple[np.ndarray, np.ndarray]:
    """Items in [0, num_items), and the offsets of each sample's. lengths: of the histories; per position: the last item of a
    history has no next one, and so no negatives."""
    counts = np.maximum(lengths - 1, 0) if per == "position" else np.ones(len(lengths), np.int64)
    offsets = dataset.offsets_of(counts * num_negatives)
    return uniform_lists(stream, samples, offsets, num_items), offsets

"""Impressions: of each sample, what was clicked and what was passed over, as one list of candidates with labels."""

from __future__ import annotations

import numpy as np

from nestpipe.batch import Jagged
from nestpipe.data import dataset
from nestpipe.data.draws import uniform_lists

_RANGE = 2**53


def impressions(
    stream: np.uint64,
    samples: np.ndarray,
    clicked: tuple[np.ndarray, np.ndarray],
    passed: tuple[np.ndarray, np.ndarray],
) -> tuple[Jagged, Jagged]:
    """Candidates and labels (1: clicked, 0: passed over), in an order that the stream and the sample decide: the place in a list
    must not tell what was clicked. clicked, passed: keys, and the offsets of each sample's."""
    lengths = [np.diff(offsets) for _, offsets in (clicked, passed)]
    offsets = clicked[1] + passed[1]
    owner = np.concatenate([np.repeat(np.arange(len(samples)), counts) for counts in lengths])
    # Each list one number per entry; entries of both kinds are then ordered by theirs.
    by_list = np.lexsort((np.arange(len(owner)), owner))
    number = np.empty(len(owner), np.int64)
    number[by_list] = uniform_lists(stream, samples, offsets, _RANGE)
    order = np.lexsort((number, owner))
    keys = np.concatenate([clicked[0], passed[0]])[order]
    labels = np.repeat(np.array([1, 0], np.float32), [len(clicked[0]), len(passed[0])])[order]
    return dataset.jagged(keys, offsets), dataset.jagged(labels, offsets.copy())

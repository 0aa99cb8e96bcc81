"""HistoryDataset: user histories in memory, split leave-one-out. Every sequence file format ends up here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import SEEN, Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.draws import stream_of, uniform_ids

_ORDER, _NEGATIVES = 0, 1


@dataclasses.dataclass(frozen=True, eq=False)
class Histories:
    """The items of user u, in time order, are `items[offsets[u]:offsets[u + 1]]`; `times` (seconds) runs beside
    `items`."""

    users: np.ndarray
    items: np.ndarray
    offsets: np.ndarray
    times: np.ndarray | None = None

    @classmethod
    def from_events(cls, *, users: np.ndarray, items: np.ndarray, times: np.ndarray) -> Histories:
        """Groups events by user and orders them by time; events of the same time stay in the order of the file."""
        order = np.lexsort((times, users))  # stable
        names, lengths = np.unique(users, return_counts=True)
        return cls(names, items[order], dataset.offsets_of(lengths), times[order])


class HistoryDataset:
    """Leave-one-out over `histories`.

    train: all items but the last two. valid: the history before the last but one item, which is the target. test: the
        history before the last item, which is the target. Users with fewer than three items train with what they have
        and are not evaluated.

    max_length: only the latest items of a history are given. `dense["seen"]` of "valid" and "test" has all before the target.
    num_negatives: per sample, uniform over all items (the user's own are not left out), fixed by (seed, epoch, user).
    """

    features = ("history", "negatives")

    def __init__(self, histories: Histories, *, max_length: int, num_negatives: int) -> None:
        dataset.check_at_least(max_length=(max_length, 1), num_negatives=(num_negatives, 0))
        self.histories = histories
        self.max_length, self.num_negatives = max_length, num_negatives
        self._catalogue = np.unique(histories.items)
        lengths = np.diff(histories.offsets)
        self._evaluated = np.flatnonzero(lengths >= 3)
        # Where the history of each user ends, by split; the target, if any, is the item right there.
        self._ends = {
            "train": histories.offsets[1:] - np.where(lengths >= 3, 2, 0),
            "valid": histories.offsets[1:] - 2,
            "test": histories.offsets[1:] - 1,
        }

    def candidates(self) -> Tensor:
        """The keys of all items, sorted."""
        return torch.from_numpy(self._catalogue.copy())

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        dataset.check_request(split=split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch)
        if split == "train":
            samples = dataset.generator(seed, epoch, _ORDER).permutation(len(self.histories.users))
        else:
            samples, epoch = self._evaluated, 0
        negatives = stream_of(seed, epoch, dataset.SPLITS.index(split), _NEGATIVES)

        def batch(index: int) -> Batch:
            whole = dataset.global_slice(index, len(samples), batch_size=batch_size, world=world)
            begin, end = dataset.rank_slice(*whole, rank=rank, world=world)
            return self._batch(samples[begin:end], split, negatives)

        return dataset.Indexed(dataset.num_global_batches(len(samples), batch_size=batch_size, world=world), batch)

    def _batch(self, users: np.ndarray, split: str, negatives: np.uint64) -> Batch:
        store = self.histories
        ends = self._ends[split][users]
        where, offsets = _between(np.maximum(store.offsets[users], ends - self.max_length), ends)
        dense: dict[str, Tensor | Jagged] = {}
        if store.times is not None:
            dense["timestamps"] = dataset.jagged(store.times[where], offsets.copy())
        if split != "train":
            whole, whole_offsets = _between(store.offsets[users], ends)
            dense[SEEN] = dataset.jagged(store.items[whole], whole_offsets)
        picks = uniform_ids(negatives, users, self.num_negatives, len(self._catalogue))
        return Batch(
            keys={
                "history": dataset.jagged(store.items[where], offsets),
                "negatives": dataset.fixed_jagged(self._catalogue[picks]),
            },
            dense=dense,
            labels=None if split == "train" else torch.from_numpy(store.items[ends]),
        )


def _between(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places from each begin to before its end, one list after the other, and the offsets of the lists."""
    lengths = ends - begins
    offsets = dataset.offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths), offsets

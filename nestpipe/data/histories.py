"""HistoryDataset: user histories in memory, split leave-one-out. Every sequence file format ends up here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import SEEN, Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.draws import stream_of, uniform_lists, uniform_table
from nestpipe.data.epoch import Cut, Epoch
from nestpipe.data.impressions import impressions
from nestpipe.data.negatives import check_negatives, draw_negatives

_ORDER, _NEGATIVES, _CUT = 0, 1, 2


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

    max_length: only the latest items of a history are given. `dense["seen"]` of "valid" and "test" has all before the target,
        `dense["user"]` the user.
    num_negatives: uniform over all items (the user's own are not left out), fixed by (seed, epoch, user).
    negatives_per: "sample": so many for each sample; "position": for each item of a history but the last.
    log_q: adds `dense["log_q"]`: of each item of a history the logarithm of its share of all training events, for in-batch
        negatives.
    num_clicked: above 0, the data is for rankers: `keys["candidates"]` instead of negatives, `labels` with 1 for items that the
        user has next and 0 for `num_negatives` drawn ones, and `dense["now"]`, the time of the first of the former. At "train" a
        history is cut somewhere, by (seed, epoch, user), and the next items are clicked, up to `num_clicked` of them; where there
        is no next item there are no candidates. At "valid" and "test" the target is clicked.
    pairs: the data is for two-tower models: `keys["target"]` instead of negatives, one item a sample. At "train" every item of a
        history that has one before it is a sample, with the items before it as `keys["history"]`. `dense["user"]` [B] says
        whose it is, `dense["log_q"]` is [B], of the targets.
    """

    features = ("history", "negatives")

    def __init__(
        self,
        histories: Histories,
        *,
        max_length: int,
        num_negatives: int,
        negatives_per: str = "sample",
        log_q: bool = False,
        num_clicked: int = 0,
        pairs: bool = False,
    ) -> None:
        dataset.check_at_least(max_length=(max_length, 1), num_clicked=(num_clicked, 0))
        check_negatives(num_negatives, negatives_per)
        self.histories, self.num_clicked = histories, num_clicked
        self.has_lists = num_clicked > 0
        if pairs and self.has_lists:
            raise ValueError("num_clicked makes lists of candidates, pairs single targets; set one of them")
        self.pairs = pairs
        if self.has_lists or pairs:
            self.features = ("history", "candidates" if self.has_lists else "target")
        self.max_length, self.num_negatives, self.negatives_per = max_length, num_negatives, negatives_per
        self._catalogue = np.unique(histories.items)
        lengths = np.diff(histories.offsets)
        self._evaluated = np.flatnonzero(lengths >= 3)
        # Where the history of each user ends, by split; the target, if any, is the item right there.
        self._ends = {
            "train": histories.offsets[1:] - np.where(lengths >= 3, 2, 0),
            "valid": histories.offsets[1:] - 2,
            "test": histories.offsets[1:] - 1,
        }
        self._log_q = self._log_shares() if log_q else None

    def _log_shares(self) -> np.ndarray:
        """Of each event: of its item. An item that only "valid" and "test" have counts as one event."""
        where, _ = _between(self.histories.offsets[:-1], self._ends["train"])
        items = np.searchsorted(self._catalogue, self.histories.items)
        counts = np.bincount(items[where], minlength=len(self._catalogue))
        return np.log(np.maximum(counts, 1) / max(len(where), 1)).astype(np.float32)[items]

    def candidates(self) -> Tensor:
        """The keys of all items, sorted."""
        return torch.from_numpy(self._catalogue.copy())

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        dataset.check_request(split=split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch)
        samples = self.epoch(split, seed=seed, epoch=epoch)
        return Cut(samples, batch_size=batch_size, batch_tokens=None, world=world, squares=None).batches(rank)

    def epoch(self, split: str, *, seed: int, epoch: int) -> Epoch:
        """All samples of an epoch, to be read by index."""
        begins, ends = self.histories.offsets, self._ends[split]
        if self.has_lists and split == "train":
            ends = self._cuts(stream_of(seed, epoch, _CUT))
        if split == "train":
            users, stops = self._next_items() if self.pairs else (np.arange(len(self.histories.users)), ends)
            order = dataset.generator(seed, epoch, _ORDER).permutation(len(users))
            users, stops = users[order], stops[order]
        else:
            users, epoch = self._evaluated, 0
            stops = ends[users]
        negatives = stream_of(seed, epoch, dataset.SPLITS.index(split), _NEGATIVES)
        return Epoch(
            len(users),
            "history",
            lambda places: np.minimum(stops[places] - begins[users[places]], self.max_length),
            lambda places: self._batch(users[places], stops[places], split, negatives),
        )

    def _next_items(self) -> tuple[np.ndarray, np.ndarray]:
        """All training items that have one before them: whose they are, and where."""
        begins, ends = self.histories.offsets[:-1], self._ends["train"]
        where, offsets = _between(begins + 1, np.maximum(ends, begins + 1))
        return np.repeat(np.arange(len(begins)), np.diff(offsets)), where

    def _cuts(self, stream: np.uint64) -> np.ndarray:
        """Of each user, where the training history ends that has a next item: behind one of its items but the last."""
        begins, ends = self.histories.offsets[:-1], self._ends["train"]
        u = uniform_table(stream, np.arange(len(begins)), 1)[:, 0]
        return begins + np.minimum(1 + (u * (ends - begins - 1)).astype(np.int64), ends - begins)

    def _batch(self, users: np.ndarray, ends: np.ndarray, split: str, negatives: np.uint64) -> Batch:
        store = self.histories
        where, offsets = _between(np.maximum(store.offsets[users], ends - self.max_length), ends)
        dense: dict[str, Tensor | Jagged] = {}
        if store.times is not None:
            dense["timestamps"] = dataset.jagged(store.times[where], offsets.copy())
        if split != "train":
            whole, whole_offsets = _between(store.offsets[users], ends)
            dense[SEEN] = dataset.jagged(store.items[whole], whole_offsets)
            if store.users.dtype.kind == "i":  # names are no tensor
                dense["user"] = torch.from_numpy(store.users[users])
        if self.pairs:
            return self._pairs(users, ends, split, dataset.jagged(store.items[where], offsets), dense)
        if self._log_q is not None:
            dense["log_q"] = dataset.jagged(self._log_q[where], offsets.copy())
        if self.has_lists:
            return self._lists(users, ends, split, negatives, dataset.jagged(store.items[where], offsets), dense)
        picks, pick_offsets = draw_negatives(
            negatives,
            users,
            np.diff(offsets),
            len(self._catalogue),
            num_negatives=self.num_negatives,
            per=self.negatives_per,
        )
        return Batch(
            keys={
                "history": dataset.jagged(store.items[where], offsets),
                "negatives": dataset.jagged(self._catalogue[picks], pick_offsets),
            },
            dense=dense,
            labels=None if split == "train" else torch.from_numpy(store.items[ends]),
        )

    def _pairs(
        self, users: np.ndarray, ends: np.ndarray, split: str, history: Jagged, dense: dict[str, Tensor | Jagged]
    ) -> Batch:
        """Histories that end at `ends`, and the item that comes next."""
        targets = self.histories.items[ends]
        if split == "train":
            named = self.histories.users.dtype.kind == "i"
            # Only whether it is the same user counts: where names are no numbers, the place among all users tells.
            dense["user"] = torch.from_numpy(self.histories.users[users] if named else users)
        if self._log_q is not None:
            dense["log_q"] = torch.from_numpy(self._log_q[ends])
        keys = {"history": history, "target": dataset.jagged(targets, np.arange(len(ends) + 1))}
        return Batch(keys, dense, None if split == "train" else torch.from_numpy(targets.copy()))

    def _lists(
        self,
        users: np.ndarray,
        ends: np.ndarray,
        split: str,
        negatives: np.uint64,
        history: Jagged,
        dense: dict[str, Tensor | Jagged],
    ) -> Batch:
        """Histories that end at `ends`, and what comes next among drawn items."""
        store = self.histories
        last = np.minimum(ends + self.num_clicked, self._ends["train"][users]) if split == "train" else ends + 1
        clicked, clicked_offsets = _between(ends, last)
        passed_offsets = dataset.offsets_of(np.where(last > ends, self.num_negatives, 0))
        passed = uniform_lists(negatives, users, passed_offsets, len(self._catalogue))
        shuffle = stream_of(int(negatives), _CUT)
        candidates, labels = impressions(
            shuffle, users, (store.items[clicked], clicked_offsets), (self._catalogue[passed], passed_offsets)
        )
        if store.times is not None:  # where nothing comes next, any time will do
            dense["now"] = torch.from_numpy(store.times[np.minimum(ends, len(store.times) - 1)])
        dense.pop(SEEN, None)  # lists are ranked, not all items
        return Batch({"history": history, "candidates": candidates}, dense, labels)


def _between(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places from each begin to before its end, one list after the other, and the offsets of the lists."""
    lengths = ends - begins
    offsets = dataset.offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths), offsets

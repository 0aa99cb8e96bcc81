"""KuaiRandLike: drawn histories that look like a log of short videos: a heavy tail of lengths, sessions, tastes, repetitions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import SEEN, Batch, Jagged
from nestpipe.data import dataset
from nestpipe.data.draws import (
    law_reach,
    power_law,
    sample_state,
    stream_of,
    to_keys,
    uniform,
    uniform_table,
)
from nestpipe.data.epoch import Cut, Epoch
from nestpipe.data.negatives import check_negatives, draw_negatives
from nestpipe.data.synthetic_sequences import length_quantiles
from nestpipe.kernels.jit import kernel

_FIRST_SECOND = 1_650_000_000
_SESSION = 20.0  # items, on average
_WATCHED, _AWAY = 30.0, 28_800.0  # seconds between two items of a session, and between two sessions, on average
_RECENT = 200  # how far back a user goes for an item to watch again
# What a stream is for; each purpose has its own, so that adding draws to one does not change another.
WALK, LENGTH, ORDER, _NEGATIVES = 0, 1, 2, 3
_HELD_OUT = {"train": 0, "valid": 1, "test": 2}  # items behind the training history, the last of them the target


class KuaiRandLike:
    """A log of `num_users` users, each with one history that is the same in every epoch, split leave-one-out: the last item is
    the target of "test", the one before of "valid". Every sample is a function of (seed, user) alone.

    Lengths of training histories are log-normal with a standard deviation of 1 of the logarithm: of a mean of 300 the median
    is 182 and the 99th percentile 1,863 (6.2 times the mean). They are then clipped to min_length .. max_length, which takes the
    mean to 292 at 2,048. `lengths` has all of them.

    A user comes in sessions of 20 items on average, 30 seconds from one to the next and 8 hours to the next session. Item i is
    of topic i % num_topics; a session is about one of the user's `num_tastes` topics. An item is, with probability `repeats`, one
    of the user's last 200 again; else, with probability `loyalty`, one of the session's topic; else any. Inside a topic, and
    anywhere, rank r is drawn with probability ~ r^-skew. So the topic of the next item can be told from the last ones, less well
    after a long pause.

    num_evaluated: users that are judged at "valid" and "test", the first ones.
    num_negatives: uniform over all items, fixed by (seed, epoch, user).
    negatives_per: "sample": so many for each sample; "position": for each item of a history but the last.
    spread_keys: keys all over the int64 range instead of 0 .. num_items - 1.
    seed: of the log; the seed given to `batches` orders it.
    """

    features = ("history", "negatives")

    def __init__(
        self,
        *,
        num_users: int = 27_000,
        num_items: int = 100_000,
        skew: float = 1.0,
        mean_length: float = 300.0,
        min_length: int = 2,
        max_length: int = 2_048,
        num_topics: int | None = None,
        num_tastes: int = 4,
        repeats: float = 0.2,
        loyalty: float = 0.8,
        num_negatives: int = 16,
        negatives_per: str = "sample",
        num_evaluated: int = 2_000,
        spread_keys: bool = False,
        seed: int = 0,
    ) -> None:
        if num_topics is None:
            num_topics = max(1, min(256, int(max(num_items, 1) ** 0.5)))
        dataset.check_at_least(
            num_users=(num_users, 1), num_items=(num_items, 1), skew=(skew, 0), min_length=(min_length, 1),
            mean_length=(mean_length, min_length), max_length=(max_length, min_length), num_topics=(num_topics, 1),
            num_tastes=(num_tastes, 1), num_evaluated=(num_evaluated, 0), seed=(seed, 0),
        )  # fmt: skip
        check_negatives(num_negatives, negatives_per)
        if num_topics > num_items:
            raise ValueError(f"num_topics is {num_topics} for {num_items} items; use {num_items} at most")
        for name, share in {"repeats": repeats, "loyalty": loyalty}.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it must be between 0 and 1")
        self.num_users, self.num_items, self.num_negatives = num_users, num_items, num_negatives
        self.negatives_per = negatives_per
        self.max_length, self.spread_keys, self.seed = max_length, spread_keys, seed
        self._law = (num_items, float(skew), num_topics, num_tastes, float(repeats), float(loyalty))
        self._evaluated = np.arange(min(num_evaluated, num_users))
        quantiles = length_quantiles("lognormal", mean_length, min_length, max_length)
        u = uniform_table(stream_of(seed, LENGTH), np.arange(num_users), 1)[:, 0]
        self._lengths = quantiles[(u * len(quantiles)).astype(np.int64)]

    def candidates(self) -> Tensor:
        """The keys of all items, sorted."""
        return dataset.sorted_keys(to_keys(np.arange(self.num_items), spread_keys=self.spread_keys))

    def lengths(self, split: str = "train") -> np.ndarray:
        """By user: how many items the history has that a model is given. Known without drawing one."""
        more = max(0, _HELD_OUT[split] - 1)
        return np.minimum(self._lengths + more, self.max_length)

    def order(self, split: str, *, seed: int, epoch: int = 0) -> np.ndarray:
        """The users of an epoch in the order in which `batches` deals them out."""
        if split != "train":
            return self._evaluated
        return dataset.generator(seed, epoch, ORDER).permutation(self.num_users)

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        dataset.check_request(split=split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch)
        users = self.epoch(split, seed=seed, epoch=epoch)
        return Cut(users, batch_size=batch_size, batch_tokens=None, world=world, squares=None).batches(rank)

    def epoch(self, split: str, *, seed: int, epoch: int = 0) -> Epoch:
        """All samples of an epoch, to be read by index."""
        users, lengths = self.order(split, seed=seed, epoch=epoch), self.lengths(split)
        return Epoch(
            len(users),
            "history",
            lambda places: lengths[users[places]],
            lambda places: self.samples(split, users[places], seed=seed, epoch=epoch),
        )

    def samples(self, split: str, users: np.ndarray, *, seed: int, epoch: int = 0) -> Batch:
        """These users, in this order: any rank can make any sample."""
        held_out, epoch = _HELD_OUT[split], epoch if split == "train" else 0
        offsets = dataset.offsets_of(self._lengths[users] + held_out)
        items, times = walks(stream_of(self.seed, WALK), users, offsets, *self._law)
        items = to_keys(items, spread_keys=self.spread_keys)
        dense: dict[str, Tensor | Jagged] = {}
        labels = None
        if held_out:
            targets = offsets[1:] - 1
            labels = torch.from_numpy(items[targets])
            items, times, offsets = (
                np.delete(items, targets),
                np.delete(times, targets),
                offsets - np.arange(len(offsets)),
            )
            dense[SEEN] = dataset.jagged(items, offsets)
            # The latest of those that are one item too long by now.
            lengths = np.diff(offsets)
            kept = np.arange(len(items)) >= np.repeat(offsets[1:] - self.max_length, lengths)
            items, times, offsets = items[kept], times[kept], dataset.offsets_of(np.minimum(lengths, self.max_length))
        picks, pick_offsets = draw_negatives(
            stream_of(seed, epoch, dataset.SPLITS.index(split), _NEGATIVES),
            users,
            np.diff(offsets),
            self.num_items,
            num_negatives=self.num_negatives,
            per=self.negatives_per,
        )
        dense["timestamps"] = dataset.jagged(times, offsets.copy())
        return Batch(
            keys={
                "history": dataset.jagged(items, offsets),
                "negatives": dataset.jagged(to_keys(picks, spread_keys=self.spread_keys), pick_offsets),
            },
            dense=dense,
            labels=labels,
        )


@kernel
def walks(
    stream: np.uint64,
    users: np.ndarray,
    offsets: np.ndarray,
    num_items: int,
    skew: float,
    num_topics: int,
    num_tastes: int,
    repeats: float,
    loyalty: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The first items of each user, and their seconds: a longer walk of a user begins with the shorter one."""
    per_topic = (num_items + num_topics - 1) // num_topics
    inside, anywhere = law_reach(per_topic, skew), law_reach(num_items, skew)
    items, times = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for u in range(len(users)):
        state = sample_state(stream, users[u])
        second = _FIRST_SECOND + np.int64(uniform(state, 0) * 1e6)
        first_taste, topic = 1, 0
        draw = first_taste + num_tastes
        for where in range(offsets[u], offsets[u + 1]):
            begins = where == offsets[u] or uniform(state, draw) * _SESSION < 1.0
            if begins:
                taste = min(int(uniform(state, draw + 1) * num_tastes), num_tastes - 1)
                topic = min(int(uniform(state, first_taste + taste) * num_topics), num_topics - 1)
            kind, which = uniform(state, draw + 2), uniform(state, draw + 3)
            recent = min(where - offsets[u], _RECENT)
            if kind < repeats and recent > 0:
                item = items[where - 1 - min(int(which * recent), recent - 1)]
            elif (kind - repeats) < loyalty * (1.0 - repeats):
                item = topic + num_topics * power_law(which, per_topic, skew, inside)
                if item >= num_items:  # topics differ by one item when the division leaves a rest
                    item -= num_topics
            else:
                item = power_law(which, num_items, skew, anywhere)
            second += 1 + np.int64(-np.log1p(-uniform(state, draw + 4)) * (_AWAY if begins else _WATCHED))
            items[where], times[where] = item, second
            draw += 5
    return items, times

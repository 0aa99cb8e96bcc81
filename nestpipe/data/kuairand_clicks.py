"""KuaiRandClicks: drawn histories as KuaiRandLike has them, and for each user a list of what was shown, clicked or not."""

from __future__ import annotations

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.draws import law_reach, power_law, sample_state, stream_of, to_keys, uniform
from nestpipe.data.impressions import impressions
from nestpipe.data.kuairand_like import WALK, KuaiRandLike, walks
from nestpipe.kernels.jit import kernel

_PASSED, _SHUFFLE = 10, 11  # streams, beside those of KuaiRandLike
_TRIES = 8


class KuaiRandClicks(KuaiRandLike):
    """A log of `num_users` users for rankers: the histories of KuaiRandLike, whose lengths have a heavy tail, and behind each a
    list of impressions. Every sample is a function of (seed, user) alone.

    keys["history"], keys["candidates"], dense["timestamps"] and dense["now"] in seconds, labels: 1 clicked, 0 passed over.

    Clicked are the user's next `num_clicked` items; `now` is when the first of them is watched. Passed over are `num_passed`
    items as another user would watch them: of any topic, by popularity, none of the clicked ones. So how often an item is shown
    tells nothing of whether it is clicked, and a model without the history has an AUC of 0.5.

    train, valid, test: as a user goes on. The clicked of "train" are in the history of "valid", those of "valid" in that of
        "test"; of a history longer than `max_length` the latest items.

    For the other arguments see KuaiRandLike.
    """

    features = ("history", "candidates")
    has_lists = True

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
        num_clicked: int = 4,
        num_passed: int = 12,
        num_evaluated: int = 2_000,
        spread_keys: bool = False,
        seed: int = 0,
    ) -> None:
        dataset.check_at_least(num_clicked=(num_clicked, 1), num_passed=(num_passed, 0))
        self.num_clicked, self.num_passed = num_clicked, num_passed
        super().__init__(
            num_users=num_users,
            num_items=num_items,
            skew=skew,
            mean_length=mean_length,
            min_length=min_length,
            max_length=max_length,
            num_topics=num_topics,
            num_tastes=num_tastes,
            repeats=repeats,
            loyalty=loyalty,
            num_negatives=0,
            num_evaluated=num_evaluated,
            spread_keys=spread_keys,
            seed=seed,
        )

    def lengths(self, split: str = "train") -> np.ndarray:
        return np.minimum(self._lengths + dataset.SPLITS.index(split) * self.num_clicked, self.max_length)

    def samples(self, split: str, users: np.ndarray, *, seed: int, epoch: int = 0) -> Batch:
        """These users, in this order: any rank can make any sample. (A log is the same at every epoch.)"""
        place = dataset.SPLITS.index(split)
        offsets = dataset.offsets_of(self._lengths[users] + (place + 1) * self.num_clicked)
        items, times = walks(stream_of(self.seed, WALK), users, offsets, *self._law)
        first_clicked = offsets[1:] - self.num_clicked
        where = first_clicked[:, None] + np.arange(self.num_clicked)
        clicked = items[where]
        passed = _passed(
            stream_of(self.seed, _PASSED, place), users, clicked, self.num_passed, *self._law[:3], self._law[5]
        )
        candidates, labels = impressions(
            stream_of(self.seed, _SHUFFLE, place), users, _lists(self._keys(clicked)), _lists(self._keys(passed))
        )
        # The latest items before the first clicked one.
        at = np.arange(len(items))
        behind, before = (
            np.repeat(ends, np.diff(offsets)) for ends in (first_clicked, first_clicked - self.max_length)
        )
        kept = (at < behind) & (at >= before)
        kept_offsets = dataset.offsets_of(self.lengths(split)[users])
        return Batch(
            keys={"history": dataset.jagged(self._keys(items[kept]), kept_offsets), "candidates": candidates},
            dense={
                "timestamps": dataset.jagged(times[kept], kept_offsets.copy()),
                "now": torch.from_numpy(times[first_clicked]),
            },
            labels=labels,
        )

    def _keys(self, items: np.ndarray) -> np.ndarray:
        return to_keys(items, spread_keys=self.spread_keys)


def _lists(keys_BN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and offsets of lists of one length."""
    return keys_BN.ravel(), np.arange(len(keys_BN) + 1) * keys_BN.shape[1]


@kernel
def _passed(
    stream: np.uint64,
    users: np.ndarray,
    clicked: np.ndarray,
    num_passed: int,
    num_items: int,
    skew: float,
    num_topics: int,
    loyalty: float,
) -> np.ndarray:
    """[len(users), num_passed] items by the law of walks, but of any topic; what the user clicked is drawn again."""
    per_topic = (num_items + num_topics - 1) // num_topics
    inside, anywhere = law_reach(per_topic, skew), law_reach(num_items, skew)
    out = np.empty((len(users), num_passed), np.int64)
    for u in range(len(users)):
        state = sample_state(stream, users[u])
        draw = 0
        for place in range(num_passed):
            item = np.int64(0)
            for _ in range(_TRIES):
                kind, which = uniform(state, draw), uniform(state, draw + 1)
                if kind < loyalty:
                    topic = min(int(uniform(state, draw + 2) * num_topics), num_topics - 1)
                    item = topic + num_topics * power_law(which, per_topic, skew, inside)
                    if item >= num_items:
                        item -= num_topics
                else:
                    item = power_law(which, num_items, skew, anywhere)
                draw += 3
                if not (clicked[u] == item).any():
                    break
            out[u, place] = item
    return out

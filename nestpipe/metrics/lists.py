"""Metrics of a list of candidates for each sample: NDCG@k, Recall@k, MAP@k, MRR; and AUC by list or by group.

Equal scores count as the mean over all their orders: the order within a list means nothing. Scores are compared as float32.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Jagged
from nestpipe.metrics.merging import (
    FIXED_POINT,
    check_binary,
    check_cut,
    check_pairs,
    deal,
    fixed_sum,
    merging,
    sum_over_workers,
    weighted_sum,
)


class _OfLists(abc.ABC):
    """The mean of a number from 0 to 1 over the lists that have one."""

    takes_lists = True

    def __init__(self, k: int | None) -> None:
        check_cut(type(self).__name__, k)
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._gain = self._count = 0

    def update(self, predictions: Jagged, labels: Jagged) -> None:
        """Any scores, and labels, one for each candidate of each sample."""
        gain_B, defined_B = self._of_each(predictions, labels)
        self._gain += fixed_sum(gain_B[defined_B])
        self._count += int(defined_B.sum())

    @abc.abstractmethod
    def _of_each(self, predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray]:
        """Of each sample, and whether it has one."""

    def compute(self, *, group: Any = None) -> float:
        gain, count = sum_over_workers([self._gain, self._count], group)
        return gain / (count * FIXED_POINT) if count else math.nan


class ListNDCG(_OfLists):
    """NDCG@k of lists: the mean, over samples with a positive, of DCG@k over that of the best order.

    A candidate counts its label (of at least 0) / log2(1 + rank), 0 beyond the first k.
    """

    def __init__(self, k: int) -> None:
        super().__init__(k)

    def _of_each(self, predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray]:
        scores, gains, sample = _checked_lists(predictions, labels)
        if len(gains) and gains.min() < 0:
            raise ValueError(f"ListNDCG: label {gains.min()} is below 0; give clicks or ratings")
        reached, best = (_dcg(by, gains, sample, len(labels), self.k) for by in (scores, gains))
        return np.divide(reached, best, out=np.zeros(len(labels)), where=best > 0), best > 0


class ListRecall(_OfLists):
    """Recall@k of lists: the mean, over samples with a positive, of the share of its positives among the first k."""

    def __init__(self, k: int) -> None:
        super().__init__(k)

    def _of_each(self, predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray]:
        places = _places("ListRecall", predictions, labels)
        found = np.where(places.rank < self.k, places.chance, 0.0)
        reached = np.bincount(places.sample, found, minlength=len(labels))
        return reached / np.maximum(places.positives_B, 1), places.positives_B > 0


class ListMAP(_OfLists):
    """MAP@k of lists: the mean, over samples with a positive, of average precision: the precision at the rank of each positive
    among the first k, summed, over the number of positives (over k, if there are more of them). Without k: of the whole list."""

    def __init__(self, k: int | None = None) -> None:
        super().__init__(k)

    def _of_each(self, predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray]:
        places = _places("ListMAP", predictions, labels)
        # Where a positive stands at this place, the others of its level are spread evenly over the places beside it.
        others = places.inside * (places.positives - 1) / np.maximum(places.size - 1, 1)
        precision = places.chance * (places.ahead + 1 + others) / (places.rank + 1)
        k = self.k or len(places.rank) + 1
        reached = np.bincount(places.sample, np.where(places.rank < k, precision, 0.0), minlength=len(labels))
        return reached / np.clip(places.positives_B, 1, k), places.positives_B > 0


class ListMRR(_OfLists):
    """MRR of lists: the mean, over samples with a positive, of 1 / rank of the first; with k, 0 beyond the first k."""

    def __init__(self, k: int | None = None) -> None:
        super().__init__(k)

    def _of_each(self, predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray]:
        places = _places("ListMRR", predictions, labels)
        # The highest level with a positive decides: at its j-th place, if those before have none.
        first = np.flatnonzero((places.inside == 0) & (places.positives > 0) & (places.ahead == 0))
        sample, size, positives = places.sample[first], places.size[first], places.positives[first]
        reached_B, none_yet = np.zeros(len(labels)), np.ones(len(first))
        for j in range(int((size - positives).max(initial=-1)) + 1):
            here = j <= size - positives
            chance = np.divide(positives, size - j, out=np.zeros(len(first)), where=here)
            rank = places.rank[first] + j
            counts = here if self.k is None else here & (rank < self.k)
            reached_B[sample] += np.where(counts, none_yet * chance / (rank + 1), 0.0)
            none_yet *= 1 - chance
        return reached_B, places.positives_B > 0


class GAUC:
    """AUC of each list, or of each group of samples, averaged with its number of candidates (or samples) as weight, over
    those with positives and negatives.

    group: what samples are grouped by, a user say, wherever they are: the name of a dense input of the batch with a whole number
        for each sample, or of a feature with one key for each. None: candidates of one list are a group. By group it keeps 13
        bytes per sample until `compute`, which deals groups out to workers.
    """

    def __init__(self, group: str | None = None) -> None:
        self.group, self.takes_lists = group, group is None
        self.reset()

    def reset(self) -> None:
        self._won = self._count = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, predictions: Tensor | Jagged, labels: Tensor | Jagged, groups: Tensor | None = None) -> None:
        """Any scores, compared as float32, and labels of 0 or 1: a Jagged of both, one list for each sample; or [B] of both
        and the group of each sample, any whole numbers."""
        if self.group is None:
            scores, gains, sample = _checked_lists(predictions, labels)
            self._add(scores, _binary("GAUC", gains, sample), sample)
            return
        if isinstance(predictions, Jagged) or isinstance(labels, Jagged):
            raise ValueError("GAUC by group takes predictions and labels [B]; give the values of the lists, end to end")
        check_pairs(predictions, labels)
        if groups is None or groups.shape != labels.shape or groups.is_floating_point():
            got = "none" if groups is None else f"{groups.dtype} of shape {tuple(groups.shape)}"
            raise ValueError(f"GAUC: groups must be whole numbers, one for each of {len(labels)} samples, got {got}")
        positive = check_binary("GAUC", labels)
        kept = predictions.detach().to("cpu", torch.float32), positive.to("cpu", torch.uint8)
        self._kept.append((*kept, groups.to("cpu", torch.int64)))

    def compute(self, *, group: Any = None) -> float:
        won, count = self._won, self._count
        if self.group is not None:
            kinds = (torch.float32, torch.uint8, torch.int64)
            columns = [
                torch.cat([torch.empty(0, dtype=kind), *(part[place] for part in self._kept)])
                for place, kind in enumerate(kinds)
            ]
            if merging(group):  # all samples of a group to one worker
                columns = deal(columns[2] % torch.distributed.get_world_size(group), columns, group)
            scores, positive, groups = (column.numpy() for column in columns)
            won, count = _won(scores, positive == 1, np.unique(groups, return_inverse=True)[1])
        won, count = sum_over_workers([won, count], group)
        return won / (count * FIXED_POINT) if count else math.nan

    def _add(self, scores: np.ndarray, positive: np.ndarray, sample: np.ndarray) -> None:
        won, count = _won(scores, positive, sample)
        self._won += won
        self._count += count


def _won(scores: np.ndarray, positive: np.ndarray, sample: np.ndarray) -> tuple[int, int]:
    """The AUC of each group that has one, times its size, summed in fixed point; and the sum of these sizes. sample: the group of
    each score, 0, 1, 2, ..."""
    level, order = _levels(scores, sample)
    num_groups = int(sample.max(initial=-1)) + 1
    positives = np.bincount(level, positive[order]).astype(np.int64)
    negatives = np.bincount(level).astype(np.int64) - positives
    of_level = sample[order][np.flatnonzero(np.diff(level, prepend=-1))]
    # Levels of a group run from its highest score down: behind are the negatives that a positive is above.
    lost = np.cumsum(negatives)
    total = np.bincount(of_level, negatives, minlength=num_groups).astype(np.int64)
    behind = np.cumsum(total)[of_level] - lost
    won_twice = np.bincount(of_level, positives * (2 * behind + negatives), minlength=num_groups)
    pairs = np.bincount(of_level, positives, minlength=num_groups) * total
    defined = pairs > 0
    counts = np.bincount(sample, minlength=num_groups)[defined]
    return weighted_sum(won_twice[defined] / (2 * pairs[defined]), counts), int(counts.sum())


@dataclasses.dataclass(frozen=True)
class _Places:
    """The places of all lists, one list after the other, each by falling score; equal scores are a level.

    rank: of the place in its list, from 0. inside: its number in its level. size, positives: of its level. ahead: positives
    of its list in higher levels. chance: that a positive stands at the place. positives_B: of each list.
    """

    sample: np.ndarray
    rank: np.ndarray
    inside: np.ndarray
    size: np.ndarray
    positives: np.ndarray
    ahead: np.ndarray
    positives_B: np.ndarray

    @property
    def chance(self) -> np.ndarray:
        return self.positives / self.size


def _places(metric: str, predictions: Jagged, labels: Jagged) -> _Places:
    scores, gains, sample = _checked_lists(predictions, labels)
    positive = _binary(metric, gains, sample)
    level, order = _levels(scores, sample)
    sample, positive = sample[order], positive[order]
    rank = _ranks(sample, len(labels))
    starts = np.flatnonzero(np.diff(level, prepend=-1))
    positives_B = np.bincount(sample, positive, minlength=len(labels)).astype(np.int64)
    positives = np.bincount(level, positive).astype(np.int64)
    before = np.cumsum(positives) - positives  # of all lists so far
    before_B = np.cumsum(positives_B) - positives_B
    return _Places(
        sample=sample,
        rank=rank,
        inside=rank - rank[starts][level],
        size=np.bincount(level)[level],
        positives=positives[level],
        ahead=before[level] - before_B[sample],
        positives_B=positives_B,
    )


def _binary(metric: str, gains: np.ndarray, sample: np.ndarray) -> np.ndarray:
    wrong = (gains != 0) & (gains != 1)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"{metric}: label {gains[place]} of sample {int(sample[place])} is neither 0 nor 1; binarize it"
        )
    return gains == 1


def _checked_lists(predictions: Tensor | Jagged, labels: Tensor | Jagged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels, and the sample of each."""
    if not isinstance(predictions, Jagged) or not isinstance(labels, Jagged):
        raise ValueError("predictions and labels must both be a Jagged, one list per sample")
    if not torch.equal(predictions.offsets.cpu(), labels.offsets.cpu()):
        raise ValueError("a sample has another number of predictions than of labels")
    check_pairs(predictions.values, labels.values)
    scores = predictions.values.detach().to("cpu", torch.float32).numpy()
    return scores, labels.values.cpu().double().numpy(), labels.sample_ids().cpu().numpy()


def _levels(scores: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidates by sample and falling score: a number for each score of each sample, and which candidate stands there."""
    order = np.lexsort((-scores, sample))
    scores, sample = scores[order], sample[order]
    new = np.ones(len(order), bool)
    new[1:] = (scores[1:] != scores[:-1]) | (sample[1:] != sample[:-1])  # no difference: infinite scores are equal too
    return np.cumsum(new) - 1, order


def _ranks(sample: np.ndarray, num_samples: int) -> np.ndarray:
    """The place of each in its list, from 0; lists stand one after the other."""
    return np.arange(len(sample)) - np.searchsorted(sample, np.arange(num_samples))[sample]


def _dcg(scores: np.ndarray, gains: np.ndarray, sample: np.ndarray, num_samples: int, k: int | None) -> np.ndarray:
    """Of each sample, [B], in the order of its scores."""
    level, order = _levels(scores, sample)
    rank = _ranks(sample[order], num_samples)
    discount = np.where(rank < (k or len(rank) + 1), 1 / np.log2(2.0 + rank), 0.0)
    shared = np.bincount(level, discount) / np.maximum(np.bincount(level), 1)
    return np.bincount(sample[order], gains[order] * shared[level], minlength=num_samples)

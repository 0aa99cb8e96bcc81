"""AUC, normalized entropy, HR@k, NDCG@k, and those of lists: exact, and the same number however samples are spread over workers.

Each metric collects its own worker's state in `update` and merges over torch.distributed in `compute`, which every
worker of the group must then call. `reset` forgets what was collected; `Trainer.evaluate` begins with it. What is merged
are whole numbers (counts, and sums in fixed point), so neither the number of workers nor the order of batches can change
the last digit. A value that is not defined (no samples, one class only) is NaN.

Shape legend: B samples, N candidates, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.batch import Jagged

__all__ = ["AUC", "GAUC", "NDCG", "HitRate", "ListNDCG", "NormalizedEntropy"]

# Fixed point: 2**-40 is far below what a loss of float32 predictions means, and integers add up in any order.
FIXED_POINT = 2**40
EPSILON = 1e-12
SEEN_TARGETS = ("rank", "miss", "skip")  # what becomes of a target that its user has had before


class AUC:
    """Probability that a positive is ranked above a negative, ties counting one half. Keeps 5 bytes per sample."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Any scores [B], compared as float32, and labels [B] of 0 or 1."""
        _check_pairs(predictions, labels)
        positive = labels == 1
        wrong = ~(positive | (labels == 0))
        if wrong.any():
            sample = int(wrong.nonzero()[0])
            raise ValueError(f"AUC: label {labels[sample].item()} of sample {sample} is neither 0 nor 1; binarize it")
        self._predictions.append(predictions.detach().to("cpu", torch.float32))
        self._labels.append(positive.to("cpu", torch.uint8))

    def compute(self, *, group: Any = None) -> float:
        predictions = _gather(torch.cat([torch.empty(0), *self._predictions]), group)
        positive = _gather(torch.cat([torch.empty(0, dtype=torch.uint8), *self._labels]), group).to(torch.int64)
        # Equal scores become one level; counts per level are integers, so only the last division is rounded.
        levels, level = predictions.unique(return_inverse=True)
        positives = torch.bincount(level, weights=positive.double(), minlength=len(levels)).to(torch.int64)
        negatives = torch.bincount(level, minlength=len(levels)) - positives
        below = negatives.cumsum(0) - negatives
        won_twice = int((positives * (2 * below + negatives)).sum())
        pairs = int(positives.sum()) * int(negatives.sum())
        return won_twice / (2 * pairs) if pairs else math.nan


class NormalizedEntropy:
    """Average log loss divided by the entropy of the average label: below 1 is better than predicting the base rate.

    Predictions are clipped to [1e-12, 1 - 1e-12]; labels lie anywhere in [0, 1].
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._loss = self._positive = self._count = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Probabilities [B] and labels [B]."""
        _check_pairs(predictions, labels)
        for what, values in (("prediction", predictions), ("label", labels)):
            wrong = ~((values >= 0) & (values <= 1))
            if wrong.any():
                sample = int(wrong.nonzero()[0])
                raise ValueError(
                    f"NormalizedEntropy: {what} {values[sample].item()} of sample {sample} is outside [0, 1]; "
                    f"give probabilities, not logits"
                )
        # NumPy and not torch: there the logarithm of a value does not depend on its place in the array, which decides
        # whether a vector or a scalar routine computes it.
        p = predictions.detach().double().cpu().numpy().clip(EPSILON, 1 - EPSILON)
        y = labels.double().cpu().numpy()
        self._loss += _fixed_sum(-(y * np.log(p) + (1 - y) * np.log(1 - p)))
        self._positive += _fixed_sum(y)
        self._count += len(y)

    def compute(self, *, group: Any = None) -> float:
        loss, positive, count = _sum_over_workers([self._loss, self._positive, self._count], group)
        if not 0 < positive < count * FIXED_POINT:
            return math.nan
        rate = positive / (count * FIXED_POINT)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return loss / (count * FIXED_POINT) / entropy


class HitRate:
    """HR@k: the share of targets among the first k."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._hits = self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Ranks [B] of the targets, 1 for the first."""
        _check_ranks(ranks)
        self._hits += int((ranks <= self.k).sum())
        self._count += len(ranks)

    def compute(self, *, group: Any = None) -> float:
        hits, count = _sum_over_workers([self._hits, self._count], group)
        return hits / count if count else math.nan


class NDCG:
    """NDCG@k for one target per sample: the mean of 1 / log2(1 + rank), 0 beyond the first k."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._at_rank = [0] * self.k
        self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Ranks [B] of the targets, 1 for the first."""
        _check_ranks(ranks)
        hits = ranks[ranks <= self.k].cpu()
        more = torch.bincount(hits - 1, minlength=self.k).tolist()
        self._at_rank = [a + b for a, b in zip(self._at_rank, more, strict=True)]
        self._count += len(ranks)

    def compute(self, *, group: Any = None) -> float:
        count, *at_rank = _sum_over_workers([self._count, *self._at_rank], group)
        gain = math.fsum(hits / math.log2(2 + place) for place, hits in enumerate(at_rank))
        return gain / count if count else math.nan


class ListNDCG:
    """NDCG@k of lists: the mean, over samples with a positive, of DCG@k over that of the best order.

    A candidate counts its label / log2(1 + rank), 0 beyond the first k. Equal scores share the mean of their ranks' discounts:
    the order within a list means nothing. Scores are compared as float32.
    """

    takes_lists = True

    def __init__(self, k: int) -> None:
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._gain = self._count = 0

    def update(self, predictions: Jagged, labels: Jagged) -> None:
        """Any scores, and labels of at least 0, one for each candidate of each sample."""
        scores, gains, sample = _checked_lists(predictions, labels)
        if len(gains) and gains.min() < 0:
            raise ValueError(f"ListNDCG: label {gains.min()} is below 0; give clicks or ratings")
        of_samples = [_dcg(by, gains, sample, len(labels), self.k) for by in (scores, gains)]
        reached, best = of_samples
        defined = best > 0
        self._gain += _fixed_sum(reached[defined] / best[defined])
        self._count += int(defined.sum())

    def compute(self, *, group: Any = None) -> float:
        gain, count = _sum_over_workers([self._gain, self._count], group)
        return gain / (count * FIXED_POINT) if count else math.nan


class GAUC:
    """AUC of each list, averaged with its number of candidates as weight, over lists with positives and negatives."""

    takes_lists = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._won = self._count = 0

    def update(self, predictions: Jagged, labels: Jagged) -> None:
        """Any scores, compared as float32, and labels of 0 or 1, one for each candidate of each sample."""
        scores, gains, sample = _checked_lists(predictions, labels)
        wrong = (gains != 0) & (gains != 1)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"GAUC: label {gains[place]} of sample {int(sample[place])} is neither 0 nor 1; binarize it"
            )
        level, order = _levels(scores, sample)
        positives = np.bincount(level, gains[order] == 1, minlength=0).astype(np.int64)
        negatives = np.bincount(level).astype(np.int64) - positives
        of_level = sample[order][np.flatnonzero(np.diff(level, prepend=-1))]
        # Levels of a sample run from its highest score down: behind are the negatives that a positive is above.
        lost = np.cumsum(negatives)
        total = np.bincount(of_level, negatives, minlength=len(labels)).astype(np.int64)
        behind = np.cumsum(total)[of_level] - lost
        won_twice = np.bincount(of_level, positives * (2 * behind + negatives), minlength=len(labels))
        pairs = np.bincount(of_level, positives, minlength=len(labels)) * total
        defined = pairs > 0
        counts = labels.lengths.cpu().numpy()[defined]
        # Python's integers: a long list times a large weight does not fit 64 bits of fixed point.
        shares = won_twice[defined] / (2 * pairs[defined])
        self._won += sum(int(c) * int(s) for c, s in zip(counts, np.rint(shares * FIXED_POINT), strict=True))
        self._count += int(counts.sum())

    def compute(self, *, group: Any = None) -> float:
        won, count = _sum_over_workers([self._won, self._count], group)
        return won / (count * FIXED_POINT) if count else math.nan


def _checked_lists(predictions: Jagged, labels: Jagged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels, and the sample of each."""
    if not isinstance(predictions, Jagged) or not isinstance(labels, Jagged):
        raise ValueError("predictions and labels must both be a Jagged, one list per sample")
    if not torch.equal(predictions.offsets.cpu(), labels.offsets.cpu()):
        raise ValueError("a sample has another number of predictions than of labels")
    _check_pairs(predictions.values, labels.values)
    scores = predictions.values.detach().to("cpu", torch.float32).numpy()
    return scores, labels.values.cpu().double().numpy(), labels.sample_ids().cpu().numpy()


def _levels(scores: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidates by sample and falling score: a number for each score of each sample, and which candidate stands there."""
    order = np.lexsort((-scores, sample))
    new = np.diff(scores[order], prepend=np.nan) != 0
    new |= np.diff(sample[order], prepend=-1) != 0
    return np.cumsum(new) - 1, order


def _dcg(scores: np.ndarray, gains: np.ndarray, sample: np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """Of each sample, [B], in the order of its scores."""
    level, order = _levels(scores, sample)
    starts = np.searchsorted(sample[order], np.arange(num_samples))
    rank = np.arange(len(order)) - starts[sample[order]]
    discount = np.where(rank < k, 1 / np.log2(2.0 + rank), 0.0)
    shared = np.bincount(level, discount) / np.maximum(np.bincount(level), 1)
    return np.bincount(sample[order], gains[order] * shared[level], minlength=num_samples)


def target_ranks(
    scores_BN: Tensor, *, candidate_keys: Tensor, target_keys: Tensor, exclude: Jagged | None = None
) -> Tensor:
    """[B]: 1 + the candidates ahead of each sample's target: those with a higher score, or the same and a smaller key.

    `candidate_keys` [N] are all different and contain every one of `target_keys` [B]. Keys in `exclude` (a sample's
    history, say) are left out of its ranking, except the target itself.
    """
    if torch.isnan(scores_BN).any():
        sample = int(torch.isnan(scores_BN).any(1).nonzero()[0])
        raise ValueError(f"scores of sample {sample} hold NaN, so it has no ranking; look at the model's weights")
    column_of = _ColumnOf(candidate_keys)
    target_B, known = column_of(target_keys)
    if not known.all():
        key = int(target_keys[~known][0])
        raise ValueError(f"target key {key} is not among the {len(candidate_keys)} candidate_keys; add it")
    target_score_B1 = scores_BN.gather(1, target_B[:, None])
    ahead_BN = scores_BN > target_score_B1
    ahead_BN |= (scores_BN == target_score_B1) & (candidate_keys < target_keys[:, None])
    if exclude is not None:
        column, known = column_of(exclude.values)
        ahead_BN[exclude.sample_ids()[known], column[known]] = False
    return 1 + ahead_BN.sum(1)


def in_lists(keys_B: Tensor, lists: Jagged) -> Tensor:
    """[B] of bool: whether each sample's key stands in its list."""
    sample_ids = lists.sample_ids()
    inside_B = torch.zeros(len(lists), dtype=torch.bool, device=keys_B.device)
    inside_B[sample_ids[lists.values == keys_B[sample_ids]]] = True
    return inside_B


def rank_all(
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    queries_BD: Tensor,
    candidates_ND: Tensor,
    candidate_keys: Tensor,
    target_keys: Tensor,
    exclude: Jagged | None = None,
    chunk: int = 256,
) -> Tensor:
    """`target_ranks` of all samples, `chunk` of them at a time: never more than chunk x N scores exist.

    `score(queries, candidates)` gives [B, N], as `HSTU.score` does.
    """
    ranks = []
    for samples in torch.arange(len(queries_BD)).split(chunk):
        ranks.append(
            target_ranks(
                score(queries_BD[samples], candidates_ND),
                candidate_keys=candidate_keys,
                target_keys=target_keys[samples],
                exclude=None if exclude is None else exclude.select(samples),
            )
        )
    return torch.cat(ranks) if ranks else torch.empty(0, dtype=torch.int64)


class _ColumnOf:
    """Where a key stands among the candidates, and whether it does."""

    def __init__(self, candidate_keys: Tensor) -> None:
        self.sorted, self.order = candidate_keys.sort()
        twice = (self.sorted[1:] == self.sorted[:-1]).nonzero()
        if len(twice):
            raise ValueError(f"candidate key {int(self.sorted[twice[0, 0]])} is given more than once; make them unique")

    def __call__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.sorted):
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        place = torch.searchsorted(self.sorted, keys).clamp_(max=len(self.sorted) - 1)
        return self.order[place], self.sorted[place] == keys


def _check_pairs(predictions: Tensor, labels: Tensor) -> None:
    if predictions.ndim != 1 or predictions.shape != labels.shape:
        shapes = f"{tuple(predictions.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"predictions and labels must both be [B], got {shapes}; flatten them")
    if torch.isnan(predictions).any():
        sample = int(torch.isnan(predictions).nonzero()[0])
        raise ValueError(f"the prediction for sample {sample} is NaN; look at the model's weights")


def _check_ranks(ranks: Tensor) -> None:
    if ranks.ndim != 1 or ranks.is_floating_point() or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be a 1-d integer tensor counted from 1, got {ranks.dtype} {tuple(ranks.shape)}")


def _fixed_sum(values: np.ndarray) -> int:
    # At most 28 x 2**40 per value: the parts keep an int64 from overflowing, Python's integers take the rest.
    fixed = np.rint(values * FIXED_POINT).astype(np.int64)
    return sum(int(fixed[start : start + 2**16].sum()) for start in range(0, len(fixed), 2**16))


def _merging(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _device(group: Any) -> torch.device:
    # Accelerator backends move accelerator memory only; gloo is the one for host memory.
    accelerator = None if "gloo" in dist.get_backend(group) else torch.accelerator.current_accelerator()
    return accelerator or torch.device("cpu")


def _sum_over_workers(numbers: Sequence[int], group: Any) -> list[int]:
    """Sums of whole numbers of any size (not negative): two halves travel, so that int64 suffices."""
    if not _merging(group):
        return list(numbers)
    halves = torch.tensor([[n >> 40, n & (2**40 - 1)] for n in numbers], dtype=torch.int64, device=_device(group))
    dist.all_reduce(halves, group=group)
    return [(high << 40) + low for high, low in halves.tolist()]


def _gather(values: Tensor, group: Any) -> Tensor:
    """The values of all workers, end to end."""
    if not _merging(group):
        return values
    device, world = _device(group), dist.get_world_size(group)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(values)
    dist.all_reduce(sizes, group=group)
    padded = torch.zeros(int(sizes.max()), dtype=values.dtype, device=device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]).cpu()

"""Metrics of the rank of one target per sample among all candidates: HR@k, Recall@k, NDCG@k, MRR, MAP@k; and coverage, of what is
recommended."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.metrics.merging import FIXED_POINT, check_cut, fixed_sum, gather, sum_over_workers


class HitRate:
    """HR@k: the share of targets among the first k. With one target for each sample that is Recall@k too."""

    def __init__(self, k: int) -> None:
        check_cut(type(self).__name__, k)
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._hits = self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Ranks [B] of the targets, 1 for the first."""
        check_ranks(ranks)
        self._hits += int((ranks <= self.k).sum())
        self._count += len(ranks)

    def compute(self, *, group: Any = None) -> float:
        hits, count = sum_over_workers([self._hits, self._count], group)
        return hits / count if count else math.nan


class NDCG:
    """NDCG@k for one target per sample: the mean of 1 / log2(1 + rank), 0 beyond the first k."""

    def __init__(self, k: int) -> None:
        check_cut("NDCG", k)
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._at_rank = [0] * self.k
        self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Ranks [B] of the targets, 1 for the first."""
        check_ranks(ranks)
        hits = ranks[ranks <= self.k].cpu()
        more = torch.bincount(hits - 1, minlength=self.k).tolist()
        self._at_rank = [a + b for a, b in zip(self._at_rank, more, strict=True)]
        self._count += len(ranks)

    def compute(self, *, group: Any = None) -> float:
        count, *at_rank = sum_over_workers([self._count, *self._at_rank], group)
        gain = math.fsum(hits / math.log2(2 + place) for place, hits in enumerate(at_rank))
        return gain / count if count else math.nan


class MRR:
    """The mean of 1 / rank for one target per sample; with k, 0 beyond the first k, which is MAP@k too."""

    def __init__(self, k: int | None = None) -> None:
        check_cut("MRR", k)
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._gain = self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Ranks [B] of the targets, 1 for the first."""
        check_ranks(ranks)
        ranks_B = ranks.cpu().numpy()
        gains_B = 1 / ranks_B.astype(np.float64)
        self._gain += fixed_sum(gains_B if self.k is None else np.where(ranks_B <= self.k, gains_B, 0.0))
        self._count += len(ranks_B)

    def compute(self, *, group: Any = None) -> float:
        gain, count = sum_over_workers([self._gain, self._count], group)
        return gain / (count * FIXED_POINT) if count else math.nan


class Coverage:
    """Coverage@k: the share of the catalogue that is among the first k of at least one sample."""

    takes_top = True

    def __init__(self, k: int) -> None:
        check_cut("Coverage", k)
        self.k = k
        self.reset()

    def reset(self) -> None:
        self._keys, self._num_items = torch.empty(0, dtype=torch.int64), 0

    def update(self, keys: Tensor, num_items: int) -> None:
        """The keys that are recommended, in any shape, and how many items there are in all."""
        self._keys = torch.cat([self._keys, keys.reshape(-1).cpu()]).unique()
        self._num_items = num_items

    def compute(self, *, group: Any = None) -> float:
        num_items = int(gather(torch.tensor([self._num_items]), group).max())  # a worker may have had no samples
        shown = len(gather(self._keys, group).unique())
        return shown / num_items if num_items else math.nan


def check_ranks(ranks: Tensor) -> None:
    if ranks.ndim != 1 or ranks.is_floating_point() or (len(ranks) and int(ranks.min()) < 1):
        raise ValueError(f"ranks must be a 1-d integer tensor counted from 1, got {ranks.dtype} {tuple(ranks.shape)}")

"""Metrics of one prediction per sample: AUC, normalized entropy, log loss, calibration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.metrics.merging import (
    FIXED_POINT,
    check_binary,
    check_pairs,
    check_shares,
    fixed_sum,
    gather,
    sum_over_workers,
)

EPSILON = 1e-12


class AUC:
    """Probability that a positive is ranked above a negative, ties counting one half. Keeps 5 bytes per sample."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Any scores [B], compared as float32, and labels [B] of 0 or 1."""
        check_pairs(predictions, labels)
        positive = check_binary("AUC", labels)
        self._predictions.append(predictions.detach().to("cpu", torch.float32))
        self._labels.append(positive.to("cpu", torch.uint8))

    def compute(self, *, group: Any = None) -> float:
        predictions = gather(torch.cat([torch.empty(0), *self._predictions]), group)
        positive = gather(torch.cat([torch.empty(0, dtype=torch.uint8), *self._labels]), group).to(torch.int64)
        # Equal scores become one level; counts per level are integers, so only the last division is rounded.
        levels, level = predictions.unique(return_inverse=True)
        positives = torch.bincount(level, weights=positive.double(), minlength=len(levels)).to(torch.int64)
        negatives = torch.bincount(level, minlength=len(levels)) - positives
        below = negatives.cumsum(0) - negatives
        won_twice = int((positives * (2 * below + negatives)).sum())
        pairs = int(positives.sum()) * int(negatives.sum())
        return won_twice / (2 * pairs) if pairs else math.nan


class LogLoss:
    """Average log loss (binary cross entropy) of probabilities, each sample counting 1.

    Predictions are clipped to [1e-12, 1 - 1e-12]; labels lie anywhere in [0, 1].
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._loss = self._positive = self._count = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Probabilities [B] and labels [B]."""
        check_shares(type(self).__name__, predictions, labels)
        # NumPy and not torch: there the logarithm of a value does not depend on its place in the array, which decides
        # whether a vector or a scalar routine computes it.
        p = predictions.detach().double().cpu().numpy().clip(EPSILON, 1 - EPSILON)
        y = labels.double().cpu().numpy()
        self._loss += fixed_sum(-(y * np.log(p) + (1 - y) * np.log(1 - p)))
        self._positive += fixed_sum(y)
        self._count += len(y)

    def compute(self, *, group: Any = None) -> float:
        loss, _, count = sum_over_workers([self._loss, self._positive, self._count], group)
        return loss / (count * FIXED_POINT) if count else math.nan


class NormalizedEntropy(LogLoss):
    """Average log loss divided by the entropy of the average label: below 1 is better than predicting the base rate.

    Predictions are clipped to [1e-12, 1 - 1e-12]; labels lie anywhere in [0, 1].
    """

    def compute(self, *, group: Any = None) -> float:
        loss, positive, count = sum_over_workers([self._loss, self._positive, self._count], group)
        if not 0 < positive < count * FIXED_POINT:
            return math.nan
        rate = positive / (count * FIXED_POINT)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return loss / (count * FIXED_POINT) / entropy


class Calibration:
    """The sum of predictions over the sum of labels: above 1 the model promises more clicks than there are."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._predicted = self._happened = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Probabilities [B] and labels [B]."""
        check_shares("Calibration", predictions, labels)
        self._predicted += fixed_sum(predictions.detach().double().cpu().numpy())
        self._happened += fixed_sum(labels.double().cpu().numpy())

    def compute(self, *, group: Any = None) -> float:
        predicted, happened = sum_over_workers([self._predicted, self._happened], group)
        return predicted / happened if happened else math.nan

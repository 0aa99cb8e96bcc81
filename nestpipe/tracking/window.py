"""Window: the figures of the last steps, for a point of a curve or a line of the log."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nestpipe.batch import Jagged
from nestpipe.engine.context import StepResult

SCORED = 8192  # predictions that AUC and NE are of, the newest of the window: sorting more would be felt
EPSILON = 1e-12


class Window:
    """What training did since the window was begun: its mean loss, how fast it was, and how good predictions were.

    These are the ones that came out of forward, before their batch's update: samples that the model had not been trained on
    yet, in a first epoch. AUC and NE are of this worker's newest SCORED of them, where labels are 0 or 1 (NE: and predictions
    probabilities); over all workers they would have to be sent.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._begin()

    def _begin(self) -> None:
        self.seconds = 0.0
        self._loss = self._weight = 0.0
        self._of_tasks: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        self._samples = self._tokens = self._num_scored = 0
        self._predicted: collections.deque[tuple[Any, Any]] = collections.deque()

    def add(self, result: StepResult) -> None:
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now
        self._samples += result.samples
        self._tokens += result.tokens
        if result.weight and not result.skipped:
            self._loss += result.loss * result.weight
            self._weight += result.weight
            for task, loss in result.losses.items():
                if math.isfinite(loss):  # nan: no sample of this batch has a label for it
                    self._of_tasks[task].append(loss)
        if result.skipped:
            return
        for pair in result.predicted:
            self._predicted.append(pair)
            self._num_scored += _count(pair[1])
            while self._num_scored - _count(self._predicted[0][1]) >= SCORED:
                self._num_scored -= _count(self._predicted.popleft()[1])

    def leave_out(self) -> None:
        """The time since the last step: something else was done in it."""
        self._last = time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Those that there are, by name; a new window begins."""
        found = {"loss": self._loss / self._weight} if self._weight else {}
        found |= {f"{task}/loss": statistics.fmean(losses) for task, losses in self._of_tasks.items()}
        if self.seconds > 0:
            found["samples_per_second"] = self._samples / self.seconds
            if self._tokens:
                found["tokens_per_second"] = self._tokens / self.seconds
        found |= _judged(list(self._predicted))
        self._begin()
        return found


def _count(labels: Any) -> int:
    if isinstance(labels, Mapping):
        return max((_count(values) for values in labels.values()), default=0)
    return len(labels.values if isinstance(labels, Jagged) else labels)


def _judged(pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    """AUC and NE; of a model with several tasks, for each of them ("click/AUC")."""
    by_task: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for predictions, labels in pairs:
        for task, scores, gains in _arrays(predictions, labels):
            by_task.setdefault(task, []).append((scores, gains))
    found: dict[str, float] = {}
    for task, parts in by_task.items():
        scores, gains = (np.concatenate(part)[-SCORED:] for part in zip(*parts, strict=True))
        if np.isfinite(scores).all() and ((gains == 0) | (gains == 1)).all():
            values = {"AUC": auc(scores, gains)}
            if ((scores >= 0) & (scores <= 1)).all():
                values["NE"] = normalized_entropy(scores, gains)
            found |= {f"{task}{name}": value for name, value in values.items() if math.isfinite(value)}
    return found


def _arrays(predictions: Any, labels: Any, task: str = "") -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    if isinstance(predictions, Mapping):
        for name, values in predictions.items():
            of_task = labels.get(name) if isinstance(labels, Mapping) else labels
            if of_task is not None:
                yield from _arrays(values, of_task, f"{task}{name}/")
        return
    if isinstance(predictions, Jagged) and isinstance(labels, Jagged):
        predictions, labels = predictions.values, labels.values
    shapes = [getattr(values, "shape", None) for values in (predictions, labels)]
    if shapes[0] is not None and shapes[0] == shapes[1] and len(shapes[0]) == 1:
        yield task, predictions.float().cpu().numpy(), labels.float().cpu().numpy()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Of one worker's samples; nestpipe.metrics.AUC is that of all workers."""
    _, level = np.unique(scores, return_inverse=True)
    positives = np.bincount(level, labels)
    negatives = np.bincount(level, 1 - labels)
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else math.nan


def normalized_entropy(scores: np.ndarray, labels: np.ndarray) -> float:
    rate = float(labels.mean()) if len(labels) else 0.0
    if not 0 < rate < 1:
        return math.nan
    p = scores.astype(np.float64).clip(EPSILON, 1 - EPSILON)
    loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()
    return float(loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)))

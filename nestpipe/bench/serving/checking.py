"""Were the answers right? Some of them are compared with the full pass of the bundle, after the run, when nobody waits."""

from __future__ import annotations

import numpy as np

from nestpipe.bench.serving.driver import Driven, Order
from nestpipe.bench.serving.histories import Asked
from nestpipe.serve.messages import Ask
from nestpipe.serve.scoring import Scorer

CLOSE = 1e-5  # of the largest score of a request: what another order of sums may change


def ask(asked: Asked) -> Ask:
    """The ranking request of a visit, as an instance takes it."""
    return Ask(asked.user, asked.history, asked.candidates, times=asked.times, now=asked.now)


def differences(order: Order, driven: Driven, scorer: Scorer) -> list[float]:
    """Of the answers whose scores were kept: how far they are from the full pass, relative to its largest score."""
    kept = {answer.number: answer.scores for answer in driven.answers if answer.scores is not None}
    histories, found = order.histories(), []
    for visit in order.visits():
        scores = kept.get(visit.number)
        if scores is not None:
            found.append(difference(scores, scorer.full_pass(ask(histories.of(visit)))))
    return found


def difference(scores: list[float], full: np.ndarray) -> float:
    """Infinity where there are more or fewer scores than candidates, or one is no number."""
    given = np.asarray(scores, np.float64)
    if given.shape != full.shape or not np.isfinite(given).all():
        return np.inf
    return float(np.abs(given - full).max() / max(np.abs(full).max(), 1e-30))

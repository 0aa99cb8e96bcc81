"""Whether a larger or a smaller value of a metric is better."""

from __future__ import annotations

import re

# By the words of a metric's name ("HR@10", "click/AUC").
LARGER_IS_BETTER = ("accuracy", "auc", "coverage", "gauc", "hr", "map", "mrr", "ndcg", "precision", "recall")
SMALLER_IS_BETTER = ("entropy", "error", "logloss", "loss", "mae", "mse", "ne", "rmse")


def direction_of(metric: str) -> str:
    """By the metric's name: "max" or "min"; ValueError if it does not say."""
    words = set(re.split(r"[^a-z]+", metric.lower()))
    larger, smaller = (bool(words & set(known)) for known in (LARGER_IS_BETTER, SMALLER_IS_BETTER))
    if larger == smaller:
        raise ValueError(
            f'whether a larger or a smaller {metric!r} is better cannot be told from its name; say so: "max" or "min" '
            f"(direction of Best, train.best_direction)"
        )
    return "max" if larger else "min"

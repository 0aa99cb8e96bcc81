"""Metrics by name, as a config has them: "AUC", "NDCG@10"; "NDCG" is NDCG@k for all k that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nestpipe.errors import did_you_mean
from nestpipe.metrics.clicks import AUC, Calibration, LogLoss, NormalizedEntropy
from nestpipe.metrics.lists import GAUC, ListMAP, ListMRR, ListNDCG, ListRecall
from nestpipe.metrics.ranks import MRR, NDCG, Coverage, HitRate

# What each kind of evaluation can tell: of a prediction for each sample, of a list of candidates for each, of a target's rank.
CLICKS: dict[str, Callable[[], Any]] = {
    "AUC": AUC,
    "NE": NormalizedEntropy,
    "LogLoss": LogLoss,
    "Calibration": Calibration,
}
LISTS: dict[str, Callable[[], Any]] = {"GAUC": GAUC, "MRR": ListMRR}
LISTS_AT: dict[str, Callable[[int], Any]] = {"NDCG": ListNDCG, "Recall": ListRecall, "MAP": ListMAP, "MRR": ListMRR}
RANKS: dict[str, Callable[[], Any]] = {"MRR": MRR}
RANKS_AT: dict[str, Callable[[int], Any]] = {
    "HR": HitRate,
    "NDCG": NDCG,
    "Recall": HitRate,  # of one target
    "MRR": MRR,
    "MAP": MRR,  # the same
    "Coverage": Coverage,
}
NAMES = tuple(dict.fromkeys((*CLICKS, *LISTS, *LISTS_AT, *RANKS, *RANKS_AT)))


def check(name: str) -> None:
    """Raises ValueError for what is no metric's name."""
    base, at, k = name.partition("@")
    if base not in NAMES:
        raise ValueError(f"metric {name!r}, {did_you_mean(base, list(NAMES))}")
    if at and base not in (*LISTS_AT, *RANKS_AT):
        raise ValueError(f"metric {name!r}: {base} is of the whole; leave {at}{k} out")
    if at and not (k.isdecimal() and int(k) >= 1):
        raise ValueError(f"metric {name!r}: write a whole number of at least 1 behind the @, as in {base}@10")


def at(ks: Sequence[int]) -> dict[str, Any]:
    """What a ranking tells unless it is asked for something else."""
    return {f"{name}@{k}": RANKS_AT[name](k) for k in ks for name in ("HR", "NDCG")}


def of_ranks(wanted: Sequence[str] | None, *, ks: Sequence[int]) -> dict[str, Any]:
    """For an evaluation that ranks one target for each sample among all items."""
    return at(ks) if wanted is None else _made(wanted, RANKS, RANKS_AT, ks, "a ranking among all items")


def of_predictions(
    wanted: Sequence[str] | None, *, ks: Sequence[int], has_lists: bool, group: str | None
) -> dict[str, Any]:
    """For an evaluation of predictions. has_lists: of a list of candidates for each sample. group: what GAUC goes by, else by
    list."""
    by_group: dict[str, Callable[[], Any]] = {} if group is None else {"GAUC": lambda: GAUC(group)}
    if wanted is None:
        wanted = ("AUC", "NE", *(("GAUC", "NDCG") if has_lists else by_group))
    if has_lists:
        return _made(wanted, CLICKS | LISTS | by_group, LISTS_AT, ks, "lists of candidates")
    if "GAUC" in wanted and group is None:
        raise ValueError(
            "metric 'GAUC' needs to know what samples are grouped by: set train.group_by to the name of a feature with one key "
            "per sample, or of a dense input of whole numbers"
        )
    return _made(wanted, CLICKS | by_group, {}, ks, "one prediction for each sample")


def _made(
    wanted: Sequence[str],
    whole: dict[str, Callable[[], Any]],
    cut: dict[str, Callable[[int], Any]],
    ks: Sequence[int],
    what: str,
) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name in wanted:
        check(name)
        base, has_k, k = name.partition("@")
        if has_k and base in cut:
            metrics[name] = cut[base](int(k))
        elif not has_k and base in whole:
            metrics[name] = whole[base]()
        elif not has_k and base in cut:
            metrics |= {f"{base}@{k}": cut[base](k) for k in ks}
        else:
            known = ", ".join(dict.fromkeys([*whole, *(f"{base}@k" for base in cut)]))
            raise ValueError(f"metric {name!r} is not one of {what}: those are {known}")
    return metrics

"""Metrics by name, for the kind of evaluation that they fit."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe import config
from nestpipe.metrics import GAUC, MRR, names


def section(**train: Any) -> config.Config:
    data, model = {"kind": "synthetic_clicks"}, {"kind": "dlrm"}
    return config.parse({"data": data, "model": model, "tables": {"f*": {"dim": 4}}, "train": train})


def test_the_metrics_of_each_kind_unless_others_are_asked_for() -> None:
    assert list(names.of_ranks(None, ks=(5, 10))) == ["HR@5", "NDCG@5", "HR@10", "NDCG@10"]
    ask = {"ks": (3,), "has_lists": False, "group": None}
    assert list(names.of_predictions(None, **ask)) == ["AUC", "NE"]
    assert list(names.of_predictions(None, **{**ask, "group": "user"})) == ["AUC", "NE", "GAUC"]
    assert list(names.of_predictions(None, **{**ask, "has_lists": True})) == ["AUC", "NE", "GAUC", "NDCG@3"]


def test_a_name_without_k_is_at_every_k_of_rank_at() -> None:
    made = names.of_ranks(["Recall", "MAP@7", "MRR", "Coverage"], ks=(5, 10))
    assert {name: getattr(metric, "k", None) for name, metric in made.items()} == {
        "Recall@5": 5,
        "Recall@10": 10,
        "MAP@7": 7,
        "MRR": None,
        "Coverage@5": 5,
        "Coverage@10": 10,
    }
    assert isinstance(made["MAP@7"], MRR)
    lists = names.of_predictions(["MRR", "MRR@4", "GAUC"], ks=(3,), has_lists=True, group=None)
    assert [lists[name].k for name in ("MRR", "MRR@4")] == [None, 4]
    by_group = names.of_predictions(["GAUC"], ks=(3,), has_lists=False, group="user")["GAUC"]
    assert isinstance(by_group, GAUC) and by_group.group == "user"


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"metrics": ["AUK"]}, r"train.metrics: metric 'AUK', .*did you mean 'AUC'"),
        ({"metrics": ["AUC@10"]}, "AUC is of the whole; leave @10 out"),
        ({"metrics": ["NDCG@0"]}, "a whole number of at least 1 behind the @, as in NDCG@10"),
        ({"metrics": ["AUC"], "group_by": "user"}, "train.group_by is for the metric GAUC"),
        ({"metrics": []}, "train.metrics"),
    ],
)
def test_a_name_that_is_none_is_told_when_the_config_is_read(train: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        section(**train)


def test_a_metric_of_another_kind_of_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="metric 'AUC' is not one of a ranking among all items: those are MRR, HR@k"):
        names.of_ranks(["AUC"], ks=(5,))
    with pytest.raises(ValueError, match="'HR@5' is not one of one prediction for each sample: those are AUC, NE"):
        names.of_predictions(["HR@5"], ks=(5,), has_lists=False, group=None)
    with pytest.raises(ValueError, match=r"'GAUC' needs to know what samples are grouped by: set train.group_by"):
        names.of_predictions(["GAUC"], ks=(5,), has_lists=False, group=None)

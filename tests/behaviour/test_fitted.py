"""Quantiles are computed once, from the training rows: a run that goes on has those of its beginning, and so have all workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from nestpipe.config import Config, parse
from nestpipe.data import Parquet
from tests.behaviour.test_resume import cut_off, train
from tests.cluster import Cluster

LEVELS = {"level": {"column": "price", "quantiles": 4}}


def write(path: Path, *, factor: float = 1.0) -> Path:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {"site": [f"s{n}" for n in draw.integers(0, 40, 400)], "price": draw.random(400) * factor}
    table = pa.table({**columns, "click": draw.integers(0, 2, 400)})
    if path.suffix == ".csv":
        pa_csv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=50)
    return path


def configured(path: Path, buckets: dict[str, Any] = LEVELS) -> Config:
    """As it is read from its file: nothing computed stands in it."""
    data = {
        "keys": ["site"],
        "dense": ["price"],
        "label": "click",
        "buckets": buckets,
        "crosses": {"x": ["site", "level"]},
    }
    return parse(
        {
            "data": {"kind": path.suffix[1:], "path": str(path), "shuffle_buffer": 64, **data},
            "model": {"kind": "dlrm", "bottom": [4], "top": [4]},
            "tables": {"*": {"dim": 4, "pooling": "sum", "lr": 0.1}},
            "train": {"batch_size": 8, "steps": 12, "checkpoint_every": 3, "keep_checkpoints": 9, "reader": "thread"},
            "schedule": {"name": "nested"},
        }
    )


def buckets_of(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "config.json").read_text())["data"]["buckets"]


def whole_and_resumed(path: Path, folder: Path) -> list[str]:
    whole = train(configured(path), folder / "whole")
    cut_off(configured(path), folder / "cut")
    resumed = train(configured(path), folder / "cut", resume=True)
    assert resumed["resumed_after"] == 6
    return [whole["digest"], resumed["digest"]]


@pytest.mark.parametrize(("name", "world"), [("clicks.parquet", 2), ("clicks.csv", 1)])
def test_a_run_with_quantiles_goes_on_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, name: str, world: int
) -> None:
    for whole, resumed in cluster.run(world, whole_and_resumed, write(tmp_path / name), tmp_path):
        assert resumed == whole
    assert len(buckets_of(tmp_path / "whole")["level"]["boundaries"]) == 3


def test_a_run_that_goes_on_keeps_its_quantiles_when_the_files_have_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks.parquet")
    cut_off(configured(path), tmp_path / "run")
    before = buckets_of(tmp_path / "run")
    write(path, factor=10.0)
    assert Parquet(path=str(path), keys=["site"], buckets=LEVELS).buckets != before
    train(configured(path), tmp_path / "run", resume=True)
    assert buckets_of(tmp_path / "run") == before


def test_a_run_does_not_go_on_with_other_buckets(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks.parquet")
    cut_off(configured(path), tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    for entries in ({"quantiles": 5}, {"boundaries": [0.5]}, {"column": "click", "quantiles": 4}):
        other = configured(path, {"level": {"column": "price", **entries}})
        with pytest.raises(ValueError, match=r"config: data.buckets is .* was trained with .*begin a new run"):
            train(other, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def train_on_a_file_of_its_own(folder: Path) -> None:
    train(configured(folder / f"{dist.get_rank()}.parquet"), folder / "run")


def test_workers_whose_files_differ_hear_of_it_before_training(cluster: Cluster, tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.parquet", factor=1.0 + rank)
    for kind, told in cluster.outcomes(2, train_on_a_file_of_its_own, tmp_path):
        assert kind == "failed" and told[0] == "ValueError"
        assert (
            "data.buckets is" in told[1] and "on worker 1" in told[1] and "must see the same training files" in told[1]
        )
    assert not (tmp_path / "run").exists()

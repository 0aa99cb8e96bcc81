"""Pages of real runs: what a run, or a script, writes is what the page reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import Feature, RowwiseAdagrad, Table, Trainer, config, run
from nestpipe.data import SyntheticClicks
from nestpipe.models import DLRM
from nestpipe.report import write
from nestpipe.report.sources import read_all
from tests.report.test_page import Parsed

CONFIG = """
[data]
kind = "synthetic_clicks"
num_features = 2
keys_per_table = 50
num_dense = 2
num_samples = 4000
num_valid_samples = 100

[model]
kind = "dlrm"
bottom = [8]
top = [8]

[tables."f*"]
dim = 4
pooling = "sum"
lr = 0.1

[train]
batch_size = 32
steps = 24
eval_every = 8
eval_split = "none"

[schedule]
name = "dbp"
"""
EVALUATION = 1.0  # seconds that each is made to take


def test_evaluation_counts_neither_for_samples_per_second_nor_for_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run.evaluate_split

    def slowly(*arguments: Any, **options: Any) -> dict[str, float]:
        time.sleep(EVALUATION)
        return original(*arguments, **options)

    monkeypatch.setattr(run, "evaluate_split", slowly)
    (tmp_path / "clicks.toml").write_text(CONFIG)
    folder = tmp_path / "run"
    begun = time.perf_counter()
    result = run.train(config.read(tmp_path / "clicks.toml"), folder=folder, json_file=None, record=True)
    took = time.perf_counter() - begun
    assert 3 * EVALUATION <= result["evaluation_seconds"] < took and result["reader"] == "thread"
    assert result["seconds"] + result["evaluation_seconds"] < took
    assert result["samples_per_second"] == pytest.approx(result["samples"] / result["seconds"])
    (read,) = read_all([folder])
    assert read.paused >= 2 * EVALUATION  # the third is after the last step
    assert sum(rank.mean_step_ms * rank.steps for rank in read.ranks) / 1e3 < took - 3 * EVALUATION
    text = Parsed(write([folder]).read_text()).text
    assert "seconds of evaluation meanwhile" in text and "without pauses" in text and "AUC (valid)" in text


def test_a_script_that_saves_its_trace_has_a_page(tmp_path: Path) -> None:
    data = SyntheticClicks(num_features=1, keys_per_table=50, num_dense=2, num_samples=4000)
    trainer = Trainer(
        DLRM(num_dense=2, features=["f0"], dim=4, bottom=[8], top=[8]),
        [Table("t", dim=4, optimizer=RowwiseAdagrad(lr=0.1))],
        [Feature("f0", table="t", pooling="sum")],
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        record=True,
    )
    trainer.fit(data.batches("train", batch_size=32, rank=0, world=1, seed=0), steps=20)
    trainer.save_trace(tmp_path)
    trainer.close()
    text = Parsed(write([tmp_path]).read_text()).text
    for piece in ("as the run of a script", "serial, 1 worker", "What to change", "What ran when", "recorded steps20"):
        assert piece in text.replace("\n", ""), piece


def test_the_page_shows_how_long_workers_wait_for_the_slowest(tmp_path: Path) -> None:
    result = {
        "schedule": "nested", "micro_batches": 2, "workers": 4, "steps": 12, "samples": 120, "seconds": 18.0,
        "samples_per_second": 6.7, "first_loss": 0.7, "last_loss": 0.25, "metrics": {}, "digest": "54fd70e8b339",
        "tables": {}, "waiting": {"measured": 0.031, "undealt": 0.472, "dealt": 0.012, "tokens": 1.05},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    text = write([tmp_path]).read_text()
    for words in ("Waiting for the slowest worker", "47.2%", "1.2%", "3.1%"):
        assert words in text

"""Our models, whole: each from a config, under every exact schedule, cut off and resumed, exported and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import load_bundle, run
from nestpipe.batch import Batch, Jagged
from nestpipe.config import Config
from nestpipe.export import export_bundle
from nestpipe.run import CHECKPOINT
from tests.behaviour.test_resume import CLICKS, SEQUENCES, assert_alike, configured, train, whole_and_resumed
from tests.cluster import Cluster
from tests.serve.trained import evaluated
from tests.test_cli import run as command

EXAMPLES = Path(__file__).parents[2] / "examples"

LISTS: dict[str, Any] = {
    "data": {"kind": "kuairand_clicks", "num_users": 600, "num_items": 60, "num_topics": 6, "mean_length": 12, "max_length": 30,
             "num_evaluated": 60},
    "model": {},
    "tables": {"item": {"dim": 8, "features": ["history", "candidates"], "lr": 0.1}},
    "train": {"batch_size": 10, "steps": 12, "checkpoint_every": 3, "keep_checkpoints": 9, "rank_at": [4]},
    "schedule": {},
}  # fmt: skip
# Entries of [model], and what [data] has otherwise; dropout, so that what a run draws counts as well.
CLICK_MODELS: dict[str, dict[str, Any]] = {
    "deepfm": {"kind": "deepfm", "deep": [6], "dropout": 0.1},
    "dcn": {"kind": "dcn", "deep": [6], "rank": 3, "dropout": 0.1},
}
MODELS = (*CLICK_MODELS, "mmoe", "din", "sasrec", "sasrec_softmax")


def config_of(model: str, **sections: dict[str, Any]) -> Config:
    data: dict[str, Any] = {}
    if model in CLICK_MODELS:
        base, entries = CLICKS, CLICK_MODELS[model]
    elif model == "mmoe":
        tasks = ["click", "like"]
        base, entries, data = CLICKS, {"kind": "mmoe", "tasks": tasks, "expert": [6], "tower": []}, {"tasks": tasks}
    elif model == "din":
        base, entries = LISTS, {"kind": "din", "attention": [6], "top": [6], "dropout": 0.1}
    elif model == "sasrec":
        base, entries, data = SEQUENCES, {"kind": "sasrec"}, {"num_negatives": 2, "negatives_per": "position"}
    else:
        base, entries = SEQUENCES, {"kind": "sasrec", "loss": "softmax", "num_heads": 2}
    base = {**base, "model": {}}  # without the options of another model
    return configured(base, **{**sections, "model": entries, "data": data | sections.get("data", {})})


def digests(model: str) -> set[str]:
    found = set()
    for schedule in ("serial", "dbp", "fwp", "nested"):
        config = config_of(model, schedule={"name": schedule, "micro_batches": 3})
        trainer, built = run.make_trainer(config, storage=Path("unused"))
        with trainer:
            batches = built.data.batches("train", batch_size=8, rank=trainer.rank, world=trainer.world, seed=0)
            assert trainer.fit(batches, steps=4).steps == 4
            found.add(trainer.digest())
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_gives_the_same_bits_on_two_workers(cluster: Cluster, model: str) -> None:
    first, second = cluster.run(2, digests, model)
    assert first == second and len(first) == 1


@pytest.mark.parametrize("model", [*CLICK_MODELS, "mmoe", "din", "sasrec"])
def test_a_run_that_is_cut_off_goes_on_with_the_same_bits(tmp_path: Path, model: str) -> None:
    config = config_of(model, train={"steps": 12}, schedule={"name": "nested", "micro_batches": 2})
    assert_alike(whole_and_resumed(config, tmp_path))


@pytest.mark.parametrize("model", [*CLICK_MODELS, "din"])
def test_a_model_learns_and_once_exported_predicts_what_the_trainer_does(tmp_path: Path, model: str) -> None:
    config = config_of(
        model,
        data={"num_users": 4_000} if model == "din" else {"num_samples": 40_000, "num_test_samples": 1_000},
        train={"steps": 250, "batch_size": 30 if model == "din" else 64, "checkpoint_every": 0, "dense_lr": 1e-2},
    )
    auc = train(config, tmp_path / "run")["metrics"]["AUC"]
    assert auc > (0.65 if model == "din" else 0.78)  # 0.5 if nothing was learned
    export_bundle(tmp_path / "run", tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    trainer, built = run.make_trainer(config, storage=tmp_path / "storage")
    with trainer:
        trainer.load(tmp_path / "run" / CHECKPOINT)
        batches = list(built.data.batches("test", batch_size=16, rank=0, world=1, seed=0))[:3]
        expected = evaluated(trainer, batches)
    for batch, predictions in zip(batches, expected, strict=True):
        for given in (batch, Batch(batch.keys, batch.dense)):
            assert torch.equal(_values(bundle.predict(given)), _values(predictions))


def test_mmoe_learns_every_task_and_once_exported_predicts_each(tmp_path: Path) -> None:
    config = config_of(
        "mmoe",
        data={"num_samples": 40_000, "num_test_samples": 1_000},
        train={"steps": 250, "batch_size": 64, "checkpoint_every": 0, "dense_lr": 1e-2},
    )
    metrics = train(config, tmp_path / "run")["metrics"]
    assert all(metrics[f"{task}/AUC"] > 0.7 for task in ("click", "like")), metrics
    export_bundle(tmp_path / "run", tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    trainer, built = run.make_trainer(config, storage=tmp_path / "storage")
    with trainer:
        trainer.load(tmp_path / "run" / CHECKPOINT)
        batch = next(iter(built.data.batches("test", batch_size=16, rank=0, world=1, seed=0)))
        rows = {name: trainer.rows(name, batch.keys[name].values) for name in batch.keys}
        pooled = {name: batch.keys[name].like(part).sum() for name, part in rows.items()}
        with torch.no_grad():
            expected = trainer.model.eval()(batch, pooled).predictions
    predicted = bundle.predict(Batch(batch.keys, batch.dense))
    assert list(predicted) == ["click", "like"]
    for task, predictions in predicted.items():
        torch.testing.assert_close(predictions, expected[task], rtol=1e-5, atol=1e-6)


def _values(predictions: Any) -> torch.Tensor:
    return predictions.values if isinstance(predictions, Jagged) else predictions


def test_sasrec_learns_and_once_exported_recommends_what_it_scores_highest(tmp_path: Path) -> None:
    config = config_of(
        "sasrec",
        data={"num_samples": 4_000, "num_test_samples": 200},
        train={"steps": 200, "batch_size": 30, "checkpoint_every": 0, "dense_lr": 1e-2},
    )
    metrics = train(config, tmp_path / "run")["metrics"]
    assert metrics["HR@5"] > 0.4  # 5 of 50 items by chance
    export_bundle(tmp_path / "run", tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    history = Jagged.from_lists([[3, 1, 4], [1, 5]])
    best = bundle.recommend(Batch({"history": history}), 5)
    keys = torch.from_numpy(bundle.keys("item"))
    rows = {"history": history.like(bundle.rows("item", history.values))}
    with torch.no_grad():
        scores = bundle.model.score(bundle.model.query(Batch({"history": history}), rows), bundle.rows("item", keys))
    for b, seen in enumerate(history.to_lists()):
        order = scores[b].argsort(descending=True)
        assert best.keys[b].tolist() == [key for key in keys[order].tolist() if key not in seen][:5]


@pytest.mark.parametrize("example", ["clicks", "mmoe_clicks", "din_clicks"])
def test_the_examples_on_drawn_data_train(tmp_path: Path, example: str) -> None:
    """As they are but for their size."""
    smaller = ["train.steps=3", "train.batch_size=16", "data.num_users=50", "data.num_evaluated=20"]
    if example != "din_clicks":
        smaller[2:] = ["data.num_test_samples=50"]
    sets = [word for entry in smaller for word in ("--set", entry)]
    assert command("train", EXAMPLES / f"{example}.toml", *sets, "--out", tmp_path / "run") == 0

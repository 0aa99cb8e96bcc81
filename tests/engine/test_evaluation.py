"""Ranking and what a user has had before: all of it is left out, and targets among it are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer, config, run
from nestpipe.data import DATASETS
from tests.cluster import Cluster

NUM_ITEMS, DIM, KS = 30, 4, (1, 5, 100)


class ByKey(nn.Module):
    """Ranks candidates by the sum of their first values, the same for every sample."""

    def query(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return torch.ones(batch.size, DIM)

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query @ candidates.T

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return rows["history"].values.sum() + torch.zeros(batch.size)


def samples_of(count: int) -> list[tuple[list[int], int]]:
    """(all that the user has had, target); every third target is among them, most of these before the last two items."""
    samples = []
    for sample in range(count):
        rng = np.random.default_rng([5, sample])
        seen = rng.choice(NUM_ITEMS, size=rng.integers(1, 8), replace=False).tolist()
        others = [key for key in range(NUM_ITEMS) if key not in seen]
        samples.append((seen, int(rng.choice(seen if sample % 3 == 0 else others))))
    return samples


def batch_of(samples: Sequence[tuple[list[int], int]], *, told: bool) -> Batch:
    """The model reads the last two items; what else there was, the batch tells or does not."""
    return Batch(
        {"history": Jagged.from_lists([seen[-2:] for seen, _ in samples])},
        {"seen": Jagged.from_lists([seen for seen, _ in samples])} if told else {},
        torch.tensor([target for _, target in samples], dtype=torch.int64),
    )


def rank(told: bool, options: dict[str, Any]) -> tuple[dict[str, float], np.ndarray]:
    trainer = Trainer(
        ByKey(),
        [Table("item", DIM, optimizer=SGD(lr=0.1))],
        [Feature("history", "item")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
    mine = samples_of(40)[trainer.rank :: trainer.world]
    batches = [batch_of(mine[start : start + 7], told=told) for start in range(0, len(mine), 7)]
    candidates = torch.arange(NUM_ITEMS)
    metrics = trainer.evaluate_ranking(batches, table="item", candidates=candidates, ks=KS, **options)
    return metrics, trainer.rows("item", candidates).sum(1).numpy()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("exclude_seen", "seen_targets"),
    [(True, "rank"), (True, "miss"), (True, "skip"), (False, "rank"), (False, "skip")],
)
def test_ranking_equals_a_loop_that_leaves_out_all_that_a_user_has_had(
    cluster: Cluster, told: bool, exclude_seen: bool, seen_targets: str
) -> None:
    options = {"exclude_seen": exclude_seen, "seen_targets": seen_targets}
    results = [one for world in (1, 2) for one in cluster.run(world, rank, told, options)]
    scores = results[0][1]
    places, num_seen = [], 0
    for everything, target in samples_of(40):
        seen = everything if told else everything[-2:]
        num_seen += target in seen
        if target in seen and seen_targets == "skip":
            continue
        ahead = [
            key
            for key in range(NUM_ITEMS)
            if (scores[key], -key) > (scores[target], -target) and not (exclude_seen and key in seen)
        ]
        places.append(1 + len(ahead) if not (target in seen and seen_targets == "miss") else 10**9)
    assert 0 < num_seen < 40
    for metrics, _ in results:
        assert (metrics["targets"], metrics["seen_targets"]) == (len(places), num_seen)
        assert isinstance(metrics["targets"], int) and isinstance(metrics["seen_targets"], int)
        for k in KS:
            assert metrics[f"HR@{k}"] == pytest.approx(np.mean([place <= k for place in places]))
            gains = [1 / np.log2(place + 1) if place <= k else 0.0 for place in places]
            assert metrics[f"NDCG@{k}"] == pytest.approx(np.mean(gains), rel=1e-6)


def test_a_convention_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seen_targets 'mis', .*did you mean 'miss'"):
        rank(True, {"seen_targets": "mis"})
    with pytest.raises(ValueError, match="'miss' is for targets that exclude_seen leaves out"):
        rank(True, {"seen_targets": "miss", "exclude_seen": False})


def test_what_was_seen_must_be_lists_of_keys() -> None:
    trainer = Trainer(
        ByKey(), [Table("item", DIM)], [Feature("history", "item")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    batch = batch_of(samples_of(3), told=True)
    batch.dense["seen"] = torch.zeros(3)
    with pytest.raises(Exception, match=r"batch.dense\['seen'\] must be a Jagged of int64 keys"):
        trainer.evaluate_ranking([batch], table="item", candidates=torch.arange(NUM_ITEMS))


# -- data sets ---------------------------------------------------------------------------------------------------------

HISTORIES = {1: [4, 5, 6, 7, 8], 2: [4, 4, 9], 3: [1, 2], 4: [9, 8, 7, 6, 9, 9]}


def sequences(folder: Path) -> dict[str, Any]:
    path = folder / "users.txt"
    path.write_text("".join(f"{user} {' '.join(map(str, items))}\n" for user, items in HISTORIES.items()))
    return {"path": str(path)}


def movielens(folder: Path) -> dict[str, Any]:
    path = folder / "ratings.dat"
    events = [(user, item, time) for user, items in HISTORIES.items() for time, item in enumerate(items)]
    path.write_text("".join(f"{user}::{item}::5::{time}\n" for user, item, time in events))
    return {"path": str(path)}


def kuairand(folder: Path) -> dict[str, Any]:
    path = folder / "log.csv"
    events = [(user, item, time) for user, items in HISTORIES.items() for time, item in enumerate(items)]
    path.write_text("user_id,video_id,time_ms,is_click\n" + "".join(f"{u},{i},{t},1\n" for u, i, t in events))
    return {"path": str(path)}


@pytest.mark.parametrize(
    ("kind", "write"), [("sequences", sequences), ("movielens", movielens), ("kuairand_sequences", kuairand)]
)
def test_sequence_data_tells_all_that_was_seen_where_it_is_judged_on(tmp_path: Path, kind: str, write: Any) -> None:
    data = DATASETS[kind](**write(tmp_path), max_length=2, num_negatives=1)
    how = {"batch_size": 10, "rank": 0, "world": 1, "seed": 0}
    assert all("seen" not in batch.dense for batch in data.batches("train", **how))
    for split, end in (("valid", -2), ("test", -1)):
        (batch,) = data.batches(split, **how)
        judged = [items for items in HISTORIES.values() if len(items) >= 3]
        assert batch.dense["seen"].to_lists() == [items[:end] for items in judged]
        assert batch.keys["history"].to_lists() == [items[:end][-2:] for items in judged]
        assert batch.labels.tolist() == [items[end] for items in judged]


def test_histories_that_are_not_cut_are_all_that_was_seen() -> None:
    data = DATASETS["synthetic_sequences"](num_items=20, num_test_samples=10)
    (batch,) = data.batches("test", batch_size=10, rank=0, world=1, seed=0)
    assert "seen" not in batch.dense and batch.labels is not None


def test_a_run_counts_targets_that_were_seen_and_follows_its_config(tmp_path: Path) -> None:
    def metrics_of(*overrides: str) -> dict[str, float]:
        values: dict[str, Any] = {
            "data": {"kind": "sequences", **sequences(tmp_path), "max_length": 2, "num_negatives": 2},
            "model": {"kind": "hstu", "num_layers": 1},
            "tables": {"item": {"dim": 4, "features": ["history", "negatives"]}},
            "train": {"steps": 1, "batch_size": 4, "rank_at": [100]},
        }
        for text in overrides:
            config.override(values, text)
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        return run.train(config.parse(values), folder=out, json_file=None)["metrics"]

    ranked = metrics_of()
    assert (ranked["HR@100"], ranked["targets"], ranked["seen_targets"]) == (1.0, 3, 1)
    missed = metrics_of("train.seen_targets=miss")
    assert (missed["HR@100"], missed["targets"], missed["seen_targets"]) == (pytest.approx(2 / 3), 3, 1)
    skipped = metrics_of("train.seen_targets=skip")
    assert (skipped["HR@100"], skipped["targets"], skipped["seen_targets"]) == (1.0, 2, 1)
    with pytest.raises(ValueError, match=r"seen_targets = 'miss' needs train.exclude_seen = true"):
        metrics_of("train.seen_targets=miss", "train.exclude_seen=false")


def test_counts_are_printed_as_whole_numbers() -> None:
    assert run.in_words({"HR@10": 0.5, "targets": 22363}) == "HR@10 0.5000, targets 22,363"

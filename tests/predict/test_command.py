"""`nestpipe predict`: one row for each sample, in the order of the data, the same bits on any number of workers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe import Batch, Output, cli, config, load_bundle, run
from nestpipe.config import build
from nestpipe.export import export_bundle
from nestpipe.predict import command, parts
from nestpipe.predict.arguments import add_arguments, passed_on
from tests.cluster import Cluster

ROWS = 1_000


class TwoTasks(torch.nn.Module):
    tasks = ("click", "like")

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(dim, 2)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        predictions = torch.sigmoid(self.out(rows["f0"] + rows["f1"]))
        by_task = {name: predictions[:, n] for n, name in enumerate(self.tasks)}
        assert isinstance(batch.labels, dict)
        losses = {name: (by_task[name] - batch.labels[name]) ** 2 for name in self.tasks}  # type: ignore[operator]
        return Output(losses, predictions={name: part.detach() for name, part in by_task.items()})


CLICKS: dict[str, Any] = {
    "data": {"kind": "parquet", "keys": ["user", "item"], "dense": ["age"], "label": "clicked"},
    "model": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "tables": {"*": {"dim": 8, "pooling": "sum", "lr": 0.5}},
    "train": {"steps": 6, "batch_size": 64, "eval_batch_size": 17, "metrics": ["AUC", "GAUC"], "group_by": "user"},
}
HISTORIES: dict[str, Any] = {
    "data": {"kind": "sequences", "max_length": 6, "num_negatives": 4},
    "model": {"kind": "hstu", "num_layers": 1, "max_length": 6},
    "tables": {"item": {"dim": 8, "features": ["history", "negatives"]}},
    "train": {"steps": 6, "batch_size": 32, "eval_batch_size": 9, "rank_at": [5], "metrics": ["HR", "MRR", "Coverage"],
              "checkpoint_every": 3},
}  # fmt: skip
TASKS: dict[str, Any] = {
    "data": {"kind": "synthetic_clicks", "num_features": 2, "keys_per_table": 90, "num_test_samples": 100,
             "tasks": ["click", "like"]},
    "model": {"kind": f"{__name__}:TwoTasks"},
    "tables": {"*": {"dim": 4, "pooling": "sum"}},
    "train": {"steps": 3, "batch_size": 32, "eval_batch_size": 16},
}  # fmt: skip


def arguments(run_folder: Path, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser, int)
    return parser.parse_args([str(run_folder), *given])


def predict(run_folder: Path, given: tuple[str, ...]) -> int:
    asked = arguments(run_folder, *given)
    again = arguments(*(Path(text) if n == 0 else text for n, text in enumerate(passed_on(asked))))  # type: ignore[arg-type]
    assert vars(again) == vars(asked)
    return command.predict(command.asked(config.read_json(run_folder / "config.json"), again))


class Made:
    """A run, and its result."""

    def __init__(self, folder: Path, described: dict[str, Any]) -> None:
        self.folder, self.run = folder, folder / "run"
        self.result = run.train(config.parse(described), folder=self.run, json_file=None)

    def table(self, cluster: Cluster, world: int, *given: str) -> pa.Table:
        out = self.folder / f"{abs(hash((world, *given)))}.parquet"
        counts = cluster.run(world, predict, self.run, (*given, "--out", str(out)))
        read = pq.read_table(out)
        assert set(counts) == {len(read)} and read["row"].to_pylist() == list(range(len(read)))
        assert sorted(path.name for path in self.folder.iterdir() if path.name.startswith(".")) == []
        return read


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, rng = tmp_path_factory.mktemp("clicks"), np.random.default_rng(0)
    table = {"user": rng.integers(0, 20, ROWS), "item": rng.integers(0, 300, ROWS), "age": rng.normal(size=ROWS)}
    clicked = (table["item"] % 2 == table["user"] % 2).astype(np.int8)
    for name, columns in (("log", {**table, "clicked": clicked}), ("new", table)):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=130)
    return Made(folder, {**CLICKS, "data": {**CLICKS["data"], "path": str(folder / "log.parquet")}})


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, rng = tmp_path_factory.mktemp("histories"), np.random.default_rng(1)
    lines = [f"{1000 - user} {' '.join(map(str, rng.integers(0, 25, rng.integers(2, 9))))}\n" for user in range(60)]
    (folder / "users.txt").write_text("".join(lines))
    return Made(folder, {**HISTORIES, "data": {**HISTORIES["data"], "path": str(folder / "users.txt")}})


def batches_of(made: Made, split: str, make: Callable[[Any], Any] = lambda built: built) -> list[Batch]:
    described = config.read_json(made.run / "config.json")
    how = {"batch_size": described.train.eval_batch_size, "rank": 0, "world": 1, "seed": 0}
    return list(build(described).data.batches(split, **how))


def test_scores_are_the_bundles_in_the_order_of_the_file_on_any_number_of_workers(
    cluster: Cluster, clicks: Made
) -> None:
    everything = [clicks.table(cluster, world, str(clicks.folder / "log.parquet")) for world in (1, 2, 3)]
    assert everything[0].equals(everything[1]) and everything[0].equals(everything[2])
    log = pq.read_table(clicks.folder / "log.parquet")
    assert everything[0]["label"].to_pylist() == log["clicked"].to_pylist()
    export_bundle(clicks.run, clicks.folder / "bundle")
    bundle, batches = load_bundle(clicks.folder / "bundle"), batches_of(clicks, "test")
    held_out = clicks.table(cluster, 2)
    assert 50 < len(held_out) < 200
    scores = torch.cat([bundle.predict(batch) for batch in batches])
    assert held_out["score"].to_pylist() == scores.tolist()
    assert held_out["label"].to_pylist() == torch.cat([batch.labels for batch in batches]).tolist()  # type: ignore[misc]
    positive, negative = (scores[torch.tensor(held_out["label"].to_pylist()) == x] for x in (1, 0))
    won = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    assert float(won) / (len(positive) * len(negative)) == pytest.approx(clicks.result["metrics"]["AUC"], rel=1e-6)


def test_data_without_labels_gets_the_same_scores(cluster: Cluster, clicks: Made) -> None:
    labelled = clicks.table(cluster, 1, str(clicks.folder / "log.parquet"))
    new = clicks.table(cluster, 2, str(clicks.folder / "new.parquet"), "--no-labels")
    assert new.column_names == ["row", "score"] and new["score"].equals(labelled["score"])
    with pytest.raises(ValueError, match="no column 'clicked'"):
        predict(clicks.run, (str(clicks.folder / "new.parquet"), "--out", "never.parquet"))


def test_the_best_items_of_each_user_and_the_metrics_they_add_up_to(cluster: Cluster, histories: Made) -> None:
    asked = ("--top-k", "5", "--exclude-seen", "--split", "test")
    one, two = (histories.table(cluster, world, *asked) for world in (1, 2))
    assert one.equals(two) and one.column_names == ["row", "user", "label", "items", "scores"]
    seen = [items for batch in batches_of(histories, "test") for items in batch.dense["seen"].to_lists()]  # type: ignore[union-attr]
    for user, items, scores, before in zip(*(one[name].to_pylist() for name in ("user", "items", "scores")), seen,
                                           strict=True):  # fmt: skip
        assert 900 < user <= 1000 and len(items) == len(scores) == 5
        assert scores == sorted(scores, reverse=True) and not set(items) & set(before)
    recommended = {item for items in one["items"].to_pylist() for item in items}
    catalogue = {item for batch in batches_of(histories, "test") for item in batch.dense["seen"].values.tolist()}  # type: ignore[union-attr]
    catalogue |= set(one["label"].to_pylist())
    assert histories.result["metrics"]["Coverage@5"] == len(recommended) / len(catalogue)
    again = histories.table(cluster, 1, "--top-k", "5")
    assert again["items"].to_pylist() != one["items"].to_pylist(), "seen items are left out on request only"


def test_a_checkpoint_is_chosen_by_its_name(cluster: Cluster, histories: Made) -> None:
    early = histories.table(cluster, 1, "--top-k", "3", "--checkpoint", "step-3")
    assert early["scores"].to_pylist() != histories.table(cluster, 1, "--top-k", "3")["scores"].to_pylist()
    with pytest.raises(ValueError, match="has no checkpoint 'step-4'; it has step-000000003, step-000000006"):
        predict(histories.run, ("--top-k", "3", "--checkpoint", "step-4", "--out", "never.parquet"))


def test_a_user_who_has_had_nearly_everything_gets_fewer(cluster: Cluster, histories: Made) -> None:
    text = (histories.folder / "users.txt").read_text()
    known = sorted({int(word) for line in text.splitlines() for word in line.split()[1:]})
    (histories.folder / "one.txt").write_text(f"7 {' '.join(map(str, known[2:]))} {known[0]}\n")
    best = histories.table(cluster, 2, str(histories.folder / "one.txt"), "--top-k", "5", "--exclude-seen")
    assert best["user"].to_pylist() == [7] and sorted(best["items"].to_pylist()[0]) == known[:2]


def test_tasks_have_a_column_each(cluster: Cluster, tmp_path: Path) -> None:
    made = Made(tmp_path, TASKS)
    assert {"click/AUC", "like/AUC", "click/loss", "like/NE"} <= made.result["metrics"].keys()
    one, two = (made.table(cluster, world) for world in (1, 2))
    assert one.equals(two) and len(one) == 100
    assert one.column_names == ["row", "label_click", "label_like", "score_click", "score_like"]
    assert one["score_click"].to_pylist() != one["score_like"].to_pylist()


def test_lists_are_lists(cluster: Cluster, tmp_path: Path) -> None:
    small = {"num_users": 40, "num_items": 60, "num_topics": 4, "mean_length": 5, "max_length": 8, "num_clicked": 2}
    described = {
        "data": {"kind": "kuairand_clicks", **small, "num_passed": 3},
        "model": {"kind": "hstu_ranker", "num_layers": 1, "max_length": 8},
        "tables": {"item": {"dim": 4, "features": ["history", "candidates"]}},
        "train": {"steps": 2, "batch_size": 8, "eval_batch_size": 7, "metrics": ["GAUC", "Recall@2", "MAP", "MRR"]},
    }
    made = Made(tmp_path, described)
    assert list(made.result["metrics"]) == ["loss", "GAUC", "Recall@2", "MAP@10", "MAP@50", "MRR"]
    table = made.table(cluster, 2)
    assert table.column_names[:4] == ["row", "label", "candidates", "score"]
    for label, items, scores in zip(
        *(table[name].to_pylist() for name in ("label", "candidates", "score")), strict=True
    ):
        assert len(label) == len(items) == len(scores) > 0


def test_what_cannot_be_is_told_before_workers_start(clicks: Made, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*given: str) -> str:
        with pytest.raises(SystemExit) as left:
            cli.main(["predict", *given, "--out", str(clicks.folder / "never.parquet")])
        assert left.value.code == 1
        return capsys.readouterr().err

    assert "is not a run folder: it has no config.json" in told(str(clicks.folder))
    assert "--exclude-seen is for --top-k" in told(str(clicks.run), "--exclude-seen")
    assert "--split is of the run's own data" in told(str(clicks.run), "new.parquet", "--split", "test")
    assert "has no checkpoint 'best': the run has not finished" in told(str(clicks.run), "--checkpoint", "best")
    assert not (clicks.folder / "never.parquet").exists()


def test_the_command_says_what_it_has_written(clicks: Made, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["predict", str(clicks.run), "--out", str(clicks.folder / "said.parquet")])
    assert left.value.code == 0
    assert f"said.parquet: {len(pq.read_table(clicks.folder / 'said.parquet')):,} rows" in capsys.readouterr().out


def test_rows_that_lie_elsewhere_are_missed(tmp_path: Path) -> None:
    records = pa.RecordBatch.from_pydict({"score": pa.array([0.5, 0.25])})
    part = tmp_path / "part"
    with pa.ipc.new_stream(str(part), records.schema) as writer:
        writer.write_batch(records, custom_metadata={parts.NUMBER: b"0"})
    with pytest.raises(ValueError, match=r"of 5 rows 2 are in .*choose an --out in a folder that all workers see"):
        parts.parts_into([part, tmp_path / "other"], tmp_path / "out.parquet", 5)
    assert not (tmp_path / "out.parquet").exists()


def test_the_candidates_of_din_have_a_column(cluster: Cluster, tmp_path: Path) -> None:
    small = {"num_users": 40, "num_items": 60, "num_topics": 4, "mean_length": 5, "max_length": 8, "num_clicked": 2}
    described = {
        "data": {"kind": "kuairand_clicks", **small, "num_passed": 3},
        "model": {"kind": "din", "attention": [4], "top": [4]},
        "tables": {"item": {"dim": 4, "features": ["history", "candidates"]}},
        "train": {"steps": 2, "batch_size": 8, "eval_batch_size": 7},
    }
    made = Made(tmp_path, described)
    table = made.table(cluster, 1)
    expected = [items for batch in batches_of(made, "test") for items in batch.keys["candidates"].to_lists()]
    assert table["candidates"].to_pylist() == expected
    assert [len(scores) for scores in table["score"].to_pylist()] == list(map(len, expected))


def test_two_towers_are_judged_by_what_they_recommend_from_the_table_of_items(
    cluster: Cluster, tmp_path: Path, histories: Made
) -> None:
    described = {
        "data": {"kind": "sequences", "path": str(histories.folder / "users.txt"), "max_length": 6, "pairs": True},
        "model": {"kind": "two_tower", "hidden": [8]},
        "tables": {"had": {"dim": 8, "features": ["history"]}, "item": {"dim": 8, "lr": 0.5, "features": ["target"]}},
        "train": {
            "steps": 8,
            "batch_size": 32,
            "eval_batch_size": 9,
            "rank_at": [5],
            "dense_lr": 0.01,
            "exclude_seen": True,
            "seen_targets": "skip",
        },
    }
    made = Made(tmp_path, described)
    table = made.table(cluster, 2, "--top-k", "5", "--exclude-seen")
    hits = [
        label in items for label, items in zip(*(table[name].to_pylist() for name in ("label", "items")), strict=True)
    ]
    seen = [items for batch in batches_of(made, "test") for items in batch.dense["seen"].to_lists()]  # type: ignore[union-attr]
    again = [label in before for label, before in zip(table["label"].to_pylist(), seen, strict=True)]
    metrics, counted = made.result["metrics"], len(again) - sum(again)
    assert (metrics["targets"], metrics["seen_targets"]) == (counted, sum(again))
    assert metrics["HR@5"] == sum(hits) / counted > 0
    export_bundle(made.run, tmp_path / "bundle")
    lines = (histories.folder / "users.txt").read_text().splitlines()
    bundle, catalogue = (
        load_bundle(tmp_path / "bundle"),
        sorted({int(word) for line in lines for word in line.split()[1:]}),
    )
    best = [bundle.recommend(batch, 5, candidates=catalogue) for batch in batches_of(made, "test")]
    assert table["items"].to_pylist() == [keys for part in best for keys in part.keys.tolist()]


def predict_on_a_full_disk(run_folder: Path, given: tuple[str, ...]) -> None:
    """That of the first worker: what it writes is small, so that it shows when the file is closed."""
    opened = Path.open

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        return opened(Path("/dev/full") if path.name.endswith(".part-0") else path, *args, **kwargs)

    with mock.patch.object(Path, "open", open_full):
        predict(run_folder, given)


def test_a_worker_whose_disk_is_full_ends_all_with_its_cause(cluster: Cluster, clicks: Made) -> None:
    out = clicks.folder / "full.parquet"
    (clicks.folder / ".full.parquet.part-1").write_bytes(b"of one that was killed")
    for kind, (name, text, _) in cluster.outcomes(2, predict_on_a_full_disk, clicks.run, ("--out", str(out))):
        assert (kind, name) == ("failed", "TrainingError") and "rank 0" in text and "No space left" in text
    assert not list(clicks.folder.glob("*full*"))
    (clicks.folder / ".full.parquet.part-1").write_bytes(b"of one that was killed")
    assert len(set(cluster.run(2, predict, clicks.run, ("--out", str(out))))) == 1 and out.exists()

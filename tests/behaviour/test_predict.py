"""Predictions and recommendations: those of an evaluation and of a bundle, to the bit; for every worker its own, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer, TrainingError, load_bundle
from nestpipe.export import export_bundle
from nestpipe.inference import missing_methods
from nestpipe.models import TwoTower
from tests.cluster import Cluster

NUM_ITEMS, DIM = 40, 4


class Clicks(nn.Module):
    """Predicts clicks, and can rank all items."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.out = kind, nn.Linear(DIM, 1)
        self.tasks = ("click", "each") if kind == "tasks" else ()

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        items: Jagged = rows["history"]
        scores = torch.sigmoid(self.out(items.values))[:, 0]
        predictions: Any = torch.sigmoid(self.out(items.mean()))[:, 0]
        losses = (predictions - batch.labels) ** 2 + nn.functional.dropout(items.mean()[:, 0], 0.5, self.training)
        if self.kind == "lists":
            predictions = items.like(scores)
        elif self.kind == "tasks":
            return Output(
                {"click": losses, "each": items.like(scores).sum()},
                predictions={"click": predictions, "each": items.like(scores)},
            )
        return Output(losses, predictions=predictions)

    def query(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return self.out(rows["history"].mean()) + rows["history"].mean()

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query @ candidates.T


class Watching:
    """A metric that keeps what it is fed."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def reset(self) -> None:
        self.seen = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.seen.append(predictions)

    def compute(self, *, group: Any = None) -> float:
        return 0.0


def batch_of(number: int, size: int = 7) -> Batch:
    rng = np.random.default_rng([4, number])
    lengths = torch.from_numpy(rng.integers(0, 6, size))
    keys = torch.from_numpy(rng.integers(0, NUM_ITEMS, int(lengths.sum())))
    return Batch({"history": Jagged.from_lengths(keys, lengths)}, labels=torch.from_numpy(rng.random(size)).float())


def make(kind: str = "tensor", model: nn.Module | None = None) -> Trainer:
    return Trainer(
        Clicks(kind) if model is None else model,
        [Table("item", DIM, optimizer=SGD(lr=0.5))],
        [Feature("history", "item")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )


def trained(kind: str = "tensor") -> Trainer:
    """All items of the first batches have rows, others have none."""
    trainer = make(kind)
    trainer.fit([batch_of(number) for number in range(4)][trainer.rank :: trainer.world])
    return trainer


def judged_and_predicted(kind: str) -> tuple[Any, list[Tensor], Any]:
    """The last of several workers has no batches."""
    with trained(kind) as trainer:
        numbers = list(range(2, 8)) if trainer.world == 1 else list(range(2, 8))[trainer.rank :: trainer.world - 1]
        numbers = [] if trainer.world > 1 and trainer.rank == trainer.world - 1 else numbers
        batches, digest, rows = [batch_of(n) for n in numbers], trainer.digest(), trainer.table_stats()["item"].rows
        told = trainer.predict(batches)
        assert trainer.digest() == digest and trainer.table_stats()["item"].rows == rows < NUM_ITEMS
        assert trainer.model.training
        kept: list[Any] = []
        assert trainer.predict(iter(batches), on_batch=lambda batch, made: kept.append((batch.size, made))) is None
        watching = Watching()
        if kind == "tensor":
            trainer.evaluate(batches, {"watching": watching})
        return told, watching.seen, kept


def test_predictions_are_those_that_metrics_see_for_every_worker_its_own(cluster: Cluster) -> None:
    (alone,) = cluster.run(1, judged_and_predicted, "tensor")
    assert alone[0].shape == (42,) and len(alone[0].unique()) > 30
    for predictions, watched, kept in (alone, *cluster.run(3, judged_and_predicted, "tensor")):
        assert torch.equal(predictions, torch.cat([torch.empty(0), *watched]))
        assert torch.equal(predictions, torch.cat([torch.empty(0), *(made for _, made in kept)]))
        assert [size for size, _ in kept] == [7] * (len(predictions) // 7)


@pytest.mark.parametrize("kind", ["lists", "tasks"])
def test_a_worker_without_batches_gets_no_predictions_of_the_same_kind(cluster: Cluster, kind: str) -> None:
    whole, nothing = (told for told, _, _ in cluster.run(2, judged_and_predicted, kind))
    if kind == "tasks":
        assert list(whole) == list(nothing) == ["click", "each"]
        assert whole["click"].shape == (42,) and nothing["click"].shape == (0,)
        whole, nothing = whole["each"], nothing["each"]
    assert whole.lengths.tolist() == torch.cat([batch_of(n).keys["history"].lengths for n in range(2, 8)]).tolist()
    assert (len(nothing), len(nothing.values)) == (0, 0)


def test_a_trainer_and_its_bundle_say_the_same(tmp_path: Path) -> None:
    with trained() as trainer:
        trainer.save(tmp_path / "saved")
        export_bundle(tmp_path / "saved", tmp_path / "bundle")
        bundle, batch = load_bundle(tmp_path / "bundle", model=Clicks()), batch_of(9)
        assert torch.equal(trainer.predict([batch]), bundle.predict(batch))
        for options in ({"exclude_seen": False}, {}, {"candidates": [3, 1, 30, 9, 22]}):
            ours, theirs = trainer.recommend([batch], 4, **options), bundle.recommend(batch, 4, **options)
            assert ours is not None
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.scores, theirs.scores)


def recommended() -> tuple[Any, Any]:
    with trained() as trainer:
        numbers = list(range(6))[trainer.rank :: trainer.world]
        kept: list[Any] = []
        best = trainer.recommend([batch_of(n) for n in numbers], 5, candidates=torch.arange(NUM_ITEMS))
        trainer.recommend([batch_of(n) for n in numbers], 5, on_batch=lambda batch, made: kept.append(made))
        rows = trainer.rows("item", torch.arange(NUM_ITEMS))
        return best, (rows, [p.detach().clone() for p in trainer.model.parameters()], len(kept) == len(numbers))


def test_recommendations_equal_a_sort_of_all_scores_on_any_number_of_workers(cluster: Cluster) -> None:
    for world in (1, 2):
        results = cluster.run(world, recommended)
        for rank, (best, (rows, (weight, bias), kept)) in enumerate(results):
            assert kept
            place = 0
            for number in list(range(6))[rank::world]:
                for history in batch_of(number).keys["history"].to_lists():
                    mean = rows[history].mean(0) if history else torch.zeros(DIM)
                    scores = ((mean @ weight.T + bias) + mean) @ rows.T
                    order = sorted((-float(s), key) for key, s in enumerate(scores) if key not in history)
                    assert best.scores[place].tolist() == pytest.approx([-s for s, _ in order[:5]], abs=1e-6)
                    assert not set(best.keys[place].tolist()) & set(history)
                    place += 1
            assert place == len(best.keys)


def fails_on_the_second_worker() -> None:
    def on_batch(batch: Batch, made: Any) -> None:
        if trainer.rank == 1:
            raise OSError("disk full")

    with trained() as trainer:
        trainer.predict([batch_of(trainer.rank)], on_batch=on_batch)


def test_what_goes_wrong_on_one_worker_is_raised_on_all(cluster: Cluster) -> None:
    for kind, (name, text, _) in cluster.outcomes(2, fails_on_the_second_worker):
        assert (kind, name) == ("failed", "TrainingError") and "rank 1" in text and "disk full" in text


def test_models_that_cannot_are_told_what_they_need() -> None:
    class Plain(nn.Module):
        def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
            return rows["history"].mean()[:, 0]

    trainer = Trainer(
        Plain(), [Table("item", DIM)], [Feature("history", "item")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    with trainer:
        with pytest.raises(TrainingError, match=r"predicts nothing for a sample: give it predict\(batch, rows\)"):
            trainer.predict([batch_of(0)])
        with pytest.raises(TrainingError, match="Plain has no query and no score, which `recommend` needs"):
            trainer.recommend([batch_of(0)], 3)
        with pytest.raises(ValueError, match=r"history 'histori', .*did you mean 'history'"):
            trainer.recommend([batch_of(0)], 3, history="histori")
    with trained() as trainer:
        with pytest.raises(TrainingError, match="a candidate is given more than once"):
            trainer.recommend([batch_of(0)], 1, candidates=[1, 1])
        with pytest.raises(TrainingError, match="at most the 3 items there are, got 4"):
            trainer.recommend([batch_of(0)], 4, candidates=[1, 2, 3])


def taken_on_the_first_worker() -> tuple[int, int, str]:
    with trained() as trainer:
        taken: list[Any] = []
        on_batch = (lambda batch, made: taken.append(made)) if trainer.rank == 0 else None
        told = trainer.predict([batch_of(trainer.rank)], on_batch=on_batch)
        return len(taken), 0 if told is None else len(told), trainer.digest()


def test_one_worker_may_take_its_predictions_as_they_come_and_another_all_at_once(cluster: Cluster) -> None:
    first, second = cluster.run(2, taken_on_the_first_worker)
    assert first[:2] == (1, 0) and second[:2] == (0, 7) and first[2] == second[2]


def chooses_on_the_first_worker() -> None:
    with trained() as trainer:
        trainer.recommend([batch_of(0)], 2, candidates=[1, 2, 3] if trainer.rank == 0 else None)


def test_candidates_on_one_worker_only_are_told(cluster: Cluster) -> None:
    for kind, (_, text, _) in cluster.outcomes(2, chooses_on_the_first_worker):
        assert kind == "failed" and "recommend: candidates is 'given' on rank 0 and 'all' on rank 1" in text


class WithLayers(Clicks):
    """Layers that are called as methods could be."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.Linear(DIM, DIM)


def test_a_layer_is_not_taken_for_a_method() -> None:
    with make() as plain, make(model=WithLayers()) as layered:
        assert torch.equal(plain.predict([batch_of(0)]), layered.predict([batch_of(0)]))
    attention = nn.ModuleDict({"query": nn.Linear(DIM, DIM), "score": nn.Linear(DIM, 1)})
    assert missing_methods(attention["query"]) == ["query", "score"] and not missing_methods(Clicks())
    attention.query, attention.score = attention["query"], attention["score"]
    with make(model=attention) as layered, pytest.raises(TrainingError, match="ModuleDict has no query and no score"):
        layered.recommend([batch_of(0)], 3)


# -- two towers: items in a table of their own ---------------------------------------------------------------------------


def pairs_of(number: int, users: str = "history") -> Batch:
    batch, draw = batch_of(number), np.random.default_rng([5, number])
    target = Jagged.from_lists([[int(key)] for key in draw.integers(0, NUM_ITEMS, batch.size)])
    return Batch({users: batch.keys["history"], "target": target})


def two_towers(users: str) -> Trainer:
    torch.manual_seed(2)
    return Trainer(
        TwoTower(dim=DIM, users=[users]),
        [Table("had", DIM), Table("item", DIM, optimizer=SGD(lr=0.5))],
        [Feature(users, "had"), Feature("target", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )


def test_items_are_those_of_the_items_table_not_of_the_historys(tmp_path: Path) -> None:
    with two_towers("history") as trainer:
        trainer.fit([pairs_of(number) for number in range(6)])
        batch, model = pairs_of(9), trainer.model
        best = trainer.recommend([batch], 4, exclude_seen=False)
        keys = trainer.keys("item")
        history = batch.keys["history"]
        rows = {"history": history.like(trainer.rows("had", history.values))}
        with torch.no_grad():
            scores = model.score(model.query(batch, rows), trainer.rows("item", keys))  # type: ignore[operator]
        assert best is not None and set(best.keys.flatten().tolist()) <= set(keys.tolist())
        torch.testing.assert_close(best.scores, scores.topk(4).values)
        trainer.save(tmp_path / "saved")
        export_bundle(tmp_path / "saved", tmp_path / "bundle")
        bundle = load_bundle(tmp_path / "bundle", model=TwoTower(dim=DIM))
        for options in ({"exclude_seen": False}, {}, {"candidates": [3, 1, 30, 9, 22]}):
            ours, theirs = (
                trainer.recommend([batch], 3, **options),
                bundle.recommend(Batch({"history": history}), 3, **options),
            )
            assert ours is not None and torch.equal(ours.keys, theirs.keys) and torch.equal(ours.scores, theirs.scores)


def test_what_a_user_has_had_must_be_known_to_be_left_out() -> None:
    with two_towers("user") as trainer:
        trainer.fit([pairs_of(number, "user") for number in range(6)])
        batch = pairs_of(9, "user")
        with pytest.raises(TrainingError, match=r"the batch has neither dense\['seen'\] nor keys of 'history'"):
            trainer.recommend([batch], 4)
        every = trainer.recommend([batch], 4, exclude_seen=False)
        assert every is not None
        batch.dense["seen"] = Jagged.from_lists(every.keys[:, :1].tolist())
        others = trainer.recommend([batch], 3)
        assert others is not None and torch.equal(others.keys, every.keys[:, 1:])

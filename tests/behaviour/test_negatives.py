"""Every way of giving a sequence model negatives, under every schedule: the same bits; and streamed rows like any others."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, RowwiseAdagrad, Streamed, Table, Trainer
from nestpipe.data import KuaiRandLike
from nestpipe.engine.rowstream import RowStream
from nestpipe.errors import TrainingError
from nestpipe.models import HSTU, FuXi
from nestpipe.models.negatives import IN_BATCH
from nestpipe.ops import segmented_softmax
from tests.cluster import Cluster

DIM, STEPS = 8, 5


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str = "serial"
    kind: str = "hstu"
    per: str = "sample"
    streamed: bool = False
    dtype: str = "float32"
    share: int = 0
    in_batch: bool = False
    dropout: float = 0.2
    micro_batches: int = 3
    steps: int = STEPS


WAYS = {
    "streamed": Case(streamed=True),
    "per position": Case(per="position"),
    "streamed per position": Case(per="position", streamed=True),
    "half": Case(streamed=True, dtype="float16"),
    "shared": Case(share=2, streamed=True),
    "shared per position": Case(kind="fuxi", per="position", share=3, streamed=True, dtype="bfloat16"),
    "in-batch": Case(in_batch=True),
}


def make(case: Case) -> tuple[Trainer, list[Batch]]:
    torch.manual_seed(3)
    data = KuaiRandLike(
        num_users=80, num_items=60, mean_length=8, min_length=1, max_length=20, num_negatives=5, negatives_per=case.per,
        num_evaluated=10,
    )  # fmt: skip
    features = [Feature("history", "item")]
    if not case.in_batch:
        features.append(Feature("negatives", "item", streamed=case.streamed))
    model = {"hstu": HSTU, "fuxi": FuXi}[case.kind](
        dim=DIM,
        max_length=20,
        dropout=case.dropout,
        input_dropout=case.dropout,
        negatives=IN_BATCH if case.in_batch else "negatives",
        negatives_per=case.per,
        negatives_dtype=case.dtype,
        share_negatives=case.share,
    )
    trainer = Trainer(
        model,
        [Table("item", DIM, optimizer=RowwiseAdagrad(lr=0.1))],
        features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        schedule=case.schedule,
        micro_batches=case.micro_batches,
    )
    batches = data.batches("train", batch_size=8, rank=trainer.rank, world=trainer.world, seed=1)
    return trainer, [batch for batch, _ in zip(batches, range(case.steps), strict=False)]


def train(case: Case) -> tuple[str, list[float]]:
    trainer, batches = make(case)
    losses: list[float] = []
    with trainer:
        trainer.fit(batches, on_step=lambda result: losses.append(result.loss))
        return trainer.digest(), losses


def train_all(cases: list[Case]) -> list[tuple[str, list[float]]]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_gives_the_same_bits(cluster: Cluster, way: str) -> None:
    for micro_batches, schedules in ((1, ("serial", "dbp")), (3, ("serial", "fwp", "nested"))):
        cases = [dataclasses.replace(WAYS[way], schedule=name, micro_batches=micro_batches) for name in schedules]
        results = cluster.run(2, train_all, cases)[0]
        assert all(result == results[0] for result in results)
        assert len(results[0][1]) == STEPS and np.isfinite(results[0][1]).all()


@pytest.mark.parametrize("per", ["sample", "position"])
def test_streamed_rows_train_like_gathered_ones(per: str) -> None:
    (_, plain), (_, streamed) = (train(Case(per=per, streamed=streamed, steps=3)) for streamed in (False, True))
    np.testing.assert_allclose(streamed, plain, rtol=1e-5)


def test_the_split_changes_nothing_where_samples_are_by_themselves_and_what_is_learned_where_they_are_not() -> None:
    def without_dropout(case: Case, micro_batches: int) -> list[float]:
        return train(dataclasses.replace(case, dropout=0.0, micro_batches=micro_batches, steps=2))[1]

    for way in ("streamed", "streamed per position", "half"):
        np.testing.assert_allclose(without_dropout(WAYS[way], 1), without_dropout(WAYS[way], 4), rtol=1e-5)
    for way in ("shared", "in-batch"):
        assert abs(without_dropout(WAYS[way], 1)[0] / without_dropout(WAYS[way], 4)[0] - 1) > 1e-3


def test_evaluation_reads_streamed_rows_and_changes_nothing() -> None:
    results = []
    for streamed in (False, True):
        trainer, batches = make(Case(streamed=streamed, steps=2))
        with trainer:
            before = trainer.digest()
            results.append(trainer.evaluate(batches, {})["loss"])
            assert trainer.digest() == before
            ranked = trainer.evaluate_ranking(
                [Batch(batch.keys, labels=torch.arange(batch.size)) for batch in batches],
                table="item", candidates=torch.arange(60), ks=(5,),
            )  # fmt: skip
            assert ranked["targets"] == sum(batch.size for batch in batches)
    np.testing.assert_allclose(*results, rtol=1e-5)


class Pairs(nn.Module):
    """A model of the user's own: rows against streamed ones."""

    def __init__(self, *, learns: bool = True) -> None:
        super().__init__()
        self.learns = learns
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        items, others = rows["item"], rows["others"]
        losses = segmented_softmax(
            items * self.scale, items, others, batch.keys["item"].values, batch.keys["others"].values,
            torch.arange(batch.size + 1),
        )  # fmt: skip
        return losses if self.learns else losses.detach()


def pairs(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(
        model,
        [Table("item", DIM, optimizer=SGD(lr=0.5))],
        [Feature("item", "item", "sum"), Feature("others", "item", streamed=True)],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        **options,
    )


def pair_batch(size: int = 6) -> Batch:
    each = torch.ones(size, dtype=torch.int64)
    return Batch(
        {
            "item": Jagged.from_lengths(torch.arange(size), each),
            "others": Jagged.from_lengths(torch.arange(4 * size) % 9, 4 * each),
        }
    )


def test_a_model_of_ones_own_is_tried_for_mixing_and_its_streamed_rows_learn() -> None:
    with pairs(Pairs(), micro_batches=2, schedule="nested") as trainer:
        before = trainer.rows("item", torch.arange(9)).clone()
        trainer.fit([pair_batch()] * 3)
        moved = (trainer.rows("item", torch.arange(9)) - before).abs().sum(1)
        assert (moved[6:] > 0).all()  # 6, 7 and 8 are negatives only


def test_a_loss_without_a_gradient_is_told_and_leaves_nothing_behind() -> None:
    with pairs(Pairs(learns=False)) as trainer:
        with pytest.raises(TrainingError, match="nothing to train"):
            trainer.fit([pair_batch()])
        trainer.model.learns = True  # type: ignore[assignment]
        trainer.fit([pair_batch()])
        again = trainer.digest()
    with pairs(Pairs()) as fresh:
        fresh.fit([pair_batch()])
        assert fresh.digest() == again


def test_a_gradient_of_streamed_rows_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    add = RowStream.add_grad

    def spoilt(self: RowStream, places: Tensor, grads: Tensor) -> None:
        add(self, places, grads.index_fill(0, torch.tensor([0]), torch.nan))

    monkeypatch.setattr(RowStream, "add_grad", spoilt)
    with pairs(Pairs()) as trainer, pytest.raises(TrainingError, match="gradient of feature 'others' is nan"):
        trainer.fit([pair_batch()])
    with pairs(Pairs(), on_nonfinite="skip") as trainer:
        assert trainer.step(pair_batch()).skipped


def test_no_more_than_a_segment_is_read_at_a_time_however_many_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    gather = RowStream.gather

    def counted(self: RowStream, places: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        sizes.append(len(places))
        return gather(self, places, dtype)

    monkeypatch.setattr(RowStream, "gather", counted)
    monkeypatch.setattr("nestpipe.models.negatives.segmented_softmax", partial(segmented_softmax, segment=4096))
    trainer, _ = make(Case(streamed=True))
    with trainer:
        for num in (100, 1000):
            keys = Jagged.from_lengths(torch.arange(10) % 60, torch.tensor([4, 6]))
            drawn = Jagged.from_lengths(torch.arange(2 * num) % 60, torch.tensor([num, num]))
            trainer.step(Batch({"history": keys, "negatives": drawn}))
            assert max(sizes) <= 4096 // (DIM + 8)
    assert sum(sizes) >= 4 * 1100


class Misuses(nn.Module):
    """What a tired author does with streamed rows."""

    mixes_samples = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))
        self.kept: list[Streamed] = []

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        streamed: Streamed = rows["others"]
        self.kept.append(streamed)
        places = torch.arange(int(streamed.offsets[-1]))
        if self.how == "in plain torch code":
            return (streamed.gather(places, torch.float32) @ self.weight).sum().expand(batch.size)
        with torch.no_grad():
            values = {"too few gradients": places[:1], "another width": places, "places that are not there": places - 1}
            if self.how in values:
                width = 3 if self.how == "another width" else 4
                streamed.add_grad(
                    values[self.how] if "places" in self.how else places, torch.ones(len(values[self.how]), width)
                )
            if self.how == "those of the batch before":
                self.kept[0].gather(places[:1], torch.float32)
        return (rows["own"].sum() @ self.weight).square()


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("in plain torch code", "would never learn"),
        ("too few gradients", r"are given as \[1, 4\]"),
        ("another width", r"are given as \[6, 3\]"),
        ("places that are not there", "places -1 to 4 of 6 rows"),
        ("those of the batch before", "do not keep them"),
    ],
)
def test_streamed_rows_that_are_used_wrongly_are_refused(how: str, word: str) -> None:
    features = [Feature("own", "item"), Feature("others", "item", streamed=True)]
    with Trainer(
        Misuses(how), [Table("item", 4)], features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    ) as trainer:
        keys = Jagged.from_lists([[1, 2, 3], [4, 5, 6]])
        with pytest.raises(TrainingError, match=word):
            trainer.fit([Batch({"own": keys, "others": keys})] * 2)

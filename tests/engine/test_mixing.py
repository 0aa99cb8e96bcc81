"""Losses that mix samples: what is declared is refused, what is not is found, and nothing else is."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer
from nestpipe.engine.mixing import refuse_mixing
from nestpipe.errors import TrainingError
from nestpipe.models import DLRM, HSTU, FuXi
from nestpipe.tables import Normal
from tests.cluster import Cluster

DIM = 4
FEATURES = [Feature("item", "item", "sum"), Feature("list", "item")]


class Alone(nn.Module):
    """Every sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Any:
        return self.loss(self.out(rows["item"])[:, 0], self.pooled(rows).sum(1), batch)

    def pooled(self, rows: dict[str, Any]) -> Tensor:
        return rows["list"].sum()

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Any:
        return functional.softplus(x + y)


# -- that mix ----------------------------------------------------------------------------------------------------------


class InBatchNegatives(Alone):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        scores = rows["item"] @ rows["list"].mean().T + self.out.weight.sum()
        return functional.cross_entropy(scores, torch.arange(batch.size), reduction="none")


class InBatchNegativesInTraining(InBatchNegatives):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, rows) if self.training else Alone.forward(self, batch, rows)


class InBatchNegativesWithDropout(InBatchNegatives):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, {**rows, "item": functional.dropout(rows["item"], 0.5, self.training)})


class InBatchNegativesWithNoise(InBatchNegatives):
    """Random in evaluation too: losses cannot be compared, gradients can."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, {**rows, "item": rows["item"] + torch.randn_like(rows["item"])})


class MeanOverPadding(Alone):
    def pooled(self, rows: dict[str, Any]) -> Tensor:
        return rows["list"].to_padded().mean(1)


class DividedByBatchSize(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return super().loss(x, y, batch) / batch.size


class OfOwnSpread(Alone):
    """A statistic without a gradient."""

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return super().loss(x / (0.1 + (x + y).detach().std()), y, batch)


class AgainstTheNext(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return functional.softplus(y.roll(1) - x)


class InPairs(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        even = len(x) // 2 * 2
        paired = torch.cat([x[:even].view(-1, 2).flip(1).reshape(-1), x[even:]])
        return functional.softplus(paired - y)


class AfterAllBefore(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return functional.softplus(x + y.detach().cumsum(0) / 10)


class WeightsThatAddUpToOne(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Output:
        lengths = batch.keys["list"].lengths.float()
        return Output(super().loss(x, y, batch), lengths / lengths.sum().clamp(min=1))


class OfDenseInputs(Alone):
    """What is mixed is little, and not made of rows."""

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        dense, labels = batch.dense["x"], batch.labels
        assert isinstance(dense, Tensor) and labels is not None
        return super().loss(x + y + dense.mean(1) + self.of_others(dense, labels), labels, batch)

    def of_others(self, dense: Tensor, labels: Tensor) -> Any:
        return 0.0


class WeakContrast(OfDenseInputs):
    def of_others(self, dense: Tensor, labels: Tensor) -> Tensor:
        return 0.001 * functional.cross_entropy(dense @ dense.T, torch.arange(len(dense)), reduction="none")


class LessTheMean(OfDenseInputs):
    def of_others(self, dense: Tensor, labels: Tensor) -> Tensor:
        return -0.005 * dense.mean()


class InGradientOnly(OfDenseInputs):
    def of_others(self, dense: Tensor, labels: Tensor) -> Tensor:
        mean = (dense @ self.out.weight.T).mean()
        return mean - mean.detach()


class OfListsInTheBatch(OfDenseInputs):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Any:
        times = batch.dense["times"]
        assert isinstance(times, Jagged)
        return super().forward(batch, rows) + 1e-3 * times.sum().sum()


class LessTheMeanOfLabels(OfDenseInputs):
    def of_others(self, dense: Tensor, labels: Tensor) -> Tensor:
        return 0.005 * labels.mean()


class InputsChangedInPlace(OfDenseInputs):
    def of_others(self, dense: Tensor, labels: Tensor) -> Any:
        dense[:, 0] += 1.0
        return dense.mul_(1.0).sum(1) + torch.from_numpy(labels.numpy())


class ZeroAtFirst(MeanOverPadding):
    """The first update makes it see its rows."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)
        self.gate = nn.Parameter(torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return functional.softplus(1 + self.gate + self.gate * (x + y))


MIXING = [
    InBatchNegatives,
    InBatchNegativesInTraining,
    InBatchNegativesWithDropout,
    InBatchNegativesWithNoise,
    MeanOverPadding,
    DividedByBatchSize,
    OfOwnSpread,
    AgainstTheNext,
    InPairs,
    AfterAllBefore,
    WeightsThatAddUpToOne,
]


class Declared(InBatchNegatives):
    mixes_samples = True


class MeantSo(InBatchNegatives):
    mixes_samples = False


class OfTheMicroBatch(InBatchNegatives):
    mixes_samples = "micro-batch"


class Misspelt(Alone):
    mixes_samples = "micro_batch"


# -- that do not -------------------------------------------------------------------------------------------------------


class Dropped(Alone):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Any:
        return super().forward(batch, {**rows, "item": functional.dropout(rows["item"], 0.5, self.training)})


class MeanOverOwnList(Alone):
    def pooled(self, rows: dict[str, Any]) -> Tensor:
        return rows["list"].mean() + rows["list"].max() - rows["list"].first() + rows["list"].last()


class MeanOverFixedLength(Alone):
    def pooled(self, rows: dict[str, Any]) -> Tensor:
        return rows["list"].to_padded(5).mean(1)


class SumsByDifference(Alone):
    """Rounding of one sample depends on all before it."""

    def pooled(self, rows: dict[str, Any]) -> Tensor:
        sums = torch.cat([torch.zeros(1, DIM), rows["list"].values.cumsum(0)])
        return sums[rows["list"].offsets[1:]] - sums[rows["list"].offsets[:-1]]


class InBfloat16(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))

    def pooled(self, rows: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.mlp(rows["list"].mean())


class Attention(Alone):
    """Pads to the longest list of the batch and masks what it has padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True)

    def pooled(self, rows: dict[str, Any]) -> Tensor:
        listed = rows["list"]
        padded = nn.functional.pad(listed.to_padded(), (0, 0, 0, 1))  # an empty list attends to the last place
        places = torch.arange(padded.shape[1])
        masked = (places >= listed.lengths[:, None]) & (places < padded.shape[1] - 1)
        return self.layer(padded, src_key_padding_mask=masked).masked_fill(masked[..., None], 0).sum(1)


class TakesOneLength(Alone):
    """Lists of one length only: it need not be tried with others."""

    def pooled(self, rows: dict[str, Any]) -> Tensor:
        return rows["list"].values.view(len(rows["list"]), LENGTH, DIM).mean(1)


class CountsCalls(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.factor = 0, None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        self.seen += batch.size
        if self.factor is None:
            self.factor = 1 + 0.0 * x.detach().mean()
        return super().loss(x * self.factor, y, batch)


class Remembers(Alone):
    """Keeps what it has seen, in each of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("swapped", torch.zeros(2))
        self.plain, self.last, self.recent, self.by_size = torch.zeros(()), [0.0], deque([0.0], maxlen=3), {"size": 0}
        self.draw = torch.Generator().manual_seed(5)

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        seen = x.detach().mean()
        self.average = 0.9 * self.average + 0.1 * seen  # another tensor each time
        self.swapped.data = self.swapped + seen
        self.plain += 1
        self.last[0] = float(seen)
        self.recent.append(float(seen))
        self.by_size["size"] += batch.size
        noise = torch.rand(len(x), generator=self.draw) if self.training else 0
        return super().loss(x + self.average + noise, y, batch)

    def kept(self) -> Any:
        tensors = [self.average.tolist(), self.swapped.tolist(), self.plain.tolist(), self.draw.get_state().tolist()]
        return [*tensors, self.last, list(self.recent), self.by_size]


BY_THEMSELVES = [
    Alone,
    Dropped,
    MeanOverOwnList,
    MeanOverFixedLength,
    SumsByDifference,
    InBfloat16,
    Attention,
    CountsCalls,
]
LENGTH = 3


def trainer_of(model: nn.Module, *, std: float = 0.01, **options: Any) -> Trainer:
    options.setdefault("micro_batches", 2)
    tables = [Table("item", DIM, optimizer=SGD(lr=0.1), init=Normal(std))]
    return Trainer(model, tables, FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)


def uneven(size: int = 8, first: int = 0, shortest: int = 0) -> Batch:
    """With empty lists, and one that is longer than all others."""
    lists = [[(first + 7 * i + k) % 50 for k in range(shortest + i * i % 5)] for i in range(size)]
    lists[size // 3] = list(range(7))
    return Batch({"item": Jagged.from_lists([[first + i, i] for i in range(size)]), "list": Jagged.from_lists(lists)})


def even(size: int = 8) -> Batch:
    """All lists have one length, as with histories that were cut: what depends on the longest does not show."""
    lists = [[(7 * i + k) % 50 for k in range(LENGTH)] for i in range(size)]
    return Batch({"item": Jagged.from_lists([[i, i + 1] for i in range(size)]), "list": Jagged.from_lists(lists)})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- declared ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [2, "auto"])
def test_a_declared_mix_is_refused_where_the_batch_is_split(micro_batches: int | str) -> None:
    with pytest.raises(ValueError, match=r"mixes_samples = True.*use micro_batches=1"):
        trainer_of(Declared(), micro_batches=micro_batches)


def test_a_declared_mix_trains_with_one_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(Declared(), micro_batches=1, schedule="dbp").fit([uneven()] * 3).steps == 3
    assert not warnings(caplog)


def test_a_mix_that_is_meant_so_trains(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(MeantSo()).fit([uneven()] * 3).steps == 3
    assert trainer_of(InBatchNegatives(), micro_batches=1).fit([uneven()] * 3).steps == 3
    assert not warnings(caplog)


def test_a_mix_of_the_micro_batch_trains_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(OfTheMicroBatch(), micro_batches=2).fit([uneven()] * 3).steps == 3
    (line,) = warnings(caplog)
    assert "mixes_samples = 'micro-batch'" in line and "depends on the split (micro_batches=2" in line
    caplog.clear()
    assert trainer_of(OfTheMicroBatch(), micro_batches=1).fit([uneven()]).steps == 1
    assert not warnings(caplog)


def test_the_clock_does_not_decide_on_the_split_of_a_mix() -> None:
    with pytest.raises(ValueError, match=r"micro_batches='auto' the clock would decide on it; give a number"):
        trainer_of(OfTheMicroBatch(), micro_batches="auto")


def test_a_declaration_that_means_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mixes_samples = 'micro_batch'; it is True, False, 'micro-batch' or 'global'"
    ):
        trainer_of(Misspelt())


# -- found -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [uneven, even])
@pytest.mark.parametrize("std", [0.01, 1.0])
@pytest.mark.parametrize("kind", MIXING)
def test_an_undeclared_mix_is_refused_before_anything_is_updated(
    kind: type[nn.Module], std: float, make: Callable[[], Batch]
) -> None:
    torch.manual_seed(3)
    trainer = trainer_of(kind(), std=std)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rows = trainer.rows("item", torch.arange(50))
    with pytest.raises(TrainingError, match=r"batch 0: the loss of a sample depends on the other samples") as told:
        trainer.fit([make()] * 3)
    for advice in ("micro_batches=1", "Jagged has mean", "mixes_samples = False"):
        assert advice in str(told.value)
    assert torch.equal(trainer.rows("item", torch.arange(50)), rows)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def with_inputs(size: int = 8) -> Batch:
    draw, batch = torch.Generator().manual_seed(size), uneven(size)
    lists = [[float(size + i)] * (i % 3) for i in range(size)]
    times = Jagged.from_lists(lists, dtype=torch.float32)
    dense = {"x": torch.randn(size, DIM, generator=draw), "times": times, "large": 1e6 * torch.ones(size)}
    return Batch(batch.keys, dense, torch.rand(size, generator=draw))


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        (WeakContrast, "the dense input 'x'"),
        (LessTheMean, "the dense input 'x'"),
        (InGradientOnly, "the dense input 'x'"),
        (OfListsInTheBatch, "the dense input 'times'|sample"),
        (LessTheMeanOfLabels, "the labels"),
    ],
)
def test_a_weak_mix_through_dense_inputs_or_labels_is_found(kind: type[nn.Module], by: str) -> None:
    for size in (8, 64):
        with pytest.raises(TrainingError, match=f"batch 0: the loss of a sample depends on.*({by})"):
            trainer_of(kind()).fit([with_inputs(size)])


@pytest.mark.parametrize("kind", [OfDenseInputs, InputsChangedInPlace])
def test_dense_inputs_of_samples_by_themselves_are_trained_with_without_a_word(
    caplog: pytest.LogCaptureFixture, kind: type[nn.Module]
) -> None:
    for size in (2, 8, 70):
        batch, before = with_inputs(size), with_inputs(size)
        assert trainer_of(kind()).fit([batch]).steps == 1
        added = batch.dense["x"][:, 0] - before.dense["x"][:, 0]  # type: ignore[index]
        torch.testing.assert_close(added, torch.full_like(added, float(kind is InputsChangedInPlace)))
    assert not warnings(caplog)


@pytest.mark.parametrize("options", [{"micro_batches": 8}, {"micro_batches": "auto"}, {"micro_batches": 100}])
@pytest.mark.parametrize("schedule", ["serial", "fwp", "nested"])
def test_a_mix_is_found_however_the_batch_is_cut(schedule: str, options: dict[str, Any]) -> None:
    """Also where a micro-batch is one sample, which has nothing to be mixed with, or the cut is yet to be measured."""
    for kind in (InBatchNegatives, MeanOverPadding):
        with pytest.raises(TrainingError, match="batch 0: the loss of a sample depends on"):
            trainer_of(kind(), schedule=schedule, **options).fit([uneven(shortest=1)] * 3)


def test_a_mix_behind_weights_that_begin_with_zero_is_found_when_they_do_not_any_more() -> None:
    with pytest.raises(TrainingError, match="batch 1: the loss of a sample depends on"):
        trainer_of(ZeroAtFirst()).fit([uneven()] * 3)


def mix_on_the_last_rank() -> None:
    kind = type("Ranker", (Alone,), {})
    trainer = trainer_of(kind(), schedule="nested", micro_batches=2)
    if trainer.rank == trainer.world - 1:  # data shows it there
        kind.forward = InBatchNegatives.forward
    trainer.fit([uneven(first=100 * trainer.rank)] * 4)


def test_a_mix_that_one_worker_finds_is_refused_on_all(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(2, mix_on_the_last_rank)
    assert [kind for kind, _ in outcomes] == ["failed", "failed"]
    assert outcomes[0][1][:2] == outcomes[1][1][:2]
    assert "rank 1, batch 0: the loss of a sample depends on the other samples" in outcomes[0][1][1]


# -- not found where there is none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [uneven, even])
@pytest.mark.parametrize("std", [0.01, 1.0])
@pytest.mark.parametrize("kind", BY_THEMSELVES)
def test_samples_by_themselves_are_trained_without_a_word(
    caplog: pytest.LogCaptureFixture, kind: type[nn.Module], std: float, make: Callable[[], Batch]
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        for size in (2, 8, 70):
            assert trainer_of(kind(), std=std).fit([make(size)] * 2).steps == 2
    assert not warnings(caplog)


def test_a_model_of_one_length_is_trained_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(TakesOneLength()).fit([even()] * 2).steps == 2
    assert not warnings(caplog)


def test_our_own_models_are_trained_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    size = 40
    lengths = torch.arange(size) % 9
    keys = torch.arange(int(lengths.sum())) % 300
    history = Jagged.from_lengths(keys, lengths)
    hstu, fuxi = (kind(dim=16, max_length=8, num_layers=2, num_heads=2, dropout=0.1) for kind in (HSTU, FuXi))
    negatives = Jagged.from_lengths(torch.arange(4 * size) % 300, torch.full((size,), 4))
    hstu_batch = Batch({"history": history, "negatives": negatives})
    dlrm = DLRM(dim=16, num_dense=3, features=["history"], bottom=[8], top=[8])
    dlrm_batch = Batch({"history": history}, {"dense": torch.randn(size, 3)}, (torch.arange(size) % 2).float())
    for model, batch, pooling in ((hstu, hstu_batch, None), (fuxi, hstu_batch, None), (dlrm, dlrm_batch, "sum")):
        names = list(batch.keys)
        trainer = Trainer(
            model,
            [Table("item", 16, optimizer=SGD(lr=0.1))],
            [Feature(name, "item", pooling) for name in names],
            dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
            micro_batches=4,
        )
        assert trainer.fit([batch] * 2).steps == 2
    assert not warnings(caplog)


# -- what cannot be said -----------------------------------------------------------------------------------------------


class Noisy(Alone):
    """Draws in its forward: two runs of it differ, whatever the samples."""

    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return super().loss(x + torch.randn(len(x)), y, batch)


class OfWholeEights(Alone):
    def loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return super().loss(x.view(-1, 8).reshape(-1), y, batch)


def test_a_model_that_is_random_in_evaluation_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(Noisy()).fit([uneven()] * 3).steps == 3
    (line,) = warnings(caplog)
    assert "draws random numbers in eval mode too" in line and "Set mixes_samples" in line


def test_a_model_that_cannot_be_tried_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(OfWholeEights()).fit([uneven(16)] * 3).steps == 3
    (line,) = warnings(caplog)
    assert "could not be tried" in line and "RuntimeError: shape '[-1, 8]' is invalid for input of size 4" in line


def test_a_model_that_fails_says_so_itself(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match=r"shape '\[-1, 8\]' is invalid for input of size 4"):
        trainer_of(OfWholeEights()).fit([uneven(8)])
    assert not warnings(caplog)


# -- unnoticed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Dropped, Noisy, CountsCalls, Remembers])
def test_looking_for_a_mix_changes_nothing(kind: type[nn.Module]) -> None:
    """Not the random numbers that training draws, nor what the model keeps, nor which of its modules are in training."""

    def trained(model: Any) -> tuple[str, Any, Any]:
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        trainer = trainer_of(model)
        trainer.fit([uneven()] * 3)
        modes = [module.training for module in model.modules()]
        kept = model.kept() if isinstance(model, Remembers) else getattr(model, "calls", None)
        return trainer.digest(), kept, modes

    class Trusted(kind):  # type: ignore[misc, valid-type]
        mixes_samples = False

    assert trained(kind()) == trained(Trusted())


@pytest.mark.parametrize("declared", [True, "micro-batch"])
def test_the_clock_does_not_decide_which_samples_are_mixed(declared: bool | str) -> None:
    model = nn.Linear(2, 2)
    model.mixes_samples = declared  # type: ignore[assignment]
    with pytest.raises(ValueError, match="balance='auto' the clock would decide"):
        refuse_mixing(model, rank=0, world=2, micro_batches=1, balance="auto")
    refuse_mixing(model, rank=0, world=2, micro_batches=1, balance="tokens")

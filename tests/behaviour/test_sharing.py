"""Losses over the samples of all workers: as one process would train, under every schedule, and nobody is left waiting."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Callback, Feature, Jagged, Normal, Output, Table, Trainer
from nestpipe.errors import TrainingError
from nestpipe.models import SyncBatchNorm, TwoTower
from nestpipe.ops import log_frequencies
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.check import check, require
from nestpipe.schedule.ops import BWD, FWD, SHARING
from nestpipe.schedule.optional import including
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.network import Level, Network
from tests.cluster import Cluster
from tests.simulate.tiny import profile, workload

DIM, ITEMS, SIZE, STEPS, LR, DENSE_LR = 6, 25, 14, 5, 0.3, 0.05
EXACT = ("serial", "dbp", "fwp", "nested")


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str = "serial"
    micro_batches: int = 1
    log_q: str = "batch"
    uneven: bool = False  # rank 0 has a few samples of each batch, and none of some
    balance: str = "none"


def pairs(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Histories, targets, who it is, and how popular the target is: of one step, of all workers."""
    draw = torch.Generator().manual_seed(step)
    history = torch.randint(0, ITEMS, (SIZE, 3), generator=draw)
    target = torch.randint(0, ITEMS, (SIZE,), generator=draw)
    return history, target, torch.randint(0, 9, (SIZE,), generator=draw), -1 - (target % 5).float()


def batches(rank: int, world: int, case: Case, steps: int = STEPS) -> Iterator[Batch]:
    for step in range(steps):
        history, target, user, log_q = pairs(step)
        cut = [SIZE // 2, 3, 0][step % 3] if case.uneven else SIZE // 2
        mine = slice(0, SIZE) if world == 1 else slice(0, cut) if rank == 0 else slice(cut, SIZE)
        each = torch.ones(len(target[mine]), dtype=torch.int64)
        yield Batch(
            {
                "history": Jagged.from_lengths(history[mine].reshape(-1), 3 * each),
                "target": Jagged.from_lengths(target[mine], each),
            },
            dense={"user": user[mine], "log_q": log_q[mine]},
        )


def make(case: Case, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        TwoTower(dim=DIM, hidden=(8,), temperature=0.3, log_q=case.log_q) if model is None else model,
        [Table("item", DIM, optimizer=SGD(lr=LR), init=Normal(1.0))],
        [Feature("history", "item"), Feature("target", "item", "sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, DENSE_LR),
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        balance=case.balance,
        **options,
    )


def train(case: Case) -> tuple[str, list[float], np.ndarray, list[np.ndarray]]:
    losses: list[float] = []
    with make(case) as trainer:
        trainer.fit(batches(trainer.rank, trainer.world, case), on_step=lambda result: losses.append(result.loss))
        rows = trainer.rows("item", torch.arange(ITEMS)).numpy().copy()
        return trainer.digest(), losses, rows, [p.detach().numpy().copy() for p in trainer.model.parameters()]


def train_all(cases: list[Case]) -> list[tuple[str, list[float], np.ndarray, list[np.ndarray]]]:
    return [train(case) for case in cases]


def plain(log_q: str) -> tuple[list[float], np.ndarray, list[np.ndarray]]:
    """The same in one process, with nothing of ours but the towers' first weights and the rows' first values."""
    with make(Case()) as trainer:
        towers = trainer.model
        table = nn.Embedding.from_pretrained(trainer.rows("item", torch.arange(ITEMS)).clone(), freeze=False)
    user_tower, item_tower = towers.user_tower, towers.item_tower
    optimizers = [torch.optim.SGD(table.parameters(), LR), torch.optim.SGD(towers.parameters(), DENSE_LR)]
    losses = []
    for step in range(STEPS):
        history, target, user, given = pairs(step)
        users = nn.functional.normalize(user_tower(table(history).mean(1)), dim=1)
        items = nn.functional.normalize(item_tower(table(target)), dim=1)
        shift = {"batch": log_frequencies(target), "data": given, "none": torch.zeros(SIZE)}[log_q]
        logits = users @ items.T / 0.3 - shift
        same = target[:, None] == target
        logits = logits.masked_fill((user[:, None] == user) & ~same, -torch.inf)
        loss = (logits.logsumexp(1) - logits.masked_fill(~same, -torch.inf).logsumexp(1)).mean()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return losses, table.weight.detach().numpy(), [p.detach().numpy() for p in towers.parameters()]


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("log_q", ["batch", "data", "none"])
def test_two_towers_equal_a_plain_program_of_one_process(cluster: Cluster, log_q: str, world: int) -> None:
    losses, rows, weights = plain(log_q)
    cases = [Case(log_q=log_q), Case("nested", 3, log_q), Case(log_q=log_q, uneven=True)]
    for _, our_losses, our_rows, our_weights in cluster.run(world, train_all, cases)[0]:
        np.testing.assert_allclose(our_losses, losses, atol=1e-6)
        np.testing.assert_allclose(our_rows, rows, atol=1e-6)
        for ours, theirs in zip(our_weights, weights, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [Case(), Case(micro_batches=3), Case(uneven=True, micro_batches=2), Case(balance="tokens", micro_batches=2)],
)
def test_every_schedule_gives_the_same_bits(cluster: Cluster, case: Case) -> None:
    results = cluster.run(2, train_all, [dataclasses.replace(case, schedule=name) for name in EXACT])
    assert {digest for of_rank in results for digest, *_ in of_rank} == {results[0][0][0]}


def train_apart(worker_1_ends_after: int) -> tuple[str, int]:
    with make(Case("nested", 2)) as trainer:
        own = batches(trainer.rank, trainer.world, Case())
        trainer.fit(itertools.islice(own, worker_1_ends_after) if trainer.rank == 1 else own)
        return trainer.digest(), trainer.steps


def test_a_worker_that_has_run_out_of_data_holds_nobody_up(cluster: Cluster) -> None:
    results = cluster.run(2, train_apart, 2)
    assert results[0] == results[1] and results[0][1] == STEPS


def train_in_two(folder: str) -> tuple[str, str]:
    case = Case("nested", 2)
    with make(case) as whole:
        whole.fit(batches(whole.rank, whole.world, case))
        expected = whole.digest()
    with make(case) as first:
        first.fit(batches(first.rank, first.world, case), steps=2)
        first.save(folder)
    with make(case) as second:
        second.load(folder)
        second.fit(itertools.islice(batches(second.rank, second.world, case), 2, None))
        return expected, second.digest()


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    expected, resumed = cluster.run(2, train_in_two, str(tmp_path / "saved"))[0]
    assert resumed == expected


def test_evaluation_compares_the_samples_of_a_batch_and_ranks_all_items() -> None:
    case = Case()
    with make(case) as trainer:
        before = trainer.digest()
        first = next(batches(0, 1, case))
        loss = trainer.evaluate([first], {})["loss"]
        first.labels = first.keys["target"].values
        ranked = trainer.evaluate_ranking(
            [first], table="item", candidates=torch.arange(ITEMS), ks=(ITEMS,), exclude_seen=False
        )
        assert ranked[f"HR@{ITEMS}"] == 1.0 and ranked["targets"] == SIZE
        assert trainer.digest() == before
        np.testing.assert_allclose(trainer.step(first).loss, loss, rtol=1e-6)


# -- trouble -----------------------------------------------------------------------------------------------------------


class Troubled(TwoTower):
    """On rank 1, in batch 2."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__(dim=DIM, temperature=0.3)
        self.where, self.rank, self.is_time = where, rank, False

    def embed(self, batch: Batch, rows: dict[str, Any]) -> Any:
        self.is_time = self.rank == 1 and torch.equal(batch.keys["target"].values, pairs(2)[1][SIZE // 2 :])
        own, shared = super().embed(batch, rows)
        if self.is_time:
            if self.where == "embed":
                raise RuntimeError("the tower fell")
            if self.where == "other names":
                shared["extra"] = torch.zeros(batch.size)
            if self.where == "a vector that is not finite":
                shared["item"] = shared["item"] * torch.tensor([torch.nan] + [1.0] * (batch.size - 1))[:, None]
        return own, shared

    def compare(self, own: Any, shared: Any, first: int) -> Output:
        output = super().compare(own, shared, first)
        if self.is_time:
            if self.where == "compare":
                raise RuntimeError("no comparison")
            if self.where == "a loss that is not finite":
                output.losses = output.losses / torch.tensor([0.0] + [1.0] * (len(output.losses) - 1))
        return output


def fit_in_trouble(where: str, schedule: str, **options: Any) -> tuple[str, int, int]:
    rank = torch.distributed.get_rank()
    with make(Case(schedule), Troubled(where, rank), **options) as trainer:
        try:
            trainer.fit(batches(rank, 2, Case()))
        except TrainingError as error:
            return str(error), trainer.steps, trainer.skipped
        return "", trainer.steps, trainer.skipped


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("embed", "rank 1, batch 2: RuntimeError: the tower fell"),
        ("compare", "rank 1, batch 2: RuntimeError: no comparison"),
        ("a vector that is not finite", "rank 1, batch 2: the model's embed returned nan in 'item' of sample 0"),
        ("a loss that is not finite", "rank 1, batch 2: the loss of sample 0 is inf"),
        ("other names", "extra [n] float32; embed must return the same names, shapes and types on every worker"),
    ],
)
@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_trouble_of_one_worker_ends_all_with_its_cause_and_no_other(
    cluster: Cluster, schedule: str, where: str, told: str
) -> None:
    (message, steps, _), other = cluster.run(2, fit_in_trouble, where, schedule)
    assert other[0] == message and steps == other[1] == 2
    assert told in message
    assert message.count("rank 0") == (where == "other names")


def skip_in_trouble(where: str) -> tuple[str, int, int]:
    return fit_in_trouble(where, "nested", on_nonfinite="skip")


@pytest.mark.parametrize("where", ["a vector that is not finite", "a loss that is not finite"])
def test_what_is_not_finite_on_one_worker_is_skipped_on_all(cluster: Cluster, where: str) -> None:
    assert cluster.run(2, skip_in_trouble, where) == [("", STEPS, 1)] * 2


class Uneven(TwoTower):
    """On rank 1 micro-batches are not of one kind."""

    def __init__(self, rank: int) -> None:
        super().__init__(dim=DIM)
        self.rank, self.calls = rank, 0

    def embed(self, batch: Batch, rows: dict[str, Any]) -> Any:
        own, shared = super().embed(batch, rows)
        self.calls += 1
        return {**own, "extra": torch.zeros(batch.size, 2 + self.rank * (self.calls % 2))}, shared


def fit_uneven(schedule: str) -> str:
    rank = torch.distributed.get_rank()
    with make(Case(schedule, 2), Uneven(rank)) as trainer, pytest.raises(TrainingError) as told:
        trainer.fit(batches(rank, 2, Case()))
    return str(told.value)


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_micro_batches_of_different_kinds_on_one_worker_end_all_with_its_cause(cluster: Cluster, schedule: str) -> None:
    told = cluster.run(2, fit_uneven, schedule)
    assert told[0] == told[1]
    assert told[0].startswith(
        "rank 1, batch 0: the model's embed returned [n, 2] float32 as 'extra' for one micro-batch and [n, 3] float32 for another"
    )


class Normed(TwoTower):
    """A batch norm of users, before or behind what is shared."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(0)
        super().__init__(dim=DIM, temperature=0.3)
        self.where, self.norm = where, SyncBatchNorm(DIM)

    def embed(self, batch: Batch, rows: dict[str, Any]) -> Any:
        own, shared = super().embed(batch, rows)
        return ({**own, "user": self.norm(own["user"])} if self.where == "embed" else own), shared

    def compare(self, own: Any, shared: Any, first: int) -> Output:
        own = {**own, "user": self.norm(own["user"])} if self.where == "compare" else own
        return super().compare(own, shared, first)


def fit_normed(where: str) -> tuple[str, np.ndarray, np.ndarray]:
    with make(Case("nested"), Normed(where)) as trainer:
        message = ""
        try:
            trainer.fit(batches(trainer.rank, trainer.world, Case(uneven=True)))
        except TrainingError as error:
            message = str(error)
        rows = np.empty(0) if message else trainer.rows("item", torch.arange(ITEMS)).numpy().copy()
        return message, rows, trainer.model.norm.running_mean.numpy().copy()


def test_batch_norms_of_the_first_half_meet_and_in_the_second_they_are_refused(cluster: Cluster) -> None:
    (alone,) = cluster.run(1, fit_normed, "embed")
    for message, rows, mean in cluster.run(2, fit_normed, "embed"):
        assert not message
        np.testing.assert_allclose(rows, alone[1], atol=1e-5)
        np.testing.assert_allclose(mean, alone[2], atol=1e-5)
    assert not cluster.run(1, fit_normed, "compare")[0][0]  # one worker has all samples there
    for message, _, mean in cluster.run(2, fit_normed, "compare"):
        assert "batch norm 'norm' is in the model's compare" in message and "put it into embed" in message
        assert not mean.any()


# -- declared ----------------------------------------------------------------------------------------------------------


def test_a_model_without_its_two_halves_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.mixes_samples = "global"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"has no method embed.*docs/negatives.md"):
        make(Case(), model)


class Halves(TwoTower):
    def __init__(self, made: Any) -> None:
        super().__init__(dim=DIM)
        self.made = made

    def embed(self, batch: Batch, rows: dict[str, Any]) -> Any:
        return self.made(*super().embed(batch, rows))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda own, shared: shared, "must return two dicts"),
        (lambda own, shared: (own, {}), "must return two dicts"),
        (lambda own, shared: ({"user": own["user"][1:]}, shared), r"a tensor \[13, 6\] as 'user' for 14 samples"),
        (lambda own, shared: (own, {**shared, "key": shared["key"][1:]}), "tensors of one length"),
    ],
)
def test_halves_that_do_not_fit_are_told(made: Any, told: str) -> None:
    with make(Case(), Halves(made)) as trainer, pytest.raises(TrainingError, match=told):
        trainer.fit(batches(0, 1, Case()))


class Mixes(TwoTower):
    def embed(self, batch: Batch, rows: dict[str, Any]) -> Any:
        own, shared = super().embed(batch, rows)
        return own, {**shared, "item": shared["item"] - shared["item"].mean(0)}


def test_a_first_half_that_mixes_samples_is_refused_under_micro_batches_and_may_do_so_without() -> None:
    with (
        make(Case(micro_batches=2), Mixes(dim=DIM)) as trainer,
        pytest.raises(TrainingError, match="the other samples"),
    ):
        trainer.fit(batches(0, 1, Case()))
    with make(Case(), Mixes(dim=DIM)) as trainer:
        trainer.fit(batches(0, 1, Case()))


class Predicts(TwoTower):
    def compare(self, own: Any, shared: Any, first: int) -> Output:
        output = super().compare(own, shared, first)
        return dataclasses.replace(output, predictions=own["user"][:, 0])


class Kept(Callback):
    wants_predictions = True

    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def on_step(self, result: Any) -> None:
        self.pairs += result.predicted


def test_predictions_of_the_second_half_are_told_to_who_wants_them() -> None:
    kept, batch = Kept(), next(batches(0, 1, Case()))
    batch.labels = torch.arange(SIZE)
    with make(Case(micro_batches=2), Predicts(dim=DIM)) as trainer:
        trainer.fit([batch], callbacks=[kept])
    ((predictions, labels),) = kept.pairs
    assert predictions.shape == (SIZE,) and not predictions.requires_grad and torch.equal(labels, batch.labels)


# -- the schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3, 12])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_shares_between_its_forwards_and_its_backwards(name: str, micro_batches: int) -> None:
    schedule = including(SCHEDULES[name](micro_batches=micro_batches), SHARING)
    assert require(schedule, SHARING).problems == []
    order = [task.op.name for task in schedule.tasks if task.op.name in (FWD, BWD, *SHARING)]
    assert order == [FWD] * micro_batches + [*SHARING] + [BWD] * micro_batches


def test_a_schedule_without_the_exchange_is_refused_and_one_that_compares_too_early_found() -> None:
    with pytest.raises(ValueError, match="each worker would compare its samples with its own ones only"):
        require(SCHEDULES["nested"](), SHARING)
    good = including(SCHEDULES["serial"](micro_batches=2), SHARING)

    def step(t: int) -> Iterator[Any]:
        tasks = list(good.step(t))
        names = [task.op.name for task in tasks]
        i, j = names.index("SHARE"), names.index("COMPARE")
        tasks[i], tasks[j] = tasks[j], tasks[i]
        yield from tasks

    problems = check(dataclasses.replace(good, step=step)).problems
    assert any("COMPARE(t) reads the shared before SHARE(t)" in problem for problem in problems), problems


def test_it_is_recorded_told_and_costed() -> None:
    with make(Case(micro_batches=2), record=True) as trainer:
        trainer.fit(batches(0, 1, Case()))
        assert set(SHARING) <= {event.op for event in trainer.recorded().events}
        assert any("vectors that samples of all workers share" in line for line in trainer.describe())
    links = Network(1, Level(latency=0, bandwidth=1e9), Level(latency=0, bandwidth=1e6))
    load = dataclasses.replace(workload(), shared_bytes=500.0)
    costs = Costs(load, profile({"COMPARE": (0.0, 0.001)}, network=links), Setting("nested"), 4)
    by_name = {task.op.name: costs(task.op) for task in costs.schedule.tasks}
    assert by_name["SHARE"].together == by_name["UNSHARE"].together == pytest.approx(3 * 500 / 1e6)
    assert by_name["COMPARE"].alone == pytest.approx(0.001 * 4 * load.samples**2)

"""Learning rates that change, clipping, frozen rows and parameters: under every schedule, on several workers, resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from nestpipe import SGD, Adam, Batch, Feature, Jagged, LRSchedule, RowwiseAdagrad, Table, Trainer, TrainingError
from nestpipe.engine.context import StepResult
from nestpipe.running.resuming import resume_from
from tests.cluster import Cluster

STEPS = 9
FEATURES = [Feature("item", "item", "sum"), Feature("user", "user", "sum")]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.above = nn.Linear(8, 4), nn.Linear(4, 1)
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        x = torch.cat([rows["item"], rows["user"]], 1)
        return (self.above(torch.tanh(self.below(x)))[:, 0] - 3 * batch.labels) ** 2


def batches(first: int, last: int) -> list[Batch]:
    """This worker's part of the same twelve samples a step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = slice(rank * 12 // world, (rank + 1) * 12 // world)
    made = []
    for step in range(first, last):
        keys = {name: [[(step * 5 + s) % 11, s % 4] for s in range(12)][part] for name in ("item", "user")}
        labels = (torch.arange(12.0) / 12)[part]
        made.append(Batch({name: Jagged.from_lists(lists) for name, lists in keys.items()}, {}, labels))
    return made


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)


def at_milestones(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)


def one_after_another(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def by_a_function(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Case(NamedTuple):
    schedule: str = "serial"
    tier: str = "memory"
    hot: int = 0
    replicas: int = 1
    scheduler: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The same in every process, as pytest-xdist wants it."""
        return f"{self.schedule}-{self.tier}-{self.hot}-{self.replicas}-{getattr(self.scheduler, '__name__', None)}"


def halving(step: int) -> float:
    return 0.5**step


def make(case: Case, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    memory = {"tier": case.tier, **({"memory": "20MB"} if case.tier == "disk" else {})}
    tables = [
        Table("item", 4, optimizer=RowwiseAdagrad(lr=0.1), lr_schedule=halving, hot=case.hot, **memory),
        Table("user", 4, optimizer=Adam(lr=0.1, weight_decay=0.1), frozen_until=4, **memory),
    ]
    return Trainer(
        Tower(),
        tables,
        FEATURES,
        dense_optimizer=lambda p: torch.optim.Adam(p, 0.05),
        lr_schedule=LRSchedule(warmup=3, decay="cosine", steps=STEPS),
        lr_scheduler=case.scheduler,
        clip_norm=0.5,
        schedule=case.schedule,
        micro_batches=2,
        replicas=case.replicas,
        storage=folder / "storage",
        **options,
    )


def whole(case: Case, folder: Path) -> str:
    with make(case, folder) as trainer:
        trainer.fit(batches(0, STEPS))
        return trainer.digest()


def cut(case: Case, folder: Path) -> str:
    """The same, saved after five steps and gone on with by another trainer."""
    with make(case, folder) as trainer:
        trainer.fit(batches(0, 5))
        trainer.save(folder / "saved")
    with make(case, folder) as trainer:
        trainer.load(folder / "saved")
        trainer.fit(batches(5, STEPS))
        return trainer.digest()


def all_ways(case: Case, folder: Path) -> list[str]:
    """Serial first."""
    digests = [whole(case._replace(schedule=schedule), folder) for schedule in ("serial", "dbp", "fwp", "nested")]
    return [*digests, cut(case._replace(schedule="nested"), folder)]


PLACES = [
    (1, Case(tier="disk", scheduler=one_cycle)),
    (2, Case(hot=3, scheduler=one_after_another)),
    (2, Case(replicas=2, scheduler=at_milestones)),
    (2, Case(tier="disk")),
]


@pytest.mark.parametrize(("world", "case"), PLACES, ids=lambda value: getattr(value, "name", str(value)))
def test_every_schedule_has_the_bits_of_serial_and_goes_on_with_them(
    cluster: Cluster, tmp_path: Path, world: int, case: Case
) -> None:
    results = cluster.run(world, all_ways, case, tmp_path)
    assert {digest for of_rank in results for digest in of_rank} == {results[0][0]}


def test_a_torch_scheduler_of_a_function_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    case = Case("nested", scheduler=by_a_function)
    assert cut(case, tmp_path) == whole(case, tmp_path) != whole(Case("nested"), tmp_path)


def test_a_run_that_an_earlier_version_began_with_lr_decay_goes_on_with_its_rates(tmp_path: Path) -> None:
    """It called scale_lr after every step, and so do its checkpoints tell."""
    rates, saved = LRSchedule(decay="cosine", steps=STEPS), tmp_path / "checkpoints"

    def trainer_of(**options: Any) -> Trainer:
        torch.manual_seed(0)
        tables = [Table(name, 4, optimizer=RowwiseAdagrad(lr=0.1)) for name in ("item", "user")]
        return Trainer(Tower(), tables, FEATURES, dense_optimizer=lambda p: torch.optim.Adam(p, 0.05), **options)

    with trainer_of() as earlier:
        for batch in batches(0, STEPS):
            earlier.step(batch)
            earlier.scale_lr(rates(earlier.steps))
            if earlier.steps == 5:
                earlier.save(saved / "step-000000005")
        expected = earlier.digest()
    with trainer_of(lr_schedule=rates, schedule="nested") as trainer:
        assert resume_from(trainer, tmp_path, saved) == saved / "step-000000005"
        trainer.fit(batches(5, STEPS))
        assert trainer.digest() == expected


# -- against arithmetic --------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Its gradient is 1, of each value of a row and of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return rows["item"].sum(1) + self.weight


def of_plain(tables: list[Table], **options: Any) -> Trainer:
    return Trainer(
        Plain(),
        tables,
        [Feature(table.name, table.name, "sum") for table in tables],
        dense_optimizer=lambda p: torch.optim.SGD(p, 2.0),
        **options,
    )


def same_key(steps: int) -> list[Batch]:
    return [Batch({"item": Jagged.from_lists([[7]])})] * steps


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_update_t_uses_the_rates_of_step_t(schedule: str) -> None:
    results: list[StepResult] = []
    rates = LRSchedule(warmup=2, decay="linear", steps=6, final=0.0)
    factors = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    with of_plain([Table("item", 2, optimizer=SGD(lr=1.0))], lr_schedule=rates, schedule=schedule) as trainer:
        first = trainer.rows("item", [7])
        trainer.fit(same_key(7), on_step=results.append)
        assert torch.allclose(first - trainer.rows("item", [7]), torch.full((1, 2), sum(factors)))
        assert trainer.model.weight.item() == pytest.approx(-2.0 * sum(factors))
        assert trainer.model.weight.grad is None
    assert [result.lr for result in results] == pytest.approx([2.0 * factor for factor in factors])


def test_a_table_has_its_own_schedule_and_dense_rates_their_torch_scheduler() -> None:
    tables = [Table("item", 2, optimizer=SGD(lr=1.0), lr_schedule=halving)]
    with of_plain(
        tables, lr_schedule=lambda step: 0.0, lr_scheduler=lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1)
    ) as trainer:
        first = trainer.rows("item", [7])
        trainer.fit(same_key(4))
        assert torch.allclose(first - trainer.rows("item", [7]), torch.full((1, 2), 1.875))
        assert trainer.model.weight.item() == pytest.approx(-2.0 * (1 + 1 + 0.1 + 0.1))


def test_scale_lr_multiplies_what_schedules_and_schedulers_make_of_a_rate() -> None:
    with of_plain(
        [Table("item", 2, optimizer=SGD(lr=1.0), lr_schedule=halving)],
        lr_scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    ) as trainer:
        trainer.scale_lr(0.5)
        first = trainer.rows("item", [7])
        trainer.fit(same_key(3))
        assert torch.allclose(first - trainer.rows("item", [7]), torch.full((1, 2), 0.5 * 1.75))
        assert trainer.model.weight.item() == pytest.approx(-2.0 * 0.5 * 1.75)


@pytest.mark.parametrize("schedule", ["serial", "dbp", "nested", "semi_async"])
def test_rows_of_a_frozen_table_are_born_and_read_but_first_updated_in_its_step(schedule: str) -> None:
    tables = [Table("item", 2, optimizer=Adam(lr=1.0, weight_decay=0.5), frozen_until=3)]
    with of_plain(tables, schedule=schedule) as trainer:
        first = trainer.rows("item", [7])
        trainer.fit(same_key(3))
        assert trainer.table_stats()["item"].rows == 1
        assert torch.equal(trainer.rows("item", [7]), first)
        trainer.fit(same_key(1))
        # Adam's first step is one of the whole rate: the steps before did not count.
        assert torch.allclose(first - trainer.rows("item", [7]), torch.ones(1, 2), atol=1e-3)


# -- clipping --------------------------------------------------------------------------------------------------------------


def clipped(micro_batches: int, clip_norm: float) -> list[tuple[list[float], list[float]]]:
    """Norms, and weights, of five steps, by schedule."""
    return [clipped_under(schedule, micro_batches, clip_norm) for schedule in ("serial", "nested")]


def clipped_under(schedule: str, micro_batches: int, clip_norm: float) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    norms: list[float] = []
    tables = [Table(name, 4, optimizer=SGD(lr=0.0)) for name in ("item", "user")]
    with Trainer(
        Tower(),
        tables,
        FEATURES,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.5),
        clip_norm=clip_norm,
        schedule=schedule,
        micro_batches=micro_batches,
    ) as trainer:
        trainer.fit(batches(0, 5), on_step=lambda result: norms.append(result.grad_norm or math.nan))
        assert torch.equal(trainer.model.still, torch.ones(3))
        return norms, torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).tolist()


def by_hand(clip_norm: float) -> tuple[list[float], list[float]]:
    """One process, one batch, torch's own clipping."""
    tables = [Table(name, 4, optimizer=SGD(lr=0.0)) for name in ("item", "user")]
    norms, model = [], Tower()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    with Trainer(Tower(), tables, FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, 0.5)) as rows:
        for batch in batches(0, 5):
            bags = {
                name: torch.stack([rows.rows(name, keys).sum(0) for keys in lists.to_lists()])
                for name, lists in batch.keys.items()
            }
            optimizer.zero_grad()
            model(batch, bags).mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
            optimizer.step()
    return norms, torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize(("world", "micro_batches"), [(1, 3), (2, 1), (3, 2)])
def test_the_norm_is_that_of_the_whole_batch_however_it_is_cut(
    cluster: Cluster, world: int, micro_batches: int
) -> None:
    norms, weights = by_hand(0.7)
    assert min(norms) < 0.7 < max(norms)  # some are clipped, some are not
    results = cluster.run(world, clipped, micro_batches, 0.7)
    serial, _ = results[0]
    assert all(result == serial for of_rank in results for result in of_rank)
    assert serial[0] == pytest.approx(norms, rel=1e-5)
    assert serial[1] == pytest.approx(weights, abs=1e-5)


class Exploding(Plain):
    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return (rows["item"].sum(1) + self.weight) * (3e38 if batch.labels is not None else 1.0)


def exploding(clip_norm: float) -> dict[str, Any]:
    """By schedule: how many batches were left out, and what has changed; and what is told of it."""
    overflows = Batch({"item": Jagged.from_lists([[7]])}, labels=torch.ones(1))
    found: dict[str, Any] = {}
    for schedule, on_nonfinite in (("serial", "skip"), ("dbp", "skip"), ("nested", "skip"), ("nested", "raise")):
        tables = [Table("item", 2, optimizer=SGD(lr=1e-3))]
        with Trainer(
            Exploding(),
            tables,
            [Feature("item", "item", "sum")],
            dense_optimizer=lambda p: torch.optim.SGD(p, 1.0),
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            schedule=schedule,
        ) as trainer:
            first = trainer.rows("item", [7])
            try:
                trainer.fit([overflows])
                same = bool(torch.equal(trainer.rows("item", [7]), first))
                found[schedule] = trainer.skipped, same, trainer.model.weight.item()
            except TrainingError as error:
                found["told"] = str(error)
    return found


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_gradients_that_overflow_only_when_they_are_summed_are_not_finite_for_all(
    cluster: Cluster, clip_norm: float
) -> None:
    for found in cluster.run(2, exploding, clip_norm):
        told = found.pop("told")
        assert found == dict.fromkeys(("serial", "dbp", "nested"), (1, True, 0.0))
        assert "the dense gradients of all workers are finite, but so large that their sum may not be" in told


def test_a_batch_that_is_left_out_has_no_norm_but_its_rates_go_by() -> None:
    results: list[StepResult] = []
    nan = Batch({"item": Jagged.from_lists([[7]])}, labels=torch.ones(1))

    class Failing(Plain):
        def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
            return super().forward(batch, rows) * (math.nan if batch.labels is not None else 1.0)

    with Trainer(
        Failing(),
        [Table("item", 2, optimizer=SGD(lr=1.0))],
        [Feature("item", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 1.0),
        lr_schedule=halving,
        clip_norm=100.0,
        on_nonfinite="skip",
    ) as trainer:
        trainer.fit([*same_key(1), nan, *same_key(1)], on_step=results.append)
        assert trainer.model.weight.item() == pytest.approx(-1.25)
    assert [(result.skipped, result.grad_norm) for result in results] == [(False, 1.0), (True, None), (False, 1.0)]


# -- mistakes --------------------------------------------------------------------------------------------------------------


def with_other_rates(what: str) -> str:
    rank = dist.get_rank()

    def own(step: int) -> float:
        return 0.5 if rank and step >= 2 else 1.0

    options: dict[str, Any] = {
        "rows": {"tables": [Table("item", 2, lr_schedule=own)]},
        "dense": {"lr_schedule": own, "tables": [Table("item", 2, lr_schedule=LRSchedule())]},
        "scheduler": {"lr_scheduler": lambda o: lr_scheduler.LambdaLR(o, own), "tables": [Table("item", 2)]},
        "declared": {"lr_schedule": LRSchedule(warmup=1 + rank), "tables": [Table("item", 2)]},
        "frozen": {"tables": [Table("item", 2, frozen_until=rank)]},
        "clip": {"clip_norm": 1.0 + rank, "tables": [Table("item", 2)]},
        "precision": {"precision": ["float32", "bf16"][rank], "tables": [Table("item", 2)]},
        "own": {"tables": [Table("item", 2)]},
    }[what]

    def on_step(result: StepResult) -> None:
        if what == "own" and result.step == 2:
            trainer.scale_lr(own(2))

    try:
        with of_plain(options.pop("tables"), **options) as trainer:
            trainer.fit(same_key(4), on_step=on_step)
    except TrainingError as error:
        return str(error)
    return "done"


MISTAKES = {
    "rows": "learning rate of table 'item' in step 3 is 0.05 on rank 0 and 0.025 on rank 1",
    "dense": "learning rate of dense group 0 in step 3 is 2.0 on rank 0 and 1.0 on rank 1",
    "scheduler": "learning rate of dense group 0 in step 3 is 2.0 on rank 0 and 1.0 on rank 1",
    "own": "learning rate of table 'item' in step 3 is 0.05 on rank 0 and 0.025 on rank 1",
    "declared": "lr_schedule is LRSchedule(warmup=1",
    "frozen": "table 0: frozen_until is 0 on rank 0 and 1 on rank 1",
    "clip": "clip_norm is 1.0 on rank 0 and 2.0 on rank 1",
    "precision": "precision is 'float32' on rank 0 and 'bf16' on rank 1",
}


def all_mistakes() -> dict[str, str]:
    return {what: with_other_rates(what) for what in MISTAKES}


def test_workers_with_different_rates_hear_of_it_before_an_update(cluster: Cluster) -> None:
    for told in cluster.run(2, all_mistakes):
        for what, message in MISTAKES.items():
            assert message in told[what]


def test_a_function_that_fails_in_the_middle_of_training_is_told() -> None:
    def failing(step: int) -> float:
        return 1.0 if step < 2 else 1 / 0

    with (
        of_plain([Table("item", 2)], lr_schedule=failing) as trainer,
        pytest.raises(TrainingError, match=r"batch 2: .*division by zero"),
    ):
        trainer.fit(same_key(4))


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_scheduler_that_has_come_to_its_end_says_so_with_nothing_half_done(own_loop: bool) -> None:
    with of_plain(
        [Table("item", 2)], schedule="serial", lr_scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)
    ) as trainer:

        def train() -> None:
            if not own_loop:
                trainer.fit(same_key(5))
            for batch in same_key(5):
                trainer.step(batch)

        with pytest.raises(ValueError, match="Tried to step 4 times"):
            train()
        assert trainer.steps >= 4 and trainer.digest()


def test_a_checkpoint_of_another_scheduler_is_refused_and_one_that_is_not_needed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(Case(scheduler=one_cycle), tmp_path) as trainer:
        trainer.fit(batches(0, 2))
        trainer.save(tmp_path / "saved")
    with (
        make(Case(scheduler=at_milestones), tmp_path) as trainer,
        pytest.raises(ValueError, match="with lr_scheduler OneCycleLR, and the one here is MultiStepLR"),
    ):
        trainer.load(tmp_path / "saved")
    with make(Case(), tmp_path) as trainer, caplog.at_level("WARNING"):
        trainer.load(tmp_path / "saved")
        trainer.save(tmp_path / "without")
    assert "has the state of an lr_scheduler (OneCycleLR)" in caplog.text
    with (
        make(Case(scheduler=one_cycle), tmp_path) as trainer,
        pytest.raises(ValueError, match="without an lr_scheduler, and the one here is OneCycleLR"),
    ):
        trainer.load(tmp_path / "without")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_schedule": lambda step: -1.0}, r"lr_schedule\(0\) is -1.0"),
        ({"clip_norm": -1.0}, "clip_norm must be a number of at least 0"),
        ({"clip_norm": math.nan}, "clip_norm must be a number of at least 0"),
        ({"precision": "fp16"}, "precision 'fp16'"),
        ({"compile": 1}, "compile must be True or False"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        of_plain([Table("item", 2)], **options)


@pytest.mark.parametrize("entry", [{"lr_schedule": 0.5}, {"frozen_until": -1}, {"frozen_until": True}])
def test_a_table_refuses_what_it_cannot_follow(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(entry))):
        Table("item", 2, **entry)

"""The dense part as plain torch would have it: frozen and unfrozen parameters, shared modules, buffers, modes, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer, TrainingError
from tests.cluster import Cluster

TABLE = [Table("item", 4, optimizer=SGD(lr=0.1))]
FEATURE = [Feature("item", "item", "sum")]
SCHEDULES = ["serial", "nested"]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return (self.above(torch.tanh(self.below(rows["item"])))[:, 0] - batch.labels) ** 2


def batch(step: int, rank: int, world: int) -> Batch:
    """Each worker's part of the same eight samples."""
    keys = [[(step + sample) % 7, sample] for sample in range(8)]
    labels = torch.arange(8.0) / 8
    size = 8 // world
    part = slice(rank * size, (rank + 1) * size)
    return Batch({"item": Jagged.from_lists(keys[part])}, {}, labels[part])


def trainer_of(model: nn.Module, schedule: str = "serial", **options: Any) -> Trainer:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 0.05)

    options = {"dense_optimizer": adam, "micro_batches": 2, **options}
    return Trainer(model, TABLE, FEATURE, schedule=schedule, **options)


def weights_of(trainer: Trainer) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).tolist()


def all_batches(trainer: Trainer, first: int, last: int) -> list[Batch]:
    return [batch(step, trainer.rank, trainer.world) for step in range(first, last)]


def unfreeze(schedule: str, only: int | None) -> list[float]:
    """The lower layer is frozen for three steps; then on all ranks, or on one, it is not."""
    model = Tower()
    model.below.requires_grad_(False)
    trainer = trainer_of(model, schedule)

    def on_step(result: Any) -> None:
        if result.step == 3 and only in (None, trainer.rank):
            model.below.requires_grad_(True)
        if result.step == 6:
            model.above.requires_grad_(False)

    trainer.fit(all_batches(trainer, 0, 9), on_step=on_step)
    return weights_of(trainer)


def plain_unfreezing() -> list[float]:
    """The same in plain torch, rows included."""
    model, rows = Tower(), None
    trainer = trainer_of(Tower())
    rows = nn.Parameter(trainer.rows("item", torch.arange(8)))
    model.below.requires_grad_(False)
    optimizer, row_optimizer = torch.optim.Adam(model.parameters(), 0.05), torch.optim.SGD([rows], 0.1)
    for step in range(9):
        whole = batch(step, 0, 1)
        keys = torch.tensor(whole.keys["item"].to_lists())
        model(whole, {"item": rows[keys].sum(1)}).mean().backward()
        for one in (optimizer, row_optimizer):
            one.step()
            one.zero_grad()
        if step == 2:
            model.below.requires_grad_(True)
        if step == 5:
            model.above.requires_grad_(False)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_unfrozen_during_a_run_train_as_in_plain_torch(cluster: Cluster, schedule: str, world: int) -> None:
    expected = plain_unfreezing()
    ranks = cluster.run(world, unfreeze, schedule, None)
    assert ranks == [ranks[0]] * world
    torch.testing.assert_close(torch.tensor(ranks[0]), torch.tensor(expected), rtol=2e-5, atol=1e-6)


def test_workers_stay_alike_when_only_one_of_them_unfreezes(cluster: Cluster) -> None:
    for only in (0, 1):
        first, second = cluster.run(2, unfreeze, "nested", only)
        assert first == second


def frozen_altogether() -> list[float]:
    model = Tower().requires_grad_(False)
    trainer = trainer_of(model)
    trainer.fit(all_batches(trainer, 0, 2))
    return weights_of(trainer)


def test_a_model_that_is_frozen_altogether_trains_rows_only(cluster: Cluster) -> None:
    torch.manual_seed(4)
    assert cluster.run(2, frozen_altogether) == [weights_of_plain(Tower())] * 2


def weights_of_plain(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def two_trainers(shared: bool) -> list[float]:
    """Two live trainers of one module take turns; or one after the other, of which the first is gone by then."""
    model = Tower()
    one = trainer_of(model, "nested")
    other = trainer_of(model, "nested") if shared else None
    one.fit(all_batches(one, 0, 3))
    if other is None:
        one.close()
        other = trainer_of(model, "nested")
    other.fit(all_batches(other, 3, 6))
    if shared:
        one.fit(all_batches(one, 6, 8))
    return weights_of(other)


@pytest.mark.parametrize("shared", [False, True])
def test_trainers_that_share_a_module_keep_workers_alike(cluster: Cluster, shared: bool) -> None:
    first, second = cluster.run(2, two_trainers, shared)
    (alone,) = cluster.run(1, two_trainers, shared)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=2e-5, atol=1e-6)


class Branched(nn.Module):
    """Its second layer is for batches whose labels are above one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.always, self.sometimes = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        layers = [self.always, self.sometimes] if batch.labels.max() > 1 else [self.always]  # type: ignore[union-attr]
        return (sum(layer(rows["item"])[:, 0] for layer in layers) - batch.labels) ** 2


def raised(made: Batch, by: float) -> Batch:
    return Batch(made.keys, {}, made.labels + by)  # type: ignore[operator]


def others_take_the_gradients(how: str) -> list[float]:
    """Between steps somebody takes `grad` of parameters that then only one of the workers uses."""
    model = Branched()
    trainer = trainer_of(model, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    other = trainer_of(model, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    batches = [raised(made, 2.0 * (trainer.rank == 0)) for made in all_batches(trainer, 0, 6)]

    def on_step(_: Any) -> None:
        if how == "zero_grad":
            model.zero_grad()
        else:  # there, the other worker uses them
            other.step(raised(batch(9, trainer.rank, trainer.world), 2.0 * (trainer.rank == trainer.world - 1)))

    if how == "zero_grad":  # and one has no data at all in the end
        batches = batches[: 6 if trainer.rank == 0 else 3]
    trainer.fit(batches, on_step=on_step)
    return weights_of(trainer)


@pytest.mark.parametrize("how", ["zero_grad", "another trainer"])
def test_workers_stay_alike_when_somebody_takes_the_gradients_between_steps(cluster: Cluster, how: str) -> None:
    first, second = cluster.run(2, others_take_the_gradients, how)
    assert first == second


def both_in_one_step() -> list[float]:
    """The first worker's samples use a layer in one trainer, the second's in another; gradients must not leak between them."""
    model, world = Branched(), dist.get_world_size() if dist.is_initialized() else 1
    trainer = trainer_of(model, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), micro_batches=1)
    other = trainer_of(model, dense_optimizer=lambda p: torch.optim.SGD(p, 0.0), micro_batches=1)

    def data(using: int) -> Batch:
        return raised(batch(0, trainer.rank, world), 2.0 * (trainer.rank == using))

    trainer.fit([data(0)] * 4, on_step=lambda _: other.step(data(1)))
    return weights_of(trainer)


def undisturbed() -> list[float]:
    trainer = trainer_of(Branched(), dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), micro_batches=1)
    trainer.fit([raised(batch(0, trainer.rank, trainer.world), 2.0 * (trainer.rank == 0))] * 4)
    return weights_of(trainer)


def test_a_step_of_another_trainer_leaves_no_gradient_behind(cluster: Cluster) -> None:
    assert cluster.run(2, both_in_one_step) == cluster.run(2, undisturbed)


class WithBuffers(Tower):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.register_buffer("scale", torch.rand(1, generator=draw), persistent=False)
        self.register_buffer("expanded", torch.rand(1, 3, generator=draw).expand(2, 3))
        self.strided = nn.Parameter(torch.rand(3, 2, generator=draw).t())

    def values(self) -> list[float]:
        return torch.cat([t.detach().reshape(-1) for t in (self.scale, self.expanded, self.strided)]).tolist()


def broadcast() -> list[float]:
    model = WithBuffers()
    trainer_of(model)
    return model.values()


def test_buffers_that_are_not_saved_or_expanded_and_strided_parameters_are_made_equal_too(cluster: Cluster) -> None:
    first, second = cluster.run(2, broadcast)
    assert first == second


# -- what does not train -----------------------------------------------------------------------------------------------


class Detached(Tower):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, rows).detach()


def fit_nothing(how: str) -> str:
    trainer = trainer_of(Detached() if how == "detached" else Tower())
    try:
        with torch.no_grad() if how == "no_grad" else torch.enable_grad():
            trainer.fit(all_batches(trainer, 0, 2))
    except TrainingError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("how", ["detached", "no_grad"])
def test_a_loss_that_nothing_can_learn_from_is_refused_on_every_rank(cluster: Cluster, how: str) -> None:
    for world in (1, 2):
        for told in cluster.run(world, fit_nothing, how):
            assert "there is nothing to train" in told and "torch.no_grad()" in told


def test_an_optimizer_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(TrainingError, match=r"dense_optimizer returned NoneType; .* torch.optim.Adam"):
        trainer_of(Tower(), dense_optimizer=lambda p: None)


def test_an_optimizer_of_other_parameters_than_the_models_is_refused() -> None:
    model, copy = Tower(), Tower()
    temperature = nn.Parameter(torch.zeros(7))
    for make, told in (
        (lambda p: torch.optim.SGD(copy.parameters(), 0.1), r"parameter 0 of group 0 .* is not the model's"),
        (
            lambda p: torch.optim.SGD([*p, temperature], 0.1),
            r"parameter 4 of group 0 .* of shape \(7,\), is not the model's",
        ),
        (lambda p: torch.optim.SGD([{"params": []}], 0.1), "the dense optimizer has no parameters"),
    ):
        with pytest.raises(TrainingError, match=told):
            trainer_of(model, dense_optimizer=make)
    trainer_of(model, dense_optimizer=lambda p: torch.optim.SGD(p[1:3], 0.1))  # some of them are enough


def test_a_lazy_module_is_refused_before_it_is_used() -> None:
    model = Tower()
    model.above = nn.LazyLinear(1)
    with pytest.raises(TrainingError, match=r"above\.weight has no shape yet"):
        trainer_of(model)


def test_a_submodule_in_eval_mode_stays_so_through_fit_and_evaluate() -> None:
    model = Tower()
    model.below.eval()
    trainer = trainer_of(model)
    modes: list[bool] = []
    trainer.fit(all_batches(trainer, 0, 2), on_step=lambda _: modes.append(model.below.training))
    trainer.evaluate(all_batches(trainer, 0, 1), {})
    assert modes == [False, False] and not model.below.training and model.training and model.above.training


def test_a_model_in_eval_mode_is_put_into_train_mode_by_fit() -> None:
    model = Tower().eval()
    trainer = trainer_of(model)
    trainer.fit(all_batches(trainer, 0, 1))
    assert model.training and model.below.training


class Caching(Tower):
    """Makes a tensor on first use and keeps it, as masks and rotary tables are."""

    mask: Tensor | None = None

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
        return super().forward(batch, {"item": rows["item"] * self.mask})


def test_what_a_model_caches_during_an_evaluation_can_be_trained_with() -> None:
    trainer = trainer_of(Caching())
    trainer.evaluate(all_batches(trainer, 0, 1), {})
    assert trainer.fit(all_batches(trainer, 0, 2)).steps == 2


# -- gradients that are not finite -------------------------------------------------------------------------------------


class BadGradient(Tower):
    """The loss is finite, its gradient is not: a root at zero, in samples whose label is 7/8."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        losses = super().forward(batch, rows)
        bad = (batch.labels == 7 / 8).float() * (batch.labels.max() == 7 / 8)  # type: ignore[union-attr]
        what = self.above.bias if self.where == "parameter" else rows["item"][:, 0]
        return Output(losses + bad * torch.sqrt((what - what.detach()).clamp(min=0.0) * bad))


def fit_bad_gradient(where: str, schedule: str, on_nonfinite: str) -> Any:
    trainer = trainer_of(BadGradient(where), schedule, on_nonfinite=on_nonfinite)
    before = trainer.digest() if where == "parameter" else weights_of(trainer)
    try:
        result = trainer.fit(all_batches(trainer, 0, 2))
    except TrainingError as error:
        return str(error)
    assert result.skipped == 2 and result.steps == 2
    rows = trainer.rows("item", torch.arange(8))
    assert torch.isfinite(rows).all() and weights_of(trainer) == (
        before if where != "parameter" else weights_of(trainer)
    )
    return "skipped"


@pytest.mark.parametrize("schedule", ["serial", "dbp", "fwp", "nested"])
@pytest.mark.parametrize("where", ["parameter", "rows"])
def test_a_gradient_that_is_not_finite_is_caught_before_anything_is_updated(
    cluster: Cluster, where: str, schedule: str
) -> None:
    name = "parameter 'above.bias'" if where == "parameter" else "feature 'item'"
    for world in (1, 2):
        for told in cluster.run(world, fit_bad_gradient, where, schedule, "raise"):
            assert f"rank {world - 1}, batch 0: the gradient of {name} is" in told
        assert cluster.run(world, fit_bad_gradient, where, schedule, "skip") == ["skipped"] * world

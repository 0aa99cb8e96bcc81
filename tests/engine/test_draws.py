"""torch's global generator: data that draws from it beside the model is told, and nothing of ours moves it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from nestpipe import SGD, Batch, Feature, Jagged, Table, Trainer
from nestpipe.engine.draws import WATCHED, Mark, SourceDraws, watched

DIM = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return functional.softplus(self.out(rows["item"])[:, 0])


class Noisy(Plain):
    """Draws in training and in evaluation."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, {"item": rows["item"] + 0.1 * torch.randn_like(rows["item"])})


class Dropped(Plain):
    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return super().forward(batch, {"item": functional.dropout(rows["item"], 0.5, self.training)})


def trainer_of(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(
        model,
        [Table("item", DIM, optimizer=SGD(lr=0.1))],
        [Feature("item", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        **{"micro_batches": 2, "schedule": "nested"} | options,
    )


def batch_of(keys: Tensor) -> Batch:
    return Batch({"item": Jagged.from_lengths(keys, torch.ones(len(keys), dtype=torch.int64))})


def numbers(first: int = 0) -> Iterator[Batch]:
    for step in itertools.count(first):
        yield batch_of(torch.arange(8) + step)


def drawn(steps: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
    for _ in range(steps):
        yield batch_of(torch.randint(0, 50, (8,), generator=generator))


def epochs(count: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
    loader = DataLoader(range(80), batch_size=8, shuffle=True, generator=generator)  # type: ignore[arg-type]
    for _ in range(count):
        yield from (batch_of(keys) for keys in loader)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- what data draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "batch"), [(lambda: drawn(12), "randint", 1), (lambda: epochs(3), "random_", 10)]
)
def test_data_that_draws_beside_the_model_is_told_once(
    caplog: pytest.LogCaptureFixture, make: Callable[[], Iterator[Batch]], name: str, batch: int
) -> None:
    assert trainer_of(Dropped()).fit(make()).steps >= 12
    (line,) = warnings(caplog)
    assert f"the data draws from torch's global generator ({name}, batch {batch})" in line
    assert "Give the data a torch.Generator of its own" in line


@pytest.mark.parametrize(
    "make",
    [
        lambda: drawn(12, torch.Generator()),
        lambda: epochs(1),  # drawn before the first batch is there
        lambda: epochs(3, torch.Generator()),
        lambda: DataLoader(list(drawn(12)), batch_size=None, shuffle=True),
    ],
)
def test_data_that_draws_by_itself_or_before_the_model_computes_is_fine(
    caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    assert trainer_of(Dropped()).fit(make()).steps >= 10
    assert not warnings(caplog)


def test_data_of_many_calls_is_watched_at_the_beginning_only() -> None:
    told: list[str] = []
    watching: list[bool] = []

    def costly() -> Iterator[int]:
        for number in range(20):
            calls = SourceDraws.total
            for _ in range(200):
                torch.empty(1)
            torch.rand(1)
            watching.append(SourceDraws.total > calls)
            yield number

    assert list(watched(costly(), tell=told.append)) == list(range(20))
    assert watching == [0 < number <= WATCHED for number in range(20)] and len(told) == 1


# fmt: off
DRAWING = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal", "normal_",
    "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
)
# fmt: on


def test_every_function_that_draws_is_seen() -> None:
    x = torch.full((3,), 0.5)
    arguments: dict[str, tuple[Any, ...]] = {
        "multinomial": (x, 2), "normal": (x, x), "rand": (3,), "randn": (3,), "randint": (9, (3,)), "randperm": (9,),
        "randint_like": (x, 9), "geometric_": (0.5,), "bernoulli_": (0.5,),
    }  # fmt: skip
    for name in DRAWING:
        function = getattr(x.clone(), name) if name.endswith("_") else getattr(torch, name)
        mark, watch = Mark(), SourceDraws()
        function(*arguments.get(name, () if name.endswith("_") else (x,)))
        assert mark.moved, name
        with watch:
            function(*arguments.get(name, () if name.endswith("_") else (x,)))
        assert watch.drew == name and not mark.moved  # a source has drawn: nothing is known, nothing is put back


HALVES = torch.full((2, 8, 4), 0.5)
INDIRECT: dict[str, Callable[[], Any]] = {
    "dropout": lambda: functional.dropout(HALVES),
    "a dropout module": lambda: nn.Dropout(0.5)(HALVES),
    "alpha dropout": lambda: functional.alpha_dropout(HALVES, training=True),
    "feature dropout": lambda: functional.dropout1d(HALVES, training=True),
    "gumbel_softmax": lambda: functional.gumbel_softmax(HALVES),
    "rrelu": lambda: functional.rrelu(-HALVES, training=True),
    "binomial": lambda: torch.binomial(10 * HALVES, HALVES),
    "Gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(HALVES).sample(),
    "StudentT": lambda: torch.distributions.StudentT(3.0).sample(),
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(3, 3)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "a module": lambda: nn.GRU(3, 3),
    "attention with dropout": lambda: functional.scaled_dot_product_attention(HALVES, HALVES, HALVES, dropout_p=0.5),
    "the global generator by name": lambda: torch.randperm(9, generator=torch.default_generator),
    "in place, by name": lambda: torch.empty(3).uniform_(generator=torch.default_generator),
    "random_split": lambda: torch.utils.data.random_split(range(4), [2, 2]),  # type: ignore[arg-type]
    "a sampler": lambda: list(torch.utils.data.WeightedRandomSampler([0.5, 0.5], 2)),
    "svd_lowrank": lambda: torch.svd_lowrank(HALVES),
    "manual_seed": lambda: torch.manual_seed(torch.initial_seed() + 1),
    "seed": lambda: torch.seed(),
}


@pytest.mark.parametrize("draw", INDIRECT.values(), ids=INDIRECT)
def test_functions_that_draw_in_their_depth_are_seen_too(draw: Callable[[], Any]) -> None:
    state, mark, watch = torch.get_rng_state(), Mark(), SourceDraws()
    with watch:
        draw()
    assert not torch.equal(torch.get_rng_state(), state)
    assert watch.drew is not None and not mark.moved


def test_what_might_draw_and_does_not_is_not_taken_for_a_draw() -> None:
    own = torch.Generator().manual_seed(2)
    mark, watch = Mark(), SourceDraws()
    with watch:
        functional.dropout(HALVES, training=False)
        functional.scaled_dot_product_attention(HALVES[None], HALVES[None], HALVES[None])
        functional.rrelu(-HALVES, training=False)
        torch.randperm(9, generator=own)
        torch.empty(3).normal_(generator=own)
    assert watch.drew is None
    torch.rand(1)
    assert mark.moved  # nothing stands between it and the state that it knows


# -- what we draw ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Dropped, Noisy])
def test_a_resumed_run_of_a_model_that_draws_ends_with_the_same_bits(tmp_path: Path, kind: type[nn.Module]) -> None:
    def begun() -> Trainer:
        torch.manual_seed(7)
        return trainer_of(kind())

    whole = begun()
    whole.fit(numbers(), steps=12)
    first = begun()
    first.fit(numbers(), steps=6)
    first.save(tmp_path / "half")
    resumed = begun()
    resumed.load(tmp_path / "half")
    resumed.fit(numbers(6), steps=6)
    assert resumed.digest() == whole.digest()


def test_looking_for_a_mix_takes_nothing_from_data_that_draws() -> None:
    def trained(model: Any) -> str:
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        trainer = trainer_of(model)
        trainer.fit(drawn(12))
        return trainer.digest()

    class Trusted(Plain):
        mixes_samples = False

    assert trained(Plain()) == trained(Trusted())

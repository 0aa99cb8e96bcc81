"""LRSchedule: the curves are those of torch's schedulers, and what cannot be meant is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from nestpipe.rates import LRSchedule, factor_at

Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def rates_of(make: Make, steps: int) -> list[float]:
    """What torch multiplies a rate of 1 by."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def cosine_to_zero(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


def linear(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=10)


def exponential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / 10))


def by_steps(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def warm_then_linear(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=3), linear(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (LRSchedule(decay="cosine", steps=10, final=0.0), cosine_to_zero),
        (LRSchedule(decay="linear", steps=10, final=0.2), linear),
        (LRSchedule(decay="exponential", steps=10, final=0.01), exponential),
        (LRSchedule(decay="step", step_size=3, gamma=0.5), by_steps),
        (LRSchedule(warmup=4, decay="linear", steps=14, final=0.2), warm_then_linear),
    ],
    ids=lambda value: getattr(value, "decay", ""),
)
def test_each_decay_is_that_of_torch(schedule: LRSchedule, make: Make) -> None:
    expected = rates_of(make, 10)
    assert [schedule(step) for step in range(10)] == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 3


def test_a_warm_up_begins_above_zero_and_reaches_the_whole_rate_in_its_last_step() -> None:
    schedule = LRSchedule(warmup=4)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_cosine_ends_at_its_floor_with_the_bits_that_earlier_versions_gave() -> None:
    schedule = LRSchedule(decay="cosine", steps=12)
    earlier = [max(0.05, 0.5 * (1.0 + math.cos(math.pi * step / 12))) for step in range(13)]
    assert [schedule(step) for step in range(13)] == earlier
    assert schedule(12) == schedule(1000) == 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": "cosin"}, "decay must be one of"),
        ({"decay": "cosine"}, "needs steps"),
        ({"decay": "linear", "steps": 5, "warmup": 5}, "leaves no step of 5 for the decay"),
        ({"decay": "exponential", "steps": 5, "final": 0.0}, "give a final above 0"),
        ({"decay": "step"}, "needs step_size"),
        ({"decay": "linear", "steps": 5, "step_size": 2}, "is for decay 'step'"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0"),
        ({"warmup": 2.5}, "warmup must be a whole number"),
        ({"decay": "linear", "steps": 5, "final": 1.5}, "final must be a number from 0 to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRSchedule(**settings)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), None, "fast"])
def test_a_function_that_returns_no_factor_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"lr_schedule\(3\) is .* finite number of at least 0"):
        factor_at(lambda step: value, 3)

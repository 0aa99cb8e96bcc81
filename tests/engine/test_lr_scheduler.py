"""Torch schedulers: their state goes through JSON and goes on the same; what is none, or cannot be saved, is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from nestpipe.engine.lr_scheduler import made, put_state, state_of


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0, momentum=0.9)


def in_a_row(optimizer: torch.optim.Optimizer) -> Any:
    parts = [torch_schedulers.ConstantLR(optimizer, 0.5, 2), torch_schedulers.CosineAnnealingLR(optimizer, 6)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[3])


def at_once(optimizer: torch.optim.Optimizer) -> Any:
    return torch_schedulers.ChainedScheduler(
        [torch_schedulers.LinearLR(optimizer, 0.1), torch_schedulers.ExponentialLR(optimizer, 0.9)], optimizer
    )


class OfTensors:
    """One that somebody has written, with all kinds of things in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: Any = None) -> None:
        self.optimizer, self.seen, self.more = optimizer, torch.tensor([1.5, 0.25], dtype=torch.float64), state

    def step(self) -> None:
        self.seen = self.seen * 0.9
        self.optimizer.param_groups[0]["lr"] = float(self.seen[0])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, (1, "a tuple"): [None, True, {2: "two"}], "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[(1, "a tuple")] == [None, True, {2: "two"}]
        self.seen = state["seen"]


MAKE: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch_schedulers.StepLR(o, 2, gamma=0.5),
    lambda o: torch_schedulers.MultiStepLR(o, [2, 2, 7], gamma=0.5),  # its state has a Counter, with numbers as keys
    lambda o: torch_schedulers.OneCycleLR(o, 2.0, total_steps=20),
    lambda o: torch_schedulers.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    in_a_row,
    at_once,
    OfTensors,
]


def rates(scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(float(scheduler.optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("make", MAKE)
def test_a_scheduler_goes_on_from_a_state_that_has_been_json(make: Callable[..., Any]) -> None:
    first, second = (made(make, optimizer()) for _ in range(2))
    rates(first, 4)
    state = json.loads(json.dumps(state_of(first)))
    # As a checkpoint has it: the optimizer brings its rates, the scheduler its state.
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    put_state(second, state)
    expected = rates(first, 6)
    assert rates(second, 6) == expected and len(set(expected)) > 1
    assert state_of(second) == state_of(first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: None, "lr_scheduler returned NoneType; it must return a scheduler made from the optimizer"),
        (lambda o: lambda step: 0.5, "A function of the step is given as lr_schedule="),
        (torch_schedulers.ReduceLROnPlateau, "wants a metric in every step.*trainer.scale_lr"),
        (lambda o: torch_schedulers.StepLR(optimizer(), 1), "a StepLR of another optimizer"),
        (lambda o: OfTensors(o, state=object()), r"OfTensors\['more'\] is object, which cannot be saved"),
        (
            lambda o: OfTensors(o, state=[{"by": min}]),
            r"OfTensors\['more'\]\[0\]\['by'\] is builtin_function_or_method",
        ),
    ],
)
def test_what_is_no_scheduler_or_cannot_be_saved_is_refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(make, optimizer())


def test_a_model_without_parameters_has_nothing_to_schedule() -> None:
    with pytest.raises(ValueError, match="the model has no parameters; leave it out"):
        made(MAKE[0], None)

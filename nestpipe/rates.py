"""Learning rates that change during a run: what they are multiplied by, as a function of the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # of the step, counted from 0, to what learning rates are multiplied by in its update

DECAYS = ("none", "linear", "cosine", "exponential", "step")
NEED_STEPS = ("linear", "cosine", "exponential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """What learning rates are multiplied by in each step: a straight rise over the first `warmup` steps, then `decay`.

    It depends on the step alone, counted from the trainer's first (batches that were left out included), so that a run that goes
    on from a checkpoint goes on with the same rates. Any other function of the step can stand in its place.

    warmup: the first step has 1 / warmup of the rate, step number `warmup` all of it.
    decay: from there on. "none"; "linear": straight down to `final`, at `steps`; "cosine": half a cosine, which `final` cuts
        off; "exponential": by one factor every step, to `final` at `steps`; "step": times `gamma` after every `step_size` steps.
    steps: where the first three of these end, counted from the first step; the rate stays from there on.
    final: what is left of the rate there.
    """

    warmup: int = 0
    decay: str = "none"
    steps: int | None = None
    final: float = 0.05
    step_size: int | None = None
    gamma: float = 0.1

    def __post_init__(self) -> None:
        def refuse(problem: str) -> ValueError:
            return ValueError(f"LRSchedule: {problem}")

        if self.decay not in DECAYS:
            raise refuse(f"decay must be one of {DECAYS}, got {self.decay!r}")
        for name, least in (("warmup", 0), ("steps", 1), ("step_size", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise refuse(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name in ("final", "gamma"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise refuse(f"{name} must be a number from 0 to 1, got {value!r}")
        if self.decay in NEED_STEPS and self.steps is None:
            raise refuse(f"decay {self.decay!r} needs steps, to know where the end is")
        if self.decay in NEED_STEPS and self.steps is not None and self.warmup >= self.steps:
            raise refuse(
                f"a warmup of {self.warmup} steps leaves no step of {self.steps} for the decay; make it shorter"
            )
        if self.decay == "exponential" and self.final == 0:
            raise refuse("decay 'exponential' comes near to 0 but not there; give a final above 0")
        if (self.decay == "step") != (self.step_size is not None):
            raise refuse(
                "decay 'step' needs step_size, the number of steps between two drops"
                if self.step_size is None
                else f"step_size={self.step_size} is for decay 'step', and the decay is {self.decay!r}"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        past = step - self.warmup
        if self.step_size is not None:
            return self.gamma ** (past // self.step_size)
        if self.steps is None or self.decay == "none":
            return 1.0
        length = self.steps - self.warmup
        past = min(past, length)
        if self.decay == "linear":
            return 1.0 + (self.final - 1.0) * (past / length)
        if self.decay == "exponential":
            return self.final ** (past / length)
        return max(self.final, 0.5 * (1.0 + math.cos(math.pi * past / length)))


def factor_at(schedule: Schedule | None, step: int) -> float:
    """Of any schedule, checked; without one it is 1."""
    if schedule is None:
        return 1.0
    value = schedule(step)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"lr_schedule({step}) is {value!r}; it must return a finite number of at least 0, which learning rates are "
            f"multiplied by in that step. (A torch scheduler is given as lr_scheduler=lambda optimizer: ...)"
        )
    return factor

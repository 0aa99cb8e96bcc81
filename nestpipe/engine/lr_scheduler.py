"""A torch learning rate scheduler beside the dense optimizer: what it must have, and its state as plain values.

A checkpoint holds the state as JSON, never as a pickle; so what JSON has no word for (tuples, keys that are numbers) is written
as a list that begins with its kind.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))
METHODS = ("step", "state_dict", "load_state_dict")


def made(lr_scheduler: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer | None) -> Any:
    """The user's scheduler, checked."""
    if optimizer is None:
        raise ValueError("lr_scheduler is for the dense optimizer, and the model has no parameters; leave it out")
    scheduler = lr_scheduler(optimizer)
    advice = "as in lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"
    if not all(callable(getattr(scheduler, name, None)) for name in METHODS):
        raise ValueError(
            f"lr_scheduler returned {type(scheduler).__name__}; it must return a scheduler made from the optimizer that it is "
            f"given, {advice}. (A function of the step is given as lr_schedule=)"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler: ReduceLROnPlateau wants a metric in every step, which there is not; call trainer.scale_lr with "
            "what you make of your metric, in on_step"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"lr_scheduler returned a {type(scheduler).__name__} of another optimizer than the one it is given; make it {advice}"
        )
    state_of(scheduler)  # that it can be saved is known before training
    return scheduler


def state_of(scheduler: Any) -> Any:
    """As JSON holds it."""
    return _plain(scheduler.state_dict(), type(scheduler).__name__)


def put_state(scheduler: Any, state: Any) -> None:
    """The opposite."""
    scheduler.load_state_dict(_from_plain(state))


def _plain(value: Any, where: str) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.tolist()]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_plain(entry, f"{where}[{at}]") for at, entry in enumerate(value)]]
    if type(value) in (dict, collections.Counter):
        entries = [[_plain(key, where), _plain(entry, f"{where}[{key!r}]")] for key, entry in value.items()]
        return [type(value).__name__, entries]
    raise ValueError(
        f"lr_scheduler: {where} is {type(value).__name__}, which cannot be saved in a checkpoint; keep numbers, texts, lists, "
        f"dicts and tensors in the scheduler's state, or use lr_schedule=, a function of the step"
    )


def _from_plain(value: Any) -> Any:
    match value:
        case ["tensor", str() as dtype, entries]:
            return torch.tensor(entries, dtype=getattr(torch, dtype))
        case ["list" | "tuple" as kind, list() as entries]:
            return (list if kind == "list" else tuple)(_from_plain(entry) for entry in entries)
        case ["dict" | "Counter" as kind, list() as entries]:
            pairs = {_from_plain(key): _from_plain(entry) for key, entry in entries}
            return pairs if kind == "dict" else collections.Counter(pairs)
    return value

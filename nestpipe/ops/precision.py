"""Operations under torch.autocast: they compute in float32, whatever the layers around them do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nestpipe.batch import Jagged

P = ParamSpec("P")
T = TypeVar("T")
REDUCED = (torch.bfloat16, torch.float16)


def in_float32(operation: Callable[P, T]) -> Callable[P, T]:
    """An operation that is forward and backward in one, of its own: autocast would cast a part of it, and only forward."""

    @functools.wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return operation(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            named = {name: wide(value) for name, value in kwargs.items()}
            return operation(*map(wide, args), **named)

    return run


def wide(value: Any) -> Any:
    """In float32, if it is a tensor of fewer bits, or a dict of some."""
    if isinstance(value, dict):
        return {name: wide(part) for name, part in value.items()}
    if isinstance(value, Jagged):
        return dataclasses.replace(value, values=wide(value.values))
    return value.float() if isinstance(value, Tensor) and value.dtype in REDUCED else value

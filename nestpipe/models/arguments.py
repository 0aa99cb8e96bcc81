"""Arguments of models: what lies outside its range is refused where it is given, not where it first hurts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any


def check_whole(model: str, least: int, **arguments: Any) -> None:
    """Raises ValueError unless each is a whole number of at least `least`."""
    for name, value in arguments.items():
        if not _is_whole(value) or value < least:
            raise ValueError(f"{model}: {name} must be a whole number of at least {least}, got {value!r}")


def check_dropout(model: str, **arguments: Any) -> None:
    """Raises ValueError unless each is a share that leaves something: 0 <= p < 1."""
    for name, value in arguments.items():
        if not is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{model}: {name} must be at least 0 and below 1, got {value!r}")


def check_names(model: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{model}: {name} must be a name, got {value!r}")


def check_widths(model: str, **arguments: Any) -> None:
    """Raises ValueError unless each is a list, perhaps empty, of whole numbers of at least 1."""
    for name, value in arguments.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{model}: {name} must be a list of hidden widths, got {value!r}")
        for width in value:
            if not _is_whole(width) or width < 1:
                raise ValueError(f"{model}: widths in {name} must be whole numbers of at least 1, got {width!r}")


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)

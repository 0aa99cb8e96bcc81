"""Types and limits that stand at a field, and the one function that checks a value against them.

steps: Annotated[int, AtLeast(1)] | None = None
clustering: Annotated[str, OneOf(CLUSTERINGS)] = "window"
lr_decay: Literal["none", "cosine"] = "none"
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from nestpipe.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class AtLeast:
    limit: float


@dataclasses.dataclass(frozen=True)
class AtMost:
    limit: float


@dataclasses.dataclass(frozen=True)
class NotEmpty:
    """Of a list."""


@dataclasses.dataclass(frozen=True, eq=False)  # a dict of names cannot be hashed
class OneOf:
    """A name from a table that stands elsewhere; where it stands nowhere else, write Literal."""

    names: Collection[str]


def hints(kind: Any) -> dict[str, Any]:
    """Types and limits of a dataclass's fields, or of a function's parameters."""
    return typing.get_type_hints(kind, include_extras=True)


def check(name: str, value: Any, hint: Any) -> Any:
    """`value`, a list as a tuple where the field holds one; ValueError that begins with `name` if it does not fit."""
    alternatives = _alternatives(hint)
    choices = [choice for kind, limits in alternatives for choice in _choices(kind, limits)]
    if value in choices:
        return value
    for kind, limits in alternatives:
        if not _choices(kind, limits) and _is(value, kind):
            for limit in limits:
                _check_limit(name, value, limit)
            return _with_entries_checked(name, value, kind)
    if choices and all(_choices(kind, limits) or kind is type(None) for kind, limits in alternatives):
        raise ValueError(f"{name} {value!r}, {did_you_mean(str(value), choices)}")
    raise ValueError(f"{name} must be {in_words(hint)}, got {value!r}")


def in_words(hint: Any) -> str:
    """`a whole number or 'auto'`. TypeError for a type that cannot be checked."""
    words: list[str] = []
    for kind, limits in _alternatives(hint):
        if typing.get_origin(kind) in _LISTS:
            ((entry, _),) = _alternatives(typing.get_args(kind)[0])
            words.append(f"a list of {_PLAIN[entry].plural}")
        elif typing.get_origin(kind) is dict:
            words.append("{name = value, ...}")
        elif choices := _choices(kind, limits):
            words += map(repr, choices)
        elif kind is not type(None):
            words.append(_plain(kind).singular)
    return " or ".join(words)


class _Plain(typing.NamedTuple):
    fits: Callable[[Any], bool]
    singular: str
    plural: str


def _is_whole(value: Any) -> bool:
    """Of 64 bits, as TOML has them."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


_PLAIN: dict[Any, _Plain] = {
    int: _Plain(_is_whole, "a whole number", "whole numbers"),
    float: _Plain(_is_number, "a finite number", "finite numbers"),
    str: _Plain(lambda value: isinstance(value, str), "text", "texts"),
    bool: _Plain(lambda value: isinstance(value, bool), "true or false", "true and false"),
    type(None): _Plain(lambda value: value is None, "nothing", "nothing"),
    Any: _Plain(lambda value: True, "anything", "anything"),
}
_LISTS = (list, tuple, Sequence)


def _plain(kind: Any) -> _Plain:
    if kind not in _PLAIN:
        raise TypeError(f"a field of type {kind} cannot be checked; see nestpipe/fields.py for those that can")
    return _PLAIN[kind]


def _alternatives(hint: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each type that a value may have, and the limits beside it."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [
        (part.__origin__, part.__metadata__) if typing.get_origin(part) is typing.Annotated else (part, ())
        for part in (typing.get_args(hint) if is_union else (hint,))
    ]


def _choices(kind: Any, limits: tuple[Any, ...]) -> list[str]:
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [name for limit in limits if isinstance(limit, OneOf) for name in limit.names]


def _is(value: Any, kind: Any) -> bool:
    """Of the type, whatever the limits."""
    if typing.get_origin(kind) in _LISTS:
        ((entry, _),) = _alternatives(typing.get_args(kind)[0])
        return isinstance(value, list | tuple) and all(_is(inner, entry) for inner in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return _plain(kind).fits(value)


def _check_limit(name: str, value: Any, limit: Any) -> None:
    match limit:
        case AtLeast(least) if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}")
        case AtMost(most) if value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value!r}")
        case NotEmpty() if not value:
            raise ValueError(f"{name} must not be empty")


def _with_entries_checked(name: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) in _LISTS:
        checked = [check(name, entry, typing.get_args(kind)[0]) for entry in value]
        return tuple(checked) if typing.get_origin(kind) is tuple else checked
    if typing.get_origin(kind) is dict:
        return {entry: check(f"{name}.{entry}", inner, typing.get_args(kind)[1]) for entry, inner in value.items()}
    return value

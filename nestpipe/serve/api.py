"""The JSON of the HTTP API: bodies to messages, with errors that name the field; answers to bodies. Every server speaks it.

`POST /v1/signal` {"user", "history", ["times"], ["candidates"]}; `POST /v1/rank` {"user", "history", ["times"], "candidates",
["now"], ["deadline_ms"]}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from nestpipe.errors import did_you_mean
from nestpipe.serve.messages import Ask, Ranked, Signal
from nestpipe.serve.trigger import Reason

LONGEST_USER = 256  # characters


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may have. body: bytes. history, candidates: items."""

    body: int = 4 << 20
    history: int = 16_384
    candidates: int = 4_096

    def __post_init__(self) -> None:
        if min(self.body, self.history, self.candidates) < 1:
            raise ValueError(f"{self}: each is at least 1")


class TooLarge(ValueError):
    """A body or a list beyond its limit."""


def read_signal(body: bytes, limits: Limits) -> Signal:
    """ValueError, for the client to read, if it is none."""
    fields = _fields(body, needed=("user", "history"), others=("times", "candidates"))
    candidates = fields.get("candidates", min(100, limits.candidates))
    if type(candidates) is not int or not 0 <= candidates <= limits.candidates:
        raise ValueError(f"candidates: a signal says how many there will be, 0 to {limits.candidates}: a whole number")
    return Signal(_user(fields), _history(fields, limits), _times(fields, limits), candidates)


def read_ask(body: bytes, limits: Limits) -> Ask:
    """ValueError, for the client to read, if it is none."""
    fields = _fields(body, needed=("user", "history", "candidates"), others=("times", "now", "deadline_ms"))
    now, deadline = _number(fields, "now"), _number(fields, "deadline_ms")
    return Ask(
        _user(fields),
        _history(fields, limits),
        _array(fields, "candidates", limits.candidates, (int,), "int64 keys"),
        times=_times(fields, limits),
        now=now,
        deadline_seconds=None if deadline is None else deadline / 1000,
    )


def read_update(body: bytes) -> str:
    fields = _fields(body, needed=("path",), others=())
    if type(fields["path"]) is not str or not fields["path"] or "\0" in fields["path"]:
        raise ValueError("path: the folder of a delta or a bundle is needed, a string")
    return str(fields["path"])


def write_decision(reason: Reason) -> bytes:
    return dump({"decision": reason.name.lower(), "reason": reason.value})


def write_ranked(ranked: Ranked) -> bytes:
    """Scores with the digits that give back the same float32."""
    return dump(
        {
            "scores": ranked.scores,
            "source": ranked.source.name.lower(),
            "version": ranked.version,
            "ms": round(1000 * ranked.seconds, 3),
        }
    )


def write_error(message: str) -> bytes:
    return dump({"error": message})


def dump(value: Any) -> bytes:
    # A message may quote what a client sent, which need not be text that UTF-8 can hold.
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": str(value.get("error", "")).encode("utf-8", "replace").decode()})


# -- fields ------------------------------------------------------------------------------------------------------------


def _fields(body: bytes, *, needed: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"the body must be a JSON object with {', '.join(needed)}, not {_kind(fields)}")
    known = [*needed, *others]
    for name in fields:
        if name not in known:
            raise ValueError(f"field {_shown(name)}, {did_you_mean(name[:50], known)}")
    for name in needed:
        if fields.get(name) is None:
            raise ValueError(f"{name}: it is missing; give {', '.join(needed)}")
    return {name: value for name, value in fields.items() if value is not None}


def _user(fields: dict[str, Any]) -> str:
    user = fields["user"]
    if type(user) is int:
        return str(user)
    if type(user) is not str or not 0 < len(user) <= LONGEST_USER:
        raise ValueError(f"user: a string of 1 to {LONGEST_USER} characters is needed, or a whole number")
    return user


def _history(fields: dict[str, Any], limits: Limits) -> np.ndarray:
    return _array(fields, "history", limits.history, (int,), "int64 keys")


def _times(fields: dict[str, Any], limits: Limits) -> np.ndarray | None:
    return _array(fields, "times", limits.history, (int, float), "seconds") if "times" in fields else None


def _array(fields: dict[str, Any], name: str, limit: int, types: tuple[type, ...], what: str) -> np.ndarray:
    values = fields[name]
    if type(values) is not list:
        raise ValueError(f"{name}: a list of {what} is needed, not {_kind(values)}")
    if len(values) > limit:
        raise TooLarge(f"{name}: {len(values)} entries, the server takes {limit}")
    strange = set(map(type, values)) - {*types}  # exactly these: True is no key
    if strange:
        place, value = next((place, value) for place, value in enumerate(values) if type(value) in strange)
        raise ValueError(f"{name}: a list of {what} is needed, entry {place} is {_kind(value)}")
    try:
        return np.array(values, np.float64 if float in set(map(type, values)) else np.int64)
    except OverflowError:
        raise ValueError(f"{name}: a list of {what} is needed, one entry is beyond 64 bits") from None


def _number(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise ValueError(f"{name}: a number is needed, not {_kind(value)}")
    return float(value)


def _kind(value: Any) -> str:
    kinds: dict[type, Callable[[Any], str]] = {
        dict: lambda _: "an object",
        list: lambda _: "a list",
        str: _shown,
        type(None): lambda _: "null",
        bool: lambda value: str(value).lower(),
    }
    return kinds.get(type(value), lambda value: f"{value}")(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 50 else text[:50] + "...")

"""What becomes of a prefix: its states, the events that change them, and what the cache tells its caller to do."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import NamedTuple


class Key(NamedTuple):
    """Whose prefix, of which history, by which model.

    history: version of the user's history; a larger one is newer. Within one version a history only grows at its end, so a prefix
        stays right whatever follows. Where items in the past change (one is removed, the window moves on), the version must.
    tokens: how many items, from the first, the prefix covers.
    model: version of the weights and rows that it is computed with.
    """

    user: Hashable
    history: int
    tokens: int
    model: str


class State(enum.Enum):
    ABSENT = "absent"
    COMPUTING = "computing"
    DEVICE = "device"
    SPILLING = "spilling"
    BOTH = "both"
    HOST = "host"
    LOADING = "loading"

    __hash__ = object.__hash__  # an Enum's own is Python, and the dict of transitions is asked at every event


class Event(enum.Enum):
    COMPUTE = "compute"
    COMPUTED = "computed"
    FAIL = "fail"
    SPILL = "spill"
    SPILLED = "spilled"
    LOAD = "load"
    LOADED = "loaded"
    DROP_DEVICE = "drop from device"
    DROP_HOST = "drop from host"

    __hash__ = object.__hash__


TRANSITIONS = {
    (State.ABSENT, Event.COMPUTE): State.COMPUTING,
    (State.COMPUTING, Event.COMPUTED): State.DEVICE,
    (State.COMPUTING, Event.FAIL): State.ABSENT,
    (State.DEVICE, Event.SPILL): State.SPILLING,
    (State.DEVICE, Event.DROP_DEVICE): State.ABSENT,
    (State.SPILLING, Event.SPILLED): State.BOTH,
    (State.SPILLING, Event.FAIL): State.DEVICE,
    (State.BOTH, Event.DROP_DEVICE): State.HOST,
    (State.HOST, Event.LOAD): State.LOADING,
    (State.HOST, Event.DROP_HOST): State.ABSENT,
    (State.LOADING, Event.LOADED): State.BOTH,
    (State.LOADING, Event.FAIL): State.ABSENT,  # a copy that cannot be read is none
}
ON_DEVICE = frozenset({State.COMPUTING, State.DEVICE, State.SPILLING, State.BOTH, State.LOADING})  # has device bytes
ON_HOST = frozenset({State.SPILLING, State.BOTH, State.HOST, State.LOADING})
READABLE = frozenset({State.DEVICE, State.SPILLING, State.BOTH})
UNDER_WAY = frozenset({State.COMPUTING, State.LOADING})


class Place(enum.Enum):
    DEVICE = "device"
    HOST = "host"


class Why(enum.Enum):
    """Why there is no prefix for whom asked."""

    ABSENT = "absent"
    TOO_LARGE = "larger than the device budget"
    NO_ROOM = "the device is full of prefixes in use"
    SLOW_LOAD = "loading takes longer than computing"
    SUPERSEDED = "of an older history or model"
    FAILED = "its computation or load failed"


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Compute the prefix into device memory; then `computed` or `failed`. Whoever asked waits for it."""

    key: Key
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Copy it from host to device; then `loaded` or `failed`. Whoever asked waits for it."""

    key: Key
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Spill:
    """Copy it from device to host; then `spilled` or `failed`. It is read on the device meanwhile."""

    key: Key
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Free that copy, before anything that follows in the list."""

    key: Key
    place: Place


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """It is on the device, and stays there until `who` releases it."""

    key: Key
    who: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """It is under way; `who` will get a Hit or a Miss, unless it leaves before."""

    key: Key
    who: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Miss:
    key: Key
    who: Hashable
    why: Why


Action = Compute | Load | Spill | Drop | Hit | Wait | Miss

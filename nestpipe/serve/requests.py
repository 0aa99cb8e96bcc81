"""What an instance is asked, and what it has done about it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable
from typing import Any

from nestpipe.serve.batching import Batching
from nestpipe.serve.costs import Work, prefix_work
from nestpipe.serve.states import Drop, Key, Load, Spill
from nestpipe.serve.trigger import Bounds


@dataclasses.dataclass(frozen=True)
class Settings:
    """An instance's.

    slo: seconds from a ranking request to its answer. overhead: of these, what is spent outside (network, reading rows).
    device_bytes, host_bytes: budgets for prefixes; 0 on the host: no host tier. bytes_per_token: of a prefix.
    wait: longest that a ranking waits for a prefix under way, in seconds; then it does the full pass.
    lease: how long a prefix is kept for the ranking that its signal announced, in seconds.
    gap: seconds from a signal to its ranking, until some have been measured.
    max_tail: a cached prefix that lacks more items than this is extended, or computed anew, at the next signal.
    piece: share of slo for which a long prefix is computed at a stretch, about: then rankings may go first. Infinity: prefixes
        are computed in one go, and always from the first item on.
    max_queue: ranking requests that wait; more are refused.
    spill_at: share of the device budget beyond which prefixes are copied to the host ahead of need.
    relay: False: full passes only. trigger: False: every signal is admitted for which there is room.
    """

    slo: float = 0.1
    overhead: float = 0.005
    device_bytes: int = 1 << 30
    host_bytes: int = 0
    bytes_per_token: int = 1 << 14
    wait: float = 0.05
    lease: float = 1.0
    gap: float = 0.05
    max_tail: int = 256
    piece: float = 0.1
    max_queue: int = 1000
    spill_at: float = 0.5
    relay: bool = True
    trigger: bool = True
    bounds: Bounds = Bounds()
    batching: Batching = Batching()

    def __post_init__(self) -> None:
        if not 0 <= self.overhead < self.slo:
            raise ValueError(f"overhead={self.overhead} leaves nothing of slo={self.slo}; both are in seconds")
        if min(self.device_bytes, self.host_bytes, self.wait, self.max_tail) < 0:
            raise ValueError(f"{self}: bytes, wait and max_tail are zero or more")
        if not min(self.bytes_per_token, self.max_queue, self.lease, self.gap, self.piece) > 0:
            raise ValueError(f"{self}: bytes_per_token, max_queue, lease, gap and piece are above zero")


class Source(enum.Enum):
    """Where the prefix of an answered ranking came from, or why it was a full pass."""

    DEVICE = "device"
    WAITED = "waited for its computation"
    LOADED = "loaded from the host"
    FULL = "full pass: no prefix"
    GAVE_UP = "full pass: the prefix was too late"
    UNUSABLE = "full pass: the prefix failed, or there was no room to load it"


RELAYED = frozenset({Source.DEVICE, Source.WAITED, Source.LOADED})


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """A ranking request. key: of the prefix that it uses, or waits for; None: a full pass. give_up: when it no longer waits."""

    id: Any
    user: Hashable
    history: int
    tokens: int
    candidates: int
    arrival: float
    deadline: float
    model: str = ""
    key: Key | None = None
    source: Source = Source.FULL
    work: Work = Work(1, 0, 0, 0)
    ready: float = 0.0
    start_by: float = math.inf
    give_up: float = math.inf
    failures: int = 0

    @property
    def group(self) -> Hashable:
        """One batch is of one model, and what failed once in a batch is tried alone."""
        return self.version, (self.id if self.failures else None)

    @property
    def version(self) -> str:
        return self.key.model if self.key else self.model


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """A signal's hold on a prefix until its ranking comes. held: the prefix is there; else it is under way."""

    user: Hashable
    key: Key
    since: float
    until: float
    held: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Compute the items of a prefix from `first` up to and without `last`, behind those before them; then `done`. The prefix is
    there when its last piece is; all of its bytes, `size`, are its own from the first piece on.

    behind: a shorter prefix on the device that has the items before `first`; None: the pieces before this one have made them.
    """

    key: Key
    size: int
    first: int
    last: int
    behind: Key | None = None

    @property
    def is_last(self) -> bool:
        return self.last == self.key.tokens

    @property
    def work(self) -> Work:
        return prefix_work(self.last - self.first, self.first)


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """Rank these together, each behind its prefix or, where key is None, its whole history; then `done`."""

    requests: list[Request]

    @property
    def model(self) -> str:
        """The version to rank with; the same for all of them. An older one only where a prefix of it is used."""
        return self.requests[0].version


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """Answer that it was not ranked. late: it could no longer be in time; else the queue is full."""

    request: Request
    late: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
    """Answer with the error: its full pass failed, alone."""

    request: Request


Action = Piece | Rank | Load | Spill | Drop | Reject | Fail

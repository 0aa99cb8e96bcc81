"""Micro-batching: which of the waiting requests run together, and when.

Requests wait in the order in which they have to start: deadline less what they take. Whenever the instance is free, the first of
them runs, with as many behind it as do not make any of them late. Nothing is held past the moment at which it has to start.
Requests that can no longer be in time run when no other waits; or are shed, if the policy says so.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from nestpipe.serve.costs import Law, Work, together


class Waiting(Protocol):
    """What is asked of a request. group: only those of the same group run together. start_by: set when it is added."""

    deadline: float
    work: Work
    ready: float
    start_by: float

    @property
    def group(self) -> Hashable: ...


W = TypeVar("W", bound=Waiting)


@dataclasses.dataclass(frozen=True)
class Batching:
    """requests, tokens: at most, in a batch.
    hold: seconds that a request may be kept for others to join it. With 0 the instance is never idle while one waits, and batches
        come of what has queued up meanwhile.
    shed: refuse requests that cannot be in time any more; without, they are answered late.
    grace: seconds behind its deadline after which a late one that has not begun is refused all the same. Without a limit an
        overloaded instance works off what nobody waits for any more, and is late for those who come meanwhile.
    """

    requests: int = 16
    tokens: int = 16_384
    hold: float = 0.0
    shed: bool = False
    grace: float = math.inf

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1 or min(self.hold, self.grace) < 0:
            raise ValueError(f"{self}: give at least one request and token, and zero or more seconds")


@dataclasses.dataclass
class Taken(Generic[W]):
    """run: together, now. late: have just become so; with `shed` they are out of the queue, else they stay in it.
    look_again: when to ask, at the latest. over: their grace has ended, and they are out of the queue."""

    run: list[W]
    late: list[W]
    look_again: float = math.inf
    over: list[W] = dataclasses.field(default_factory=list)


class Queue(Generic[W]):
    """Requests that are ready to run. law: what they take."""

    def __init__(self, batching: Batching, law: Law) -> None:
        self.batching, self.law = batching, law
        self.late = 0
        self._in_time: list[W] = []  # by start_by
        self._late: collections.deque[W] = collections.deque()

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def __iter__(self) -> Iterator[W]:
        yield from self._in_time
        yield from self._late

    @property
    def start_by(self) -> float:
        """When the first has to start in order to be in time; infinity if none waits that can be."""
        return self._in_time[0].start_by if self._in_time else math.inf

    @property
    def first_seconds(self) -> float:
        """What that one takes; infinity if none waits."""
        return self._in_time[0].deadline - self._in_time[0].start_by if self._in_time else math.inf

    def add(self, now: float, waiting: W) -> None:
        waiting.ready = now
        waiting.start_by = waiting.deadline - self.law.high(waiting.work)
        bisect.insort(self._in_time, waiting, key=_start_by)

    def part(self, now: float) -> tuple[list[W], list[W]]:
        """Those that have just become late, and those whose grace has ended: as `Taken` has them."""
        late = self._part_with_late(now)
        over = self._part_with_over(now)
        return [waiting for waiting in late if waiting.deadline + self.batching.grace > now or self.batching.shed], over

    def take(self, now: float) -> Taken[W]:
        """What runs now that the instance is free."""
        late, over = self.part(now)
        if self._in_time:
            run = self._beside(now, self._in_time[0])
            if len(run) < self.batching.requests and self.batching.hold:
                limit = min(waiting.deadline for waiting in run)
                latest = limit - self.law.high(together(waiting.work for waiting in run))
                oldest = min(waiting.ready for waiting in run)
                if now < (look_again := min(oldest + self.batching.hold, latest)):
                    return Taken([], late, look_again, over)
            chosen = set(map(id, run))
            self._in_time = [waiting for waiting in self._in_time if id(waiting) not in chosen]
            return Taken(run, late, over=over)
        # Alone: whoever comes meanwhile has to wait until it is done.
        return Taken([self._late.popleft()] if self._late else [], late, over=over)

    def drop_late(self) -> W | None:
        """Takes out the one that has been late for longest."""
        return self._late.popleft() if self._late else None

    def _part_with_over(self, now: float) -> list[W]:
        over = [waiting for waiting in self._late if waiting.deadline + self.batching.grace <= now]
        if over:
            self._late = collections.deque(
                waiting for waiting in self._late if waiting.deadline + self.batching.grace > now
            )
        return over

    def _part_with_late(self, now: float) -> list[W]:
        count = bisect.bisect_left(self._in_time, now, key=_start_by)
        late, self._in_time = self._in_time[:count], self._in_time[count:]
        self.late += count
        if not self.batching.shed:
            self._late.extend(late)
        return late

    def _beside(self, now: float, first: W) -> list[W]:
        """The first, and those behind it that fit in: none of the batch may end after its deadline."""
        run, total, limit = [first], first.work, first.deadline
        # Looking at a few times as many as fit in keeps this short in a long queue.
        for waiting in self._in_time[1 : 4 * self.batching.requests]:
            if len(run) == self.batching.requests:
                break
            more = together((total, waiting.work))
            until = min(limit, waiting.deadline)
            if (
                waiting.group == first.group
                and more.tokens <= self.batching.tokens
                and now + self.law.high(more) <= until
            ):
                run.append(waiting)
                total, limit = more, until
        return run


def _start_by(waiting: Waiting) -> float:
    return waiting.start_by

"""The sequence-aware trigger: which early signals are worth a prefix.

A signal is admitted only if the full pass of that length would miss its budget, and if the prefixes that are then alive, and the
time that is spent on them, stay within bounds. Each answer has a reason, and each reason a counter.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math


class Reason(enum.Enum):
    """What became of a signal. With the first three nothing has to be computed, the next two are admitted, the others refused."""

    ON_DEVICE = "the prefix is on the device"
    UNDER_WAY = "the prefix is being computed or loaded"
    LOADED = "the prefix is loaded from the host"
    ADMITTED = "the full pass would miss its budget"
    REUSE = "the full pass keeps its budget, but the prefix saves more than it takes"
    FAST_ENOUGH = "the full pass keeps its budget"
    FOOTPRINT = "prefixes that wait for their ranking would outgrow their share of the device"
    TOO_LATE = "its computation would not even begin before its ranking needs it"
    LOAD = "pre-inference would take more than its share of the instance's time"
    NO_ROOM = "the device is full of prefixes in use"
    TOO_LARGE = "the prefix is larger than the device's budget"
    SUPERSEDED = "a newer history or model is known"
    OFF = "relay is switched off"


FEW = 20  # prefixes: before so many have been computed, how often they are used is not known


class Rate:
    """Sum of amounts per second over about the last `window` seconds, older ones fading."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._sum = self._last = 0.0

    def add(self, now: float, amount: float) -> None:
        self._sum = self._faded(now) + amount
        self._last = now

    def per_second(self, now: float, more: float = 0.0) -> float:
        """With `more` added now."""
        return (self._faded(now) + more) / self.window

    def _faded(self, now: float) -> float:
        return self._sum * math.exp((self._last - now) / self.window) if self._sum else 0.0


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What the trigger may spend.

    footprint: share of the device budget that prefixes may take that are computed and wait for their ranking.
    load: share of the instance's time that pre-inference may take.
    window: seconds over which rates are taken.
    residence: seconds from the computation of a prefix to the end of its ranking, until some have been measured.
    reuse: also admit signals whose full pass would be in time, if prefixes are used so often that they save more time than they
        take. This is not about latency but about how much an instance can do; it needs room for prefixes between visits.
    """

    footprint: float = 0.5
    load: float = 0.5
    window: float = 5.0
    residence: float = 0.2
    reuse: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.footprint <= 1 and 0 < self.load <= 1):
            raise ValueError(f"footprint={self.footprint}, load={self.load}: give shares, above 0 and at most 1")
        if not (self.window > 0 and self.residence > 0):
            raise ValueError(f"window={self.window}, residence={self.residence}: give seconds, above 0")


class Trigger:
    """Decides on the signals of one instance. always: admits whatever there is room for (to see what the trigger is good for)."""

    def __init__(self, bounds: Bounds, *, device_bytes: int, always: bool = False) -> None:
        self.bounds, self.device_bytes, self.always = bounds, device_bytes, always
        self.counters: collections.Counter[Reason] = collections.Counter()
        self.residence = bounds.residence
        self._bytes, self._seconds = Rate(bounds.window), Rate(bounds.window)
        # Visits of a user are further apart than signals.
        self._computed, self._used = Rate(20 * bounds.window), Rate(20 * bounds.window)

    def decide(
        self,
        now: float,
        *,
        full_seconds: float,
        budget: float,
        saved_seconds: float,
        prefix_seconds: float,
        prefix_bytes: int,
        begins_in: float,
        needed_in: float,
    ) -> Reason:
        """ADMITTED or REUSE, or why not. It is not counted yet: an admitted prefix may still find no room.

        full_seconds: what the full pass takes. budget: what it may take: the SLO less the queue and whatever else there is.
        saved_seconds: what a ranking takes less with the prefix. begins_in: seconds that prefixes before it take.
        needed_in: seconds until its ranking no longer waits for it.
        """
        if prefix_bytes > self.device_bytes:
            return Reason.TOO_LARGE
        if self.always:
            return Reason.ADMITTED
        at_risk = full_seconds > budget
        if not at_risk and not self.pays(now, saved_seconds=saved_seconds, prefix_seconds=prefix_seconds):
            return Reason.FAST_ENOUGH
        if self.footprint(now, prefix_bytes) > self.bounds.footprint * self.device_bytes:
            return Reason.FOOTPRINT
        if begins_in > needed_in:
            return Reason.TOO_LATE
        if self.load(now, prefix_seconds) > self.bounds.load:
            return Reason.LOAD
        return Reason.ADMITTED if at_risk else Reason.REUSE

    def pays(self, now: float, *, saved_seconds: float, prefix_seconds: float) -> bool:
        """Whether a prefix is worth these seconds although no ranking needs it: users come back, and it saves more than that."""
        return self.bounds.reuse and self.uses(now) * saved_seconds > prefix_seconds

    def count(self, reason: Reason) -> None:
        self.counters[reason] += 1

    def began(self, now: float, *, prefix_seconds: float, prefix_bytes: int) -> None:
        """A computation or a load begins: these bytes will stay for a residence, these seconds are spent."""
        self._bytes.add(now, prefix_bytes)
        self._seconds.add(now, prefix_seconds)

    def computed(self, now: float) -> None:
        """A prefix was computed."""
        self._computed.add(now, 1.0)

    def used(self, now: float, *, resided: float) -> None:
        """A ranking used a prefix. resided: seconds that it had been there for this ranking."""
        self._used.add(now, 1.0)
        self.residence += 0.05 * (resided - self.residence)

    def uses(self, now: float) -> float:
        """Rankings per computed prefix. Until there have been some: 2, so that it is tried at all."""
        computed = self._computed.per_second(now) * self._computed.window
        used = self._used.per_second(now) * self._used.window
        return (used + 2 * FEW) / (computed + FEW)

    def footprint(self, now: float, more: int = 0) -> float:
        """Bytes alive in the mean: arrivals per second x size x residence (Little's law)."""
        return self._bytes.per_second(now, more) * self.residence

    def load(self, now: float, more: float = 0.0) -> float:
        """Share of the instance's time."""
        return self._seconds.per_second(now, more)

"""The affinity-aware router: which instance serves a user.

Every user has an order of preference over all instances, a function of their names alone (rendezvous hashing). So signal and
ranking agree without talking to each other, a new instance takes only the users who now prefer it, and those of a lost one go to
their own second choice, spread over all. An instance that has more to do than its share is passed over in that order (bounded
load); a ranking follows its signal even so, since the prefix is there. Nothing is ever fetched from another instance.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Hashable, Iterable

import numpy as np

FIRST = 4  # choices of a user that are remembered
MEMO = 1 << 16  # users of whom they are


@dataclasses.dataclass
class Member:
    """weight: how much it can do, against others. load: what it has to do now. leaving: gets no new users."""

    name: str
    weight: float = 1.0
    load: float = 0.0
    leaving: bool = False


@dataclasses.dataclass
class Routed:
    """How many went where. first: to the user's first choice. followed: rankings, to where their signal went. overloaded: to a
    later choice, since those before had too much to do. saturated: to the first choice, since all had too much to do."""

    first: int = 0
    followed: int = 0
    overloaded: int = 0
    saturated: int = 0


class Router:
    """instances: names, to begin with. slack: how much more than its even part an instance may have to do. least: what it may
    have in any case, in the unit of loads. memory: seconds for which a ranking follows its signal."""

    def __init__(
        self, instances: Iterable[str] = (), *, slack: float = 0.5, least: float = 4.0, memory: float = 10.0
    ) -> None:
        if slack < 0 or least <= 0 or memory < 0:
            raise ValueError(
                f"slack={slack}, least={least}, memory={memory}: give zero or more, and a least above zero"
            )
        self.slack, self.least, self.memory = slack, least, memory
        self.members: dict[str, Member] = {}
        self.routed = Routed()
        self._total_load = self._total_weight = 0.0
        self._first: dict[Hashable, list[Member]] = {}
        self._signals: collections.OrderedDict[Hashable, tuple[str, float]] = collections.OrderedDict()
        self._changed()
        for name in instances:
            self.join(name)

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, name: str, weight: float = 1.0) -> None:
        """A new instance, or one that comes back."""
        if not 0 < weight < math.inf:
            raise ValueError(f"instance {name!r}: weight {weight} is not above zero")
        self.lost(name)
        self.members[name] = Member(name, weight)
        self._changed()

    def leave(self, name: str) -> None:
        """It gets no new users from now on, but the rankings whose signals it has got. When those are done, say `lost`."""
        self.members[name].leaving = True
        self._changed()

    def lost(self, name: str) -> None:
        """It is gone, with all it had. Whoever notices may say so; the second time nothing happens."""
        if name not in self.members:
            return
        self._total_load -= self.members.pop(name).load
        for user in [user for user, (instance, _) in self._signals.items() if instance == name]:
            del self._signals[user]
        self._changed()

    def _changed(self) -> None:
        active = [member for member in self.members.values() if not member.leaving]
        self._active = active
        self._seeds = np.array([_hash(member.name) for member in active], np.uint64)
        self._weights = np.array([member.weight for member in active])
        self._total_weight = float(self._weights.sum())
        self._first.clear()

    # -- load ----------------------------------------------------------------------------------------------------------

    def begin(self, name: str, load: float = 1.0) -> None:
        """It has so much more to do: requests, or seconds; the same unit everywhere."""
        self.members[name].load += load
        self._total_load += load

    def done(self, name: str, load: float = 1.0) -> None:
        if member := self.members.get(name):  # else it was lost in between, and its load with it
            taken = min(load, member.load)  # it may have been lost and come back: what was begun before does not count
            member.load -= taken
            self._total_load -= taken

    def bound(self, member: Member) -> float:
        even = self._total_load * member.weight / self._total_weight
        return max(self.least, (1 + self.slack) * even)

    # -- routes --------------------------------------------------------------------------------------------------------

    def order(self, user: Hashable) -> list[str]:
        """All instances, as this user prefers them."""
        return [member.name for member in self._order(user)]

    def signal(self, now: float, user: Hashable) -> str:
        """Where to send the signal; the ranking will follow."""
        name = self._choose(user)
        self._signals.pop(user, None)
        self._signals[user] = name, now + self.memory
        while next(iter(self._signals.values()))[1] < now:
            self._signals.popitem(last=False)
        return name

    def ranking(self, now: float, user: Hashable) -> str:
        """Where to send the ranking request."""
        name, until = self._signals.pop(user, ("", -math.inf))
        if name and now <= until:
            self.routed.followed += 1
            return name
        return self._choose(user)

    def _choose(self, user: Hashable) -> str:
        first = self._first.get(user)
        if first is None:
            if len(self._first) >= MEMO:
                self._first.clear()
            first = self._first[user] = self._order(user)[:FIRST]
        # Few users come past their first choices: their whole order is worked out then.
        for order in (first, None):
            for place, member in enumerate(order or self._order(user)):
                if member.load < self.bound(member):
                    self.routed.first += place == 0
                    self.routed.overloaded += place > 0
                    return member.name
        self.routed.saturated += 1
        return first[0].name

    def _order(self, user: Hashable) -> list[Member]:
        if not self._active:
            raise LookupError("no instance is there to route to; wait until one has joined")
        scores = -np.log(_uniform(_hash(user), self._seeds)) / self._weights
        return [self._active[place] for place in np.argsort(scores, kind="stable").tolist()]


def _hash(value: Hashable) -> int:
    """64 bits that are the same in every process."""
    if not isinstance(value, str | int):
        raise TypeError(f"{value!r} is a {type(value).__name__}: users and instances are named by a str or an int")
    text = f"{type(value).__name__}:{value}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _uniform(user: int, seeds: np.ndarray) -> np.ndarray:
    """A number above 0 and below 1 for the user at each instance: splitmix64 of both."""
    mixed = seeds ^ np.uint64(user)
    mixed = mixed + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

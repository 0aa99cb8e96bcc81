"""What early signals have set going at one instance: leases on prefixes, and the computations and loads that they wait for.

A signal that is admitted gets a lease: the prefix, once there, is pinned until its ranking comes or the lease ends. So what was
computed ahead cannot be pushed out by what is computed next, and what is alive is bounded by what was admitted.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable

from nestpipe.serve import states
from nestpipe.serve.cache import Cache
from nestpipe.serve.computations import Computations
from nestpipe.serve.copies import Copies
from nestpipe.serve.costs import Costs, prefix_work, ranking_work
from nestpipe.serve.requests import Lease, Settings
from nestpipe.serve.states import READABLE, Compute, Hit, Key, Load, Miss, State, Wait, Why
from nestpipe.serve.trigger import Reason, Trigger

REFUSED = {Why.NO_ROOM: Reason.NO_ROOM, Why.TOO_LARGE: Reason.TOO_LARGE, Why.SUPERSEDED: Reason.SUPERSEDED}
PACE = 0.05  # of running means


class Signals:
    """gap: seconds from a signal to its ranking, a running mean. expired: leases whose ranking has not come."""

    def __init__(self, settings: Settings, costs: Costs, cache: Cache, copies: Copies) -> None:
        self.settings, self.costs, self.cache, self.copies = settings, costs, cache, copies
        self.trigger = Trigger(settings.bounds, device_bytes=settings.device_bytes, always=not settings.trigger)
        self.gap, self.expired = settings.gap, 0
        self.computations = Computations(settings, costs, cache, self.trigger)
        self._leases: dict[Hashable, Lease] = {}
        self._ends: collections.deque[Lease] = collections.deque()  # in order; some have been let go since

    # -- signals -------------------------------------------------------------------------------------------------------

    def admit(
        self, now: float, user: Hashable, history: int, tokens: int, candidates: int, *, delay: float
    ) -> tuple[Reason, list[states.Action]]:
        """What comes of a signal, and what the cache says to it. delay: seconds that rankings queue."""
        if not self.settings.relay or not tokens:
            return Reason.OFF, []
        key, extends = self.usable(user, history, tokens), None
        if key is None or tokens - key.tokens > self.settings.max_tail:
            extends = self.computations.extensible(key)
            key = Key(user, history, tokens, self.cache.model)
        size = key.tokens * self.settings.bytes_per_token
        there = extends.tokens if extends else 0
        compute_seconds = self.costs.prefix.seconds(prefix_work(key.tokens - there, there))
        load_seconds = self.copies.seconds(size)
        ranking, full = self.costs.ranking, ranking_work(0, tokens, candidates)
        saves = ranking.seconds(full) - ranking.seconds(ranking_work(tokens, 0, candidates))
        state = self.cache.state(key)
        if state is State.ABSENT or (state is State.HOST and load_seconds >= compute_seconds):
            reason = self.trigger.decide(
                now,
                full_seconds=ranking.high(full),
                budget=self.settings.slo - self.settings.overhead - delay,
                saved_seconds=saves,
                prefix_seconds=compute_seconds,
                prefix_bytes=size,
                begins_in=self.computations.seconds_left(),
                needed_in=self.gap + self.settings.wait,
            )
            if reason not in (Reason.ADMITTED, Reason.REUSE):
                return reason, []
        else:
            reason = Reason.UNDER_WAY
        lease = Lease(user, key, now, now + self.settings.lease)
        *drops, verdict = self.cache.claim(
            key,
            lease,
            size=size,
            compute=True,
            compute_seconds=compute_seconds,
            load_seconds=load_seconds,
            ranking=False,
        )
        if isinstance(verdict, Miss):
            return REFUSED[verdict.why], drops
        before = self._leases.pop(user, None)
        self._leases[user] = lease
        self._ends.append(lease)
        computes = isinstance(verdict, Compute)
        self.trigger.began(now, prefix_seconds=compute_seconds if computes else 0.0, prefix_bytes=size)
        match verdict:
            case Hit():
                lease.held, reason = True, Reason.ON_DEVICE
            case Load():
                self.copies.add(verdict)
                reason = Reason.LOADED
            case Wait():
                self.computations.hasten(key, now + self.gap)
            case Compute():
                self.computations.add(verdict, due=now + self.gap, saves=saves, extends=extends)
        return reason, [*drops, *(self.let_go(now, before) if before else [])]

    def usable(self, user: Hashable, history: int, tokens: int) -> Key | None:
        """The best of the user's prefixes for a history of so many items: one that can be read now, and of these the longest."""
        fits = [
            (state in READABLE, key.tokens, key)
            for key, state in self.cache.of_user(user)
            if key.history == history and key.tokens <= tokens and key.model == self.cache.model
        ]
        return max(fits)[2] if fits else None

    # -- leases --------------------------------------------------------------------------------------------------------

    def take(self, now: float, user: Hashable) -> Lease | None:
        """The user's lease, whose ranking has come. To be let go when the ranking has a hold of its own."""
        lease = self._leases.pop(user, None)
        if lease:
            self.gap += PACE * (now - lease.since - self.gap)
        return lease

    def expected(self, user: Hashable) -> Key | None:
        """The prefix that is kept, or under way, for the ranking that the user's last signal announced."""
        lease = self._leases.get(user)
        return lease.key if lease else None

    def let_go(self, now: float, lease: Lease) -> list[states.Action]:
        lease.until = -math.inf
        if lease.held:
            return self.cache.release(lease.key)
        self.cache.leave(lease.key, lease)
        return self.computations.leave(now, lease.key)

    def lose(self, lease: Lease) -> None:
        """Its computation or load has failed."""
        lease.until = -math.inf
        assert self._leases.pop(lease.user) is lease

    def expire(self, now: float) -> list[states.Action]:
        actions: list[states.Action] = []
        while self._ends and self._ends[0].until <= now:
            lease = self._ends.popleft()
            if lease.until > -math.inf:
                self.expired += 1
                del self._leases[lease.user]
                actions += self.let_go(now, lease)
        return actions

    def next_end(self) -> float:
        while self._ends and self._ends[0].until == -math.inf:
            self._ends.popleft()
        return self._ends[0].until if self._ends else math.inf

    def versions(self) -> set[str]:
        """Of the models that leases may still ask for."""
        return {lease.key.model for lease in self._leases.values()} | self.computations.versions()

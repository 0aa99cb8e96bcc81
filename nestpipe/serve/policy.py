"""What an instance does: a state that is told of signals, requests and ends of work, and says what to do next.

One lane computes (prefixes and rankings, one call at a time), one lane copies (loads, spills). Each method returns the actions to
take now, in order: work to begin (Compute, Rank; Load, Spill), memory to free (Drop), requests to turn away (Reject, Fail). Whoever
runs it tells `done` when a piece of work has ended, and calls `wake` at `next_wakeup()` unless something else happens before. Time is
passed in. A server's threads and the simulated fleet run this same object.

The cache can make an answer faster, never wrong or missing: a prefix that is late, lost, refused or broken means a full pass.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Hashable, Iterable

from nestpipe.serve import states
from nestpipe.serve.batching import Queue
from nestpipe.serve.cache import Cache
from nestpipe.serve.costs import Costs, copy_work, prefix_work, ranking_work, together
from nestpipe.serve.requests import RELAYED, Action, Fail, Lease, Rank, Reject, Request, Settings, Source
from nestpipe.serve.states import READABLE, Compute, Drop, Hit, Key, Load, Miss, Spill, State, Why
from nestpipe.serve.trigger import Reason, Trigger

REFUSED = {Why.NO_ROOM: Reason.NO_ROOM, Why.TOO_LARGE: Reason.TOO_LARGE, Why.SUPERSEDED: Reason.SUPERSEDED}
PACE = 0.05  # of running means


class Instance:
    """The decisions of one instance. model: version of what it serves."""

    def __init__(self, settings: Settings, costs: Costs | None = None, *, model: str = "") -> None:
        self.settings, self.costs = settings, costs or Costs.guess()
        self.cache = Cache(
            device_bytes=settings.device_bytes,
            host_bytes=settings.host_bytes,
            model=model,
            spill_at=settings.spill_at,
        )
        self.trigger = Trigger(settings.bounds, device_bytes=settings.device_bytes, always=not settings.trigger)
        self.queue: Queue[Request] = Queue(settings.batching, self.costs.ranking)
        self.sources: collections.Counter[Source] = collections.Counter()
        self.rejected = self.failed = self.expired = 0
        self.gap, self.delay = (
            settings.gap,
            0.0,
        )  # seconds from a signal to its ranking; and in the queue: running means
        self.running: Compute | Rank | None = None
        self.copying: Load | Spill | None = None
        self._prefixes: dict[Key, tuple[Compute, float]] = {}  # to compute, and when it should be done
        self._loads: collections.deque[Load] = collections.deque()
        self._leases: dict[Hashable, Lease] = {}
        self._lease_ends: collections.deque[Lease] = collections.deque()
        self._waiting: set[Request] = set()  # for a prefix
        self._give_ups: list[tuple[float, int, Request]] = []  # of these, and of some that no longer wait
        self._number = itertools.count()
        self._look_again = math.inf

    # -- what happens --------------------------------------------------------------------------------------------------

    def signal(
        self, now: float, *, user: Hashable, history: int, tokens: int, candidates: int
    ) -> tuple[Reason, list[Action]]:
        """A ranking of this user will come soon: the history as it is now, and how many candidates are usual."""
        actions = self._expire(now)
        reason = self._signal(now, user, history, tokens, candidates, actions)
        self.trigger.count(reason)
        return reason, self._next(now, actions)

    def request(
        self,
        now: float,
        *,
        id: Hashable,
        user: Hashable,
        history: int,
        tokens: int,
        candidates: int,
        deadline: float | None = None,
    ) -> list[Action]:
        """Rank these candidates. deadline: when the answer is due; `slo` from now if not given."""
        settings = self.settings
        due = now + settings.slo if deadline is None else deadline
        request = Request(id, user, history, tokens, candidates, now, due - settings.overhead, self.cache.model)
        actions = self._expire(now)
        if len(self.queue) + len(self._waiting) >= settings.max_queue:
            self.rejected += 1
            return self._next(now, [*actions, Reject(request, late=False)])
        lease = self._leases.pop(user, None)
        if lease:
            self.gap += PACE * (now - lease.since - self.gap)
        self._find_prefix(now, request, lease, actions)
        if lease:
            self._let_go(lease, actions)
        return self._next(now, actions)

    def done(
        self, now: float, action: Compute | Rank | Load | Spill, *, seconds: float | None = None, well: bool = True
    ) -> list[Action]:
        """This work has ended; it took so long, if that is known. Not well: it failed, and has left nothing behind."""
        actions = self._expire(now)
        if isinstance(action, Rank):
            assert action is self.running
            self._ranked(now, action, seconds, well, actions)
            self.running = None
            return self._next(now, actions)
        if isinstance(action, Compute):
            assert action is self.running
            self.running = None
            law, work, arrived = self.costs.prefix, prefix_work(action.key.tokens), self.cache.computed
        else:
            assert action is self.copying
            self.copying = None
            law, work = self.costs.copy, copy_work(action.size)
            arrived = self.cache.loaded if isinstance(action, Load) else self.cache.spilled
        if well and seconds is not None:
            law.observe(work, seconds)
        self._tell(now, arrived(action.key) if well else self.cache.failed(action.key), actions)
        return self._next(now, actions)

    def wake(self, now: float) -> list[Action]:
        """Nothing happened, but time has passed."""
        return self._next(now, self._expire(now))

    def next_wakeup(self) -> float:
        """When to call `wake`, at the latest; infinity if only events matter."""
        give_up = self._give_ups[0][0] if self._give_ups else math.inf
        while self._lease_ends and self._lease_ends[0].until == -math.inf:
            self._lease_ends.popleft()
        lease = self._lease_ends[0].until if self._lease_ends else math.inf
        return min(give_up, lease, self._look_again if self.running is None else math.inf)

    def switch(self, now: float, model: str) -> list[Action]:
        """From now on another version of weights and rows. Whoever holds a prefix of the old one is still ranked with the old one;
        everything else is ranked with the new one. So the caller keeps the old one until no Rank.model names it: when `versions`
        no longer has it."""
        actions = self._expire(now)
        for request in [*self.queue, *self._waiting]:
            request.model = model
        self._tell(now, self.cache.switch(model), actions)
        return self._next(now, actions)

    @property
    def waiting(self) -> int:
        """Ranking requests that wait for a prefix under way."""
        return len(self._waiting)

    def expected(self, user: Hashable) -> Key | None:
        """The prefix that is kept, or under way, for the ranking that the user's last signal announced."""
        lease = self._leases.get(user)
        return lease.key if lease else None

    def versions(self) -> set[str]:
        """Of all that may still be computed."""
        running = self.running.requests if isinstance(self.running, Rank) else []
        keys = [self.running.key] if isinstance(self.running, Compute) else []
        keys += [*self._prefixes, *(lease.key for lease in self._leases.values())]
        waiting = [request.key for request in self._waiting if request.key]
        return (
            {self.cache.model} | {key.model for key in [*keys, *waiting]} | {r.version for r in [*running, *self.queue]}
        )

    # -- signals -------------------------------------------------------------------------------------------------------

    def _signal(
        self, now: float, user: Hashable, history: int, tokens: int, candidates: int, actions: list[Action]
    ) -> Reason:
        settings, costs = self.settings, self.costs
        if not settings.relay or not tokens:
            return Reason.OFF
        cached = self._usable(user, history, tokens)
        if cached is not None and tokens - cached.tokens > settings.max_tail:
            cached = None
        key = cached or Key(user, history, tokens, self.cache.model)
        size = key.tokens * settings.bytes_per_token
        compute_seconds = costs.prefix.seconds(prefix_work(key.tokens))
        load_seconds = self._load_seconds(size)
        state = self.cache.state(key)
        if state is State.ABSENT or (state is State.HOST and load_seconds >= compute_seconds):
            reason = self.trigger.decide(
                now,
                full_seconds=costs.full_pass(tokens, candidates),
                budget=settings.slo - settings.overhead - self.delay,
                prefix_seconds=compute_seconds,
                prefix_bytes=size,
            )
            if reason is not Reason.ADMITTED:
                return reason
        lease = Lease(user, key, now, now + settings.lease)
        *drops, verdict = self.cache.claim(
            key,
            lease,
            size=size,
            compute=True,
            compute_seconds=compute_seconds,
            load_seconds=load_seconds,
            ranking=False,
        )
        self._tell(now, drops, actions)
        if isinstance(verdict, Miss):
            return REFUSED[verdict.why]
        before = self._leases.pop(user, None)
        self._leases[user] = lease
        self._lease_ends.append(lease)
        if before:
            self._let_go(before, actions)
        match verdict:
            case Hit():
                lease.held = True
                return Reason.ON_DEVICE
            case Load():
                self.trigger.began(now, prefix_seconds=0.0, prefix_bytes=size)
                self._loads.append(verdict)
                return Reason.LOADED
            case Compute():
                self.trigger.began(now, prefix_seconds=compute_seconds, prefix_bytes=size)
                self._prefixes[key] = verdict, now + self.gap
                return Reason.ADMITTED
        return Reason.UNDER_WAY

    def _usable(self, user: Hashable, history: int, tokens: int) -> Key | None:
        """The best of the user's prefixes for a history of so many items: one that can be read now, and of these the longest."""
        fits = [
            (state in READABLE, key.tokens, key)
            for key, state in self.cache.of_user(user)
            if key.history == history and key.tokens <= tokens and key.model == self.cache.model
        ]
        return max(fits)[2] if fits else None

    def _load_seconds(self, size: int) -> float:
        """With the copies that are before it."""
        copies = [action.size for action in (self.copying, *self._loads) if action]
        return sum(self.costs.copy.seconds(copy_work(num_bytes)) for num_bytes in [size, *copies])

    def _let_go(self, lease: Lease, actions: list[Action]) -> None:
        if lease.held:
            self._tell(lease.until, self.cache.release(lease.key), actions)
        else:
            self.cache.leave(lease.key, lease)
            self._cancel_unwanted(lease.key)
        lease.until = -math.inf

    def _cancel_unwanted(self, key: Key) -> None:
        """A computation or load that has not begun, and that nobody waits for any more."""
        if self.cache.waiters(key):
            return
        if self._prefixes.pop(key, None):
            self.cache.failed(key, cancelled=True)

    # -- rankings ------------------------------------------------------------------------------------------------------

    def _find_prefix(self, now: float, request: Request, lease: Lease | None, actions: list[Action]) -> None:
        """Queues the request, behind its prefix or for a full pass; or lets it wait."""
        key = self._usable(request.user, request.history, request.tokens)
        if lease and lease.key.history == request.history and lease.key.tokens <= request.tokens:
            key = lease.key if key is None or key.tokens <= lease.key.tokens else key
        if key is None or not self.settings.relay:
            return self._full_pass(now, request, Source.FULL)
        law = self.costs.ranking
        full = ranking_work(0, request.tokens, request.candidates)
        rank = ranking_work(key.tokens, request.tokens - key.tokens, request.candidates)
        size = key.tokens * self.settings.bytes_per_token
        load_seconds = self._load_seconds(size)
        *drops, verdict = self.cache.claim(
            key,
            request,
            size=size,
            compute=False,
            compute_seconds=law.seconds(full) - law.seconds(rank),
            load_seconds=load_seconds,
        )
        self._tell(now, drops, actions)
        if isinstance(verdict, Miss):
            return self._full_pass(now, request, Source.UNUSABLE)
        request.key, request.work = key, rank
        if isinstance(verdict, Hit):
            return self._enqueue(now, request, Source.DEVICE)
        request.source = Source.WAITED
        if isinstance(verdict, Load):
            self._loads.append(verdict)
        if self.cache.state(key) is State.LOADING:
            request.source = Source.LOADED
        # It waits as long as a full pass can still be in time; where none could be, as long as the ranking can be.
        latest = request.deadline - law.high(full)
        if latest <= now:
            latest = request.deadline - law.high(rank)
        request.give_up = min(now + self.settings.wait, latest if latest > now else math.inf)
        self._waiting.add(request)
        heapq.heappush(self._give_ups, (request.give_up, next(self._number), request))
        if pending := self._prefixes.get(key):
            self._prefixes[key] = pending[0], min(pending[1], request.give_up)

    def _full_pass(self, now: float, request: Request, source: Source) -> None:
        request.key = None
        request.work = ranking_work(0, request.tokens, request.candidates)
        self._enqueue(now, request, source)

    def _enqueue(self, now: float, request: Request, source: Source) -> None:
        request.source = source
        self._waiting.discard(request)
        self.queue.add(now, request)

    def _ranked(self, now: float, rank: Rank, seconds: float | None, well: bool, actions: list[Action]) -> None:
        if well and seconds is not None:
            self.costs.ranking.observe(together(request.work for request in rank.requests), seconds)
        for request in rank.requests:
            key = request.key
            if key is not None:
                self._tell(now, self.cache.release(key), actions)
            if well:
                self.sources[request.source] += 1
                if request.source in RELAYED:
                    self.trigger.resided(now - request.arrival + self.gap)
                continue
            # Which of them it was is not known: prefixes are not used again, and each is tried once more alone, in full.
            if key is not None:
                self._tell(now, self.cache.discard(key), actions)
            request.failures += 1
            if key is None and len(rank.requests) == 1:
                self.failed += 1
                actions.append(Fail(request))
            else:
                self._full_pass(now, request, Source.UNUSABLE)

    # -- what follows --------------------------------------------------------------------------------------------------

    def _tell(self, now: float, news: Iterable[states.Action], actions: list[Action]) -> None:
        """What the cache says, to those it concerns."""
        for item in news:
            if isinstance(item, Drop):
                actions.append(item)
            elif isinstance(item, Hit) and isinstance(item.who, Request):
                self._enqueue(now, item.who, item.who.source)
            elif isinstance(item, Hit) and isinstance(item.who, Lease):
                item.who.held = True
            elif isinstance(item, Miss) and isinstance(item.who, Request):
                self._full_pass(now, item.who, Source.UNUSABLE)
            elif isinstance(item, Miss) and isinstance(item.who, Lease):
                self._leases.pop(item.who.user, None)
                item.who.until = -math.inf

    def _expire(self, now: float) -> list[Action]:
        """Rankings that have waited long enough do the full pass; leases whose ranking has not come end."""
        actions: list[Action] = []
        while self._give_ups and (self._give_ups[0][0] <= now or self._give_ups[0][2] not in self._waiting):
            request = heapq.heappop(self._give_ups)[2]
            if request in self._waiting:
                key = request.key
                assert key is not None
                self.cache.leave(key, request)
                self._cancel_unwanted(key)
                self._full_pass(now, request, Source.GAVE_UP)
        while self._lease_ends and self._lease_ends[0].until <= now:
            lease = self._lease_ends.popleft()
            if lease.until > -math.inf:
                self.expired += 1
                self._leases.pop(lease.user, None)
                self._let_go(lease, actions)
        return actions

    def _next(self, now: float, actions: list[Action]) -> list[Action]:
        """Work for lanes that are free."""
        if self.running is None:
            self._compute(now, actions)
        if self.copying is None:
            if self._loads:
                self.copying = self._loads.popleft()
                actions.append(self.copying)
            else:
                for action in self.cache.spill():
                    assert isinstance(action, Drop | Spill)
                    actions.append(action)
                    self.copying = action if isinstance(action, Spill) else None
        return actions

    def _compute(self, now: float, actions: list[Action]) -> None:
        """The prefix that is due first, if it has to start before the first ranking and does not make that one late; else rankings;
        if these are kept for others to join them, a prefix that is done by then."""
        self._look_again = math.inf
        key, compute, start_by, end = self._first_prefix(now)
        if compute is None or end > self.queue.start_by or start_by >= self.queue.start_by:
            taken = self.queue.take(now)
            for request in taken.shed:
                self.rejected += 1
                if request.key:
                    self._tell(now, self.cache.release(request.key), actions)
                actions.append(Reject(request, late=True))
            if taken.run:
                for request in taken.run:
                    self.delay += PACE * (now - request.ready - self.delay)
                self.running = Rank(taken.run)
                actions.append(self.running)
                return
            self._look_again = taken.look_again
            if end > taken.look_again:
                return
        if compute is not None:
            del self._prefixes[key]
            self.running = compute
            actions.append(compute)

    def _first_prefix(self, now: float) -> tuple[Key, Compute | None, float, float]:
        """Of the prefixes to compute the one due first; when it has to start, and when it would be done if it started now."""
        if not self._prefixes:
            return Key(0, 0, 0, ""), None, math.inf, math.inf
        compute, due = min(self._prefixes.values(), key=lambda pending: pending[1])
        seconds = self.costs.prefix.high(prefix_work(compute.key.tokens))
        return compute.key, compute, due - seconds, now + seconds

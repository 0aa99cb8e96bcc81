"""What an instance does: a state that is told of signals, requests and ends of work, and says what to do next.

One lane computes (prefixes and rankings, one call at a time), one lane copies (loads, spills). Each method returns the actions
to take now, in order: work to begin (Piece, Rank; Load, Spill), memory to free (Drop), requests to turn away (Reject, Fail).
Whoever runs it tells `done` when a piece of work has ended, and calls `wake` at `next_wakeup()` unless something else happens
before. Time is passed in. A server's threads and the simulated fleet run this same object.

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
from nestpipe.serve.computations import Computation
from nestpipe.serve.copies import Copies
from nestpipe.serve.costs import Costs, ranking_work, together
from nestpipe.serve.requests import RELAYED, Action, Fail, Lease, Piece, Rank, Reject, Request, Settings, Source
from nestpipe.serve.signals import PACE, Signals
from nestpipe.serve.states import READABLE, Drop, Hit, Load, Miss, Spill, State
from nestpipe.serve.trigger import Reason


class Instance:
    """The decisions of one instance. model: version of what it serves."""

    def __init__(self, settings: Settings, costs: Costs | None = None, *, model: str = "") -> None:
        self.settings, self.costs = settings, costs or Costs.guess()
        budgets = {"device_bytes": settings.device_bytes, "host_bytes": settings.host_bytes}
        self.cache = Cache(**budgets, model=model, spill_at=settings.spill_at)
        self.copies = Copies(self.cache, self.costs.copy)
        self.signals = Signals(settings, self.costs, self.cache, self.copies)
        self.trigger = self.signals.trigger
        self.queue: Queue[Request] = Queue(settings.batching, self.costs.ranking)
        self.sources: collections.Counter[Source] = collections.Counter()
        self.rejected = self.failed = 0
        self.delay = 0.0  # seconds in the queue, a running mean
        self.running: Piece | Rank | None = None
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
        reason, news = self.signals.admit(now, user, history, tokens, candidates, delay=self.delay)
        self.trigger.count(reason)
        self._tell(now, news, actions)
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
            late = self.queue.drop_late()  # of no use to anyone; this one may still be in time
            self._reject(now, late or request, actions)
            if late is None:
                return self._next(now, actions)
        lease = self.signals.take(now, user)
        self._find_prefix(now, request, lease, actions)
        if lease:
            self._tell(now, self.signals.let_go(now, lease), actions)
        return self._next(now, actions)

    def done(
        self, now: float, action: Piece | Rank | Load | Spill, *, seconds: float, well: bool = True
    ) -> list[Action]:
        """This work has ended, and took so long. Not well: it failed, and nothing is left of it, nor of the pieces before it."""
        actions = self._expire(now)
        if isinstance(action, Load | Spill):
            self._tell(now, self.copies.end(action, seconds, well=well), actions)
            return self._next(now, actions)
        assert action is self.running, f"{action} is not what is being computed"
        self.running = None
        if isinstance(action, Rank):
            self._ranked(now, action, seconds, well, actions)
        else:
            self._tell(now, self.signals.computations.end(now, action, seconds, well=well), actions)
        return self._next(now, actions)

    def wake(self, now: float) -> list[Action]:
        """Nothing happened, but time has passed."""
        return self._next(now, self._expire(now))

    def next_wakeup(self) -> float:
        """When to call `wake`, at the latest; infinity if only events matter."""
        give_up = self._give_ups[0][0] if self._give_ups else math.inf
        return min(give_up, self.signals.next_end(), self._look_again if self.running is None else math.inf)

    def switch(self, now: float, model: str) -> list[Action]:
        """From now on another version of weights and rows. Whoever holds a prefix of the old one is still ranked with the old
        one, everything else with the new one; so the caller keeps the old one until `versions()` no longer has it."""
        actions = self._expire(now)
        for request in [*self.queue, *self._waiting]:
            request.model = model
        self._tell(now, self.cache.switch(model), actions)
        return self._next(now, actions)

    @property
    def waiting(self) -> int:
        """Ranking requests that wait for a prefix under way."""
        return len(self._waiting)

    def versions(self) -> set[str]:
        """Of all that may still be computed."""
        requests = [*self.queue, *self._waiting]
        if isinstance(self.running, Rank):
            requests += self.running.requests
        return {self.cache.model, *self.signals.versions(), *(request.version for request in requests)}

    # -- rankings ------------------------------------------------------------------------------------------------------

    def _find_prefix(self, now: float, request: Request, lease: Lease | None, actions: list[Action]) -> None:
        """Queues the request, behind its prefix or for a full pass; or lets it wait."""
        key = self.signals.usable(request.user, request.history, request.tokens)
        if lease and lease.key.history == request.history and lease.key.tokens <= request.tokens:
            key = lease.key if key is None or key.tokens <= lease.key.tokens else key
        if key is None or not self.settings.relay:
            return self._full_pass(now, request, Source.FULL)
        law = self.costs.ranking
        full = ranking_work(0, request.tokens, request.candidates)
        rank = ranking_work(key.tokens, request.tokens - key.tokens, request.candidates)
        size = key.tokens * self.settings.bytes_per_token
        *drops, verdict = self.cache.claim(
            key,
            request,
            size=size,
            compute=False,
            compute_seconds=law.seconds(full) - law.seconds(rank),
            load_seconds=self.copies.seconds(size),
        )
        self._tell(now, drops, actions)
        if isinstance(verdict, Miss):
            return self._full_pass(now, request, Source.UNUSABLE)
        request.key, request.work = key, rank
        if isinstance(verdict, Hit):
            return self._enqueue(now, request, Source.DEVICE)
        request.source = Source.WAITED
        if isinstance(verdict, Load):
            self.copies.add(verdict)
        if self.cache.state(key) is State.LOADING:
            request.source = Source.LOADED
        # It waits as long as a full pass can still be in time; where none could be, as long as the ranking can be.
        latest = request.deadline - law.high(full)
        if latest <= now:
            latest = request.deadline - law.high(rank)
        request.give_up = min(now + self.settings.wait, latest if latest > now else math.inf)
        self._waiting.add(request)
        self._wait_until(request, request.give_up)

    def _wait_until(self, request: Request, give_up: float) -> None:
        assert request.key is not None
        request.give_up = give_up
        heapq.heappush(self._give_ups, (give_up, next(self._number), request))
        self.signals.computations.hasten(request.key, give_up)

    def _waits_on(self, now: float, request: Request) -> bool:
        """It could begin its full pass now and be in time; but if so much of the prefix is made that the rest takes less, it goes
        on waiting: as long as it can be ranked behind it in time, and not beyond `wait`."""
        key = request.key
        assert key is not None
        rank = self.costs.ranking.high(request.work)
        full = self.costs.ranking.high(ranking_work(0, request.tokens, request.candidates))
        give_up = min(request.arrival + self.settings.wait, request.deadline - rank)
        if give_up <= now or self.signals.computations.high_left(key) + rank > full:
            return False
        self._wait_until(request, give_up)
        return True

    def _full_pass(self, now: float, request: Request, source: Source) -> None:
        request.key = None
        request.work = ranking_work(0, request.tokens, request.candidates)
        self._enqueue(now, request, source)

    def _enqueue(self, now: float, request: Request, source: Source) -> None:
        request.source = source
        self._waiting.discard(request)
        self.queue.add(now, request)

    def _ranked(self, now: float, rank: Rank, seconds: float, well: bool, actions: list[Action]) -> None:
        if well:
            self.costs.ranking.observe(together(request.work for request in rank.requests), seconds)
        for request in rank.requests:
            key = request.key
            if key is not None:
                self._tell(now, self.cache.release(key), actions)
            if well:
                self.sources[request.source] += 1
                if request.source in RELAYED:
                    # Behind its deadline it holds no prefix: how long it waits then says nothing about memory.
                    held = min(now, request.deadline) - request.arrival
                    self.trigger.used(now, resided=held + self.signals.gap)
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
            if isinstance(item, Drop | Load | Spill):
                actions.append(item)
            elif isinstance(item, Hit) and isinstance(item.who, Request):
                self._enqueue(now, item.who, item.who.source)
            elif isinstance(item, Hit) and isinstance(item.who, Lease):
                item.who.held = True
            elif isinstance(item, Miss) and isinstance(item.who, Request):
                self._full_pass(now, item.who, Source.UNUSABLE)
            elif isinstance(item, Miss) and isinstance(item.who, Lease):
                self.signals.lose(item.who)

    def _expire(self, now: float) -> list[Action]:
        """Rankings that have waited long enough do the full pass; leases whose ranking has not come end."""
        actions: list[Action] = []
        while self._give_ups and (self._give_ups[0][0] <= now or self._give_ups[0][2] not in self._waiting):
            request = heapq.heappop(self._give_ups)[2]
            if request in self._waiting and not self._waits_on(now, request):
                key = request.key
                assert key is not None
                self.cache.leave(key, request)
                self._tell(now, self.signals.computations.leave(now, key), actions)
                self._full_pass(now, request, Source.GAVE_UP)
        self._tell(now, self.signals.expire(now), actions)
        return actions

    def _next(self, now: float, actions: list[Action]) -> list[Action]:
        """Work for lanes that are free."""
        if self.running is None:
            self._compute(now, actions)
        self._tell(now, self.copies.begin(), actions)
        return actions

    def _compute(self, now: float, actions: list[Action]) -> None:
        """Rankings, or a piece of the prefix that is due first. A piece also if rankings are kept for others to join them, and it
        is done by then."""
        late, over = self.queue.part(now)
        for request in over:
            self._reject(now, request, actions)
        for request in late:
            self._let_wait(now, request, actions)
        self._look_again = math.inf
        first = self.signals.computations.first()
        piece = self.signals.computations.next_piece(first) if first else None
        if not first or not piece or self._rankings_first(first, piece):
            taken = self.queue.take(now)
            if taken.run:
                for request in taken.run:
                    self._readmit(now, request)
                    # A late one waits for others to go first; that says nothing about the next one's wait.
                    self.delay += PACE * (max(0.0, min(now, request.start_by) - request.ready) - self.delay)
                assert len({request.version for request in taken.run}) == 1, "one batch, two models"
                self.running = Rank(taken.run)
                actions.append(self.running)
                return
            self._look_again = taken.look_again
        if piece and now + self.costs.prefix.high(piece.work) <= self._look_again:
            self._tell(now, self.signals.computations.begin(piece), actions)
            self.running = piece
            actions.append(piece)

    def _rankings_first(self, first: Computation, piece: Piece) -> bool:
        """A ranking that takes no longer than the piece goes first: it delays the prefix by little, and would wait for much. Of a
        longer one and the prefix, whichever has to start first.

        So the prefix may make a long ranking late: the trigger has bounded what prefixes take, and an overloaded instance that
        never got to compute one would do full passes, and stay overloaded.
        """
        law = self.costs.prefix
        short = self.queue.first_seconds <= law.high(piece.work)
        return short or first.due - law.high(first.left) >= self.queue.start_by

    def _let_wait(self, now: float, request: Request, actions: list[Action]) -> None:
        """It is late, and runs when nothing else does, or never: until then it holds no prefix that others could use."""
        if self.settings.batching.shed:
            self._reject(now, request, actions)
        elif request.key:
            self._tell(now, self.cache.release(request.key), actions)
            request.key, request.source = None, Source.GAVE_UP
            request.work = ranking_work(0, request.tokens, request.candidates)

    def _readmit(self, now: float, request: Request) -> None:
        """One that was late gets its prefix again if it is still there."""
        if request.source is Source.GAVE_UP and request.start_by < now and self.settings.relay and not request.failures:
            key = self.signals.usable(request.user, request.history, request.tokens)
            if key and self.cache.state(key) in READABLE and request.model == key.model:
                self.cache.claim(key, request, size=0, compute=False)
                request.key, request.source = key, Source.DEVICE
                request.work = ranking_work(key.tokens, request.tokens - key.tokens, request.candidates)

    def _reject(self, now: float, request: Request, actions: list[Action]) -> None:
        self.rejected += 1
        if request.key:
            self._tell(now, self.cache.release(request.key), actions)
        actions.append(Reject(request, late=request.start_by < now))

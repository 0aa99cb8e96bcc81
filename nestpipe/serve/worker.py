"""Worker: one instance at work: a bundle, the decisions of `policy.Instance`, and the threads that carry them out.

A plain library: `signal` and `rank` may be called by any thread; there is no HTTP here, and no process but this one.

Three threads. One computes: prefixes and rankings, one call at a time, rows looked up on the way. One copies prefixes between
device and host memory. One wakes the policy when time alone decides. One lock is around the policy and the books of prefixes;
nothing that takes long happens under it.

A prefix is used only for a history whose first items (and times) are those it was made of: their digest is kept with it. So
whatever the caller sends, in whatever order, the cache can make an answer faster, never wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from nestpipe.models.prefix import Prefix
from nestpipe.serve import warming
from nestpipe.serve.bundle import Bundle
from nestpipe.serve.costs import ranking_work
from nestpipe.serve.counting import flat
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal
from nestpipe.serve.policy import Instance
from nestpipe.serve.prefixes import Origin, Prefixes, part
from nestpipe.serve.requests import Action, Fail, Piece, Rank, Reject, Request, Settings, Source
from nestpipe.serve.scoring import Part, Scorer, check_successor, to_device, to_host
from nestpipe.serve.states import Drop, Key, Load, Spill
from nestpipe.serve.trigger import Reason

__all__ = ["Ask", "Ranked", "Rejected", "Signal", "Worker"]
log = logging.getLogger("nestpipe")


@dataclasses.dataclass(eq=False, slots=True)
class _Asked:
    """A request that has no answer yet. matched: those of prefixes that are made of the first items of its history."""

    ask: Ask
    future: Future[Ranked]
    matched: frozenset[Origin]
    since: float
    error: Exception | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Todo:
    """What follows from decisions, outside the lock and in this order: memory to free, work to begin, futures to resolve."""

    freed: list[Prefix | None] = dataclasses.field(default_factory=list)
    work: list[Piece | Rank | Load | Spill] = dataclasses.field(default_factory=list)
    errors: list[tuple[Future[Ranked], Exception]] = dataclasses.field(default_factory=list)
    wrong: BaseException | None = None


class Worker:
    """Ranks candidates for users, with the help of prefixes computed at their signals.

    settings: `bytes_per_token` is taken from the model, whatever it says. prefix_dtype: in which prefixes are kept: float32, or
        float16 or bfloat16 for half the memory and scores that differ by its rounding.
    threads: of torch, for the computing thread; as torch is set up if left out.
    clock: of deadlines and leases.

    ValueError for a bundle that cannot rank, and for a model whose scores relay would change (unless Settings.relay is off).
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings | None = None,
        *,
        prefix_dtype: torch.dtype = torch.float32,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or Settings()
        self._scorer = Scorer(bundle, prefix_dtype=prefix_dtype, relay=settings.relay)
        self._scorers = {bundle.version: self._scorer}  # all that something may still be ranked with
        piece = settings.piece if self._scorer.in_pieces else math.inf
        self.settings = dataclasses.replace(settings, bytes_per_token=self._scorer.bytes_per_token, piece=piece)
        self._policy = Instance(self.settings, model=bundle.version)
        self._prefixes = Prefixes(self._policy.cache)
        self._asked: dict[Hashable, _Asked] = {}
        self._numbers = itertools.count(1)
        self._clock = clock
        self._stale = self._updates = 0
        self._busy, self._began = 0.0, math.inf
        self._stopping = self._ended = False
        self._lock = threading.Lock()
        self._earlier = threading.Condition(self._lock)  # something is due before the alarm
        self._answered = threading.Condition(self._lock)  # no request is left
        self._alarm = -math.inf
        limit = (lambda: torch.set_num_threads(threads)) if threads else None
        self._computing = ThreadPoolExecutor(1, "nestpipe-compute", initializer=limit)
        self._copying = ThreadPoolExecutor(1, "nestpipe-copy")
        self._timer = threading.Thread(
            target=self._guarded, args=(self._keep_time,), name="nestpipe-timer", daemon=True
        )
        self._timer.start()

    # -- what users call -----------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> Bundle:
        """The version that new requests are ranked with."""
        return self._scorer.bundle

    @property
    def scorer(self) -> Scorer:
        """What computes; `scorer.full_pass(ask)` is what every answer to that request has to be."""
        return self._scorer

    @property
    def broken(self) -> bool:
        """Closed, or found its own books wrong: it takes no more requests. Start another."""
        return self._ended

    def signal(self, signal: Signal) -> Reason:
        """Says at once what will be done about it. ValueError for what the model cannot take, Rejected when it is closed."""
        self._scorer.check(signal)
        times = signal.times if self._scorer.uses_times else None
        with self._deciding() as todo:
            version, _, _ = self._prefixes.match(signal.user, signal.history, times)
            length, candidates = len(signal.history), signal.candidates
            reason, actions = self._policy.signal(
                self._clock(), user=signal.user, history=version, tokens=length, candidates=candidates
            )
            if reason in (
                Reason.ADMITTED,
                Reason.REUSE,
            ):  # else what is under way, if anything, is of an earlier signal
                key = self._policy.signals.expected(signal.user)
                assert key is not None, "a signal was admitted without a lease"
                self._prefixes.expect(key, signal.history, times)
            self._take(actions, todo)
        return reason

    def rank(self, ask: Ask) -> Future[Ranked]:
        """The scores, when they are there; or Rejected, if there is too much to do. ValueError at once for what the model cannot
        take, Rejected at once when it is closed. Callbacks of the future should be short: the computing thread calls them."""
        since = time.perf_counter()
        self._scorer.check(ask)
        times = ask.times if self._scorer.uses_times else None
        future: Future[Ranked] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it, so every answer finds it as it is
        with self._deciding() as todo:
            version, matched, stale = self._prefixes.match(ask.user, ask.history, times)
            self._stale += stale
            number, now = next(self._numbers), self._clock()
            self._asked[number] = _Asked(ask, future, matched, since)
            actions = self._policy.request(
                now,
                id=number,
                user=ask.user,
                history=version,
                tokens=len(ask.history),
                candidates=len(ask.candidates),
                deadline=None if ask.deadline_seconds is None else now + ask.deadline_seconds,
            )
            self._take(actions, todo)
        return future

    def successor(self, bundle: Bundle) -> Scorer:
        """What `update` changes to, to be made ahead. ValueError for a bundle that cannot take the place of this one."""
        scorer = Scorer(bundle, prefix_dtype=self._scorer.prefix_dtype, relay=self.settings.relay)
        check_successor(self._scorer, scorer)
        return scorer

    def update(self, bundle: Bundle | Scorer) -> None:
        """Ranks with another version from now on; what has begun with the old one ends with it. The old one's prefixes are
        dropped. ValueError for a bundle that cannot take the place of this one, which then stays."""
        scorer = bundle if isinstance(bundle, Scorer) else self.successor(bundle)
        bundle = scorer.bundle
        if bundle.version == self.bundle.version:
            return
        with self._deciding() as todo:
            self._scorers[bundle.version] = self._scorer = scorer
            self._updates += 1
            self._take(self._policy.switch(self._clock(), bundle.version), todo)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the beginning, by flat names; docs/serving.md has a table of them."""
        with self._lock:
            running = max(0.0, time.perf_counter() - self._began)
            own = {
                "version": self.bundle.version,
                "step": self.bundle.step,
                "stale": self._stale,
                "updates": self._updates,
                "in_flight": len(self._asked),
                "busy_seconds": self._busy + running,
                "running_seconds": running,
            }
            return own | flat(self._policy, self._clock())

    def warm_up(self) -> None:
        """Calls of all sizes, on the computing thread: kernels are compiled and costs are known before the first request."""
        measured = self._computing.submit(warming.measure, self._scorer).result()
        with self._lock:
            warming.learn(self._policy.costs, measured)

    def close(self, *, drain: float = 5.0) -> None:
        """Takes no more requests, answers those it has for up to so many seconds, rejects the rest, and ends the threads."""
        with self._lock:
            self._stopping = True
            self._answered.wait_for(lambda: not self._asked, timeout=drain)
        self._end(Rejected("stopping"))
        self._computing.shutdown()
        self._copying.shutdown()
        self._timer.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- decisions -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _deciding(self, *, ending: bool = False) -> Iterator[_Todo]:
        """The lock; when it is free again, what follows is done. ending: of work that had begun, after `close` too."""
        todo = _Todo()
        with self._lock:
            if self._ended or (self._stopping and not ending):
                raise Rejected("stopping")
            try:
                yield todo
            except BaseException as error:  # books that are half written promise nothing
                todo.wrong = error
        if todo.wrong is not None:
            self._end(RuntimeError(f"the instance is broken: {todo.wrong!r}"))
            todo.work.clear()
            self._do(todo)  # those that were turned away before it went wrong
            raise todo.wrong
        self._do(todo)

    def _take(self, actions: list[Action], todo: _Todo) -> None:
        """With the lock held. The books follow the policy's decisions in their order; what takes long is left to `_do`."""
        for action in actions:
            if isinstance(action, Drop):
                todo.freed.append(self._prefixes.drop(action))
            elif isinstance(action, Reject | Fail):
                asked = self._asked.pop(action.request.id)
                error = Rejected("late" if action.late else "full") if isinstance(action, Reject) else asked.error
                assert error is not None, "a ranking failed without an error"
                todo.errors.append((asked.future, error))
            else:
                todo.work.append(action)
        if not self._asked:
            self._answered.notify_all()
        if self._policy.next_wakeup() < self._alarm:
            self._earlier.notify_all()

    def _do(self, todo: _Todo) -> None:
        todo.freed.clear()
        for action in todo.work:
            with contextlib.suppress(RuntimeError):  # closed meanwhile, and all requests with it
                match action:
                    case Rank():
                        self._computing.submit(self._guarded, self._rank, action)
                    case Piece():
                        self._computing.submit(self._guarded, self._compute, action)
                    case Load() | Spill():
                        self._copying.submit(self._guarded, self._copy, action)
        for future, error in todo.errors:
            future.set_exception(error)

    def _end(self, error: Exception) -> None:
        """All that have no answer get this one."""
        with self._lock:
            self._stopping = self._ended = True
            left, self._asked = list(self._asked.values()), {}
            self._answered.notify_all()
            self._earlier.notify_all()
        for asked in left:
            asked.future.set_exception(error)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """What can fail in a request is dealt with inside. Whatever comes out is a mistake of ours; nobody is left waiting."""
        try:
            if not self._ended:
                work(*arguments)
        except Rejected:
            pass  # closed meanwhile, and all requests with it
        except BaseException as error:
            log.exception("the instance is broken and takes no more requests")
            self._end(RuntimeError(f"the instance is broken: {error!r}"))

    def _keep_time(self) -> None:
        while not self._ended:
            with self._lock:
                now, self._alarm = self._clock(), self._policy.next_wakeup()
                if self._alarm > now and not self._ended:
                    self._earlier.wait(min(self._alarm - now, threading.TIMEOUT_MAX))
                self._alarm = -math.inf
            with self._deciding(ending=True) as todo:
                self._take(self._policy.wake(self._clock()), todo)

    def _compute(self, action: Piece) -> None:
        self._began = began = time.perf_counter()
        books, origin, prefix = self._prefixes, self._prefixes.origin(action.key), None
        try:
            assert origin.history is not None
            items = part(slice(action.first, action.last), origin.history, origin.times)
            prefix = self._scorers[action.key.model].prefix(*items, books.before(action))
            assert prefix.num_bytes <= action.size, f"{prefix.num_bytes} bytes, {action.size} were counted"
        except Exception:
            log.warning(
                "a prefix of %d items could not be computed; rankings do without", action.key.tokens, exc_info=True
            )
            prefix = None
        if prefix is None or action.is_last:
            origin.history = origin.times = None
        self._made(action, began, prefix, books.device if action.is_last else books.half_made)

    def _copy(self, action: Load | Spill) -> None:
        began, books, copy = time.perf_counter(), self._prefixes, None
        loads = isinstance(action, Load)
        try:
            copy = (
                to_device(books.host[action.key], self._scorer.device) if loads else to_host(books.device[action.key])
            )
        except Exception:
            log.warning("a prefix of %d bytes was not copied; rankings do without", action.size, exc_info=True)
        self._made(action, began, copy, books.device if loads else books.host)

    def _made(
        self, action: Piece | Load | Spill, began: float, prefix: Prefix | None, place: dict[Key, Prefix]
    ) -> None:
        seconds = time.perf_counter() - began
        with self._deciding(ending=True) as todo:
            if isinstance(action, Piece):
                todo.freed.append(self._prefixes.half_made.pop(action.key, None))
                self._no_longer_busy(seconds)
            if prefix is not None:
                place[action.key] = prefix
            actions = self._policy.done(self._clock(), action, seconds=seconds, well=prefix is not None)
            prefix = None  # else what is dropped at once would stay
            self._take(actions, todo)
            self._forget_versions()

    def _rank(self, action: Rank) -> None:
        self._began = began = time.perf_counter()
        with self._lock:
            asked = [self._asked[request.id] for request in action.requests] if not self._ended else []
        if not asked:
            return
        scores = None
        try:
            parts = [self._part(request, one) for request, one in zip(action.requests, asked, strict=True)]
            scores = self._scorers[action.model].rank(parts)
        except Exception as error:
            for one in asked:
                one.error = error
        parts, seconds = [], time.perf_counter() - began
        with self._deciding(ending=True) as todo:
            self._no_longer_busy(seconds)
            actions = self._policy.done(self._clock(), action, seconds=seconds, well=scores is not None)
            self._take(actions, todo)
            self._forget_versions()
            for request in action.requests if scores is not None else ():
                del self._asked[request.id]
            if not self._asked:
                self._answered.notify_all()
        for request, one, values in zip(action.requests, asked, scores or (), strict=scores is not None):
            one.future.set_result(Ranked(values, request.source, action.model, time.perf_counter() - one.since))

    def _part(self, request: Request, asked: _Asked) -> Part:
        """A prefix of another history than the request's is not used, whatever the policy says."""
        ask, key = asked.ask, request.key
        if key is None:
            return Part(ask)
        times = ask.times if self._scorer.uses_times else None
        known = self._prefixes.origin(key) in asked.matched  # else it came to be meanwhile
        if known or self._prefixes.is_of(key, ask.history, times):
            return Part(ask, self._prefixes.device[key])
        request.source, request.work = Source.UNUSABLE, ranking_work(0, request.tokens, request.candidates)
        return Part(ask)

    def _no_longer_busy(self, seconds: float) -> None:
        self._busy += seconds
        self._began = math.inf

    def _forget_versions(self) -> None:
        """Bundles that nothing is ranked with any more; their files are then unmapped."""
        if len(self._scorers) > 1:
            needed = self._policy.versions()
            self._scorers = {version: scorer for version, scorer in self._scorers.items() if version in needed}

"""Worker: one instance at work: a bundle, the decisions of `policy.Instance`, and the threads that carry them out.

A plain library: `signal` and `rank` may be called by any thread; there is no HTTP here, and no process but this one.

Three threads. One computes: prefixes and rankings, one call at a time, rows looked up on the way. One copies prefixes between device
and host memory. One wakes the policy when time alone decides. One lock is around the policy and the books of prefixes; nothing that
takes long happens under it.

A prefix is used only for a history whose first items (and times) are those it was made of: their digest is kept with it. So whatever
the caller sends, in whatever order, the cache can make an answer faster, never wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from nestpipe.models.prefix import Prefix
from nestpipe.serve import warming
from nestpipe.serve.bundle import Bundle
from nestpipe.serve.costs import ranking_work
from nestpipe.serve.counting import flat
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal, digest
from nestpipe.serve.policy import Instance
from nestpipe.serve.requests import Action, Fail, Rank, Reject, Settings, Source
from nestpipe.serve.scoring import Part, Scorer, to_device, to_host
from nestpipe.serve.states import Compute, Drop, Key, Load, Place, Spill, State
from nestpipe.serve.trigger import Reason

log = logging.getLogger("nestpipe")


@dataclasses.dataclass(eq=False, slots=True)
class _Asked:
    """A request that has no answer yet. matched: prefixes that are of the first items of its history."""

    ask: Ask
    future: Future[Ranked]
    matched: frozenset[Key]
    since: float
    error: Exception | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Known:
    """What a prefix is made of. history, times: until it is computed."""

    digest: bytes
    history: np.ndarray | None
    times: np.ndarray | None


@dataclasses.dataclass(eq=False, slots=True)
class _Todo:
    """What follows from a decision, outside the lock: memory to free, then work to begin, then futures to resolve."""

    freed: list[Prefix] = dataclasses.field(default_factory=list)
    work: list[Compute | Rank | Load | Spill] = dataclasses.field(default_factory=list)
    errors: list[tuple[Future[Ranked], Exception]] = dataclasses.field(default_factory=list)


class Worker:
    """Ranks candidates for users, with the help of prefixes computed at their signals.

    settings: `bytes_per_token` is taken from the model, whatever it says. prefix_dtype: in which prefixes are kept: float32, or
        float16 or bfloat16 for half the memory and scores that differ by its rounding.
    threads: of torch, for the computing thread; as torch is set up if left out.
    clock: of deadlines and leases.

    ValueError for a bundle that cannot rank, and for a model that relay would change the scores of (unless Settings.relay is off).
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
        scorer, settings = Scorer(bundle, prefix_dtype=prefix_dtype), settings or Settings()
        _check_relay(scorer, settings)
        self.settings = dataclasses.replace(settings, bytes_per_token=scorer.bytes_per_token)
        self._clock, self._prefix_dtype = clock, prefix_dtype
        self._policy = Instance(self.settings, model=bundle.version)
        self._scorer, self._scorers = scorer, {bundle.version: scorer}
        self._device: dict[Key, Prefix] = {}
        self._host: dict[Key, Prefix] = {}
        self._known: dict[Key, _Known] = {}
        self._asked: dict[Hashable, _Asked] = {}
        self._numbers = itertools.count(1)
        self._stale = self._updates = 0
        self._busy, self._began = 0.0, math.inf
        self._stopping, self._broken = False, False
        self._lock = threading.Lock()
        self._earlier = threading.Condition(self._lock)  # than the timer is set for
        self._answered = threading.Condition(self._lock)  # the last request
        self._alarm = math.inf
        limit = (lambda: torch.set_num_threads(threads)) if threads else None
        self._computing = ThreadPoolExecutor(1, "nestpipe-compute", initializer=limit)
        self._copying = ThreadPoolExecutor(1, "nestpipe-copy")
        self._timer = threading.Thread(target=self._keep_time, name="nestpipe-timer", daemon=True)
        self._timer.start()

    # -- what users call -----------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> Bundle:
        """The version that new requests are ranked with."""
        return self._scorer.bundle

    @property
    def scorer(self) -> Scorer:
        return self._scorer

    def signal(self, signal: Signal) -> Reason:
        """Says what will be done about it, at once; the work is done behind it. ValueError for what the model cannot take."""
        scorer = self._scorer
        scorer.check(signal)
        times = signal.times if scorer.uses_times else None
        with self._lock:
            self._check_open()
            version, _ = self._match(signal.user, signal.history, times)
            reason, actions = self._policy.signal(
                self._clock(),
                user=signal.user,
                history=version,
                tokens=len(signal.history),
                candidates=signal.candidates,
            )
            key = self._policy.expected(signal.user)
            if reason is Reason.ADMITTED and key is not None:
                history, times = signal.history[: key.tokens], None if times is None else times[: key.tokens]
                self._forget_absent()
                self._known[key] = _Known(digest(history, times), history, times)
            todo = self._take(actions)
        self._do(todo)
        return reason

    def rank(self, ask: Ask) -> Future[Ranked]:
        """The scores, as soon as they are there; Rejected in the future if there is too much to do. ValueError at once for what the
        model cannot take. What is called when the future is done should be short: it is called by the computing thread."""
        scorer, since = self._scorer, time.perf_counter()
        scorer.check(ask)
        times = ask.times if scorer.uses_times else None
        future: Future[Ranked] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it, so every answer finds it as it is
        with self._lock:
            self._check_open()
            version, matched = self._match(ask.user, ask.history, times, count=True)
            number = next(self._numbers)
            self._asked[number] = _Asked(ask, future, matched, since)
            now = self._clock()
            actions = self._policy.request(
                now,
                id=number,
                user=ask.user,
                history=version,
                tokens=len(ask.history),
                candidates=len(ask.candidates),
                deadline=None if ask.deadline_seconds is None else now + ask.deadline_seconds,
            )
            todo = self._take(actions)
        self._do(todo)
        return future

    def update(self, bundle: Bundle) -> None:
        """Ranks with another version from now on; what has begun with the old one ends with it. The old one's prefixes are dropped.

        ValueError for a bundle that cannot take the place of this one, which then stays.
        """
        if bundle.version == self.bundle.version:
            return
        scorer = Scorer(bundle, prefix_dtype=self._prefix_dtype)
        _check_relay(scorer, self.settings)
        for what in ("bytes_per_token", "max_length", "uses_times", "device"):
            ours, others = getattr(self._scorer, what), getattr(scorer, what)
            if ours != others:
                raise ValueError(
                    f"version {bundle.version} is of another model: {what} is {others}, here {ours}; start a new instance with it"
                )
        with self._lock:
            self._check_open()
            self._scorers[bundle.version] = self._scorer = scorer
            self._updates += 1
            todo = self._take(self._policy.switch(self._clock(), bundle.version))
        self._do(todo)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the beginning, by flat names; docs/serving.md has a table of them."""
        with self._lock:
            running = 0.0 if self._began == math.inf else time.perf_counter() - self._began
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
        scorer = self._scorer
        measured = self._computing.submit(warming.measure, scorer).result()
        with self._lock:
            warming.learn(self._policy.costs, measured)

    def close(self, *, drain: float = 5.0) -> None:
        """Takes no more requests, answers those it has for up to so many seconds, rejects the rest, and ends the threads."""
        with self._lock:
            self._stopping = True
            self._answered.wait_for(lambda: not self._asked or self._broken, timeout=drain)
            left = [asked.future for asked in self._asked.values()]
            self._asked.clear()
            self._broken = True
            self._earlier.notify_all()
        for future in left:
            future.set_exception(Rejected("stopping"))
        self._computing.shutdown()
        self._copying.shutdown()
        if self._timer is not threading.current_thread():
            self._timer.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- with the lock held --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._stopping or self._broken:
            raise Rejected("stopping")

    def _match(
        self, user: str, history: np.ndarray, times: np.ndarray | None, *, count: bool = False
    ) -> tuple[int, frozenset[Key]]:
        """The version of this history, for the policy: that of the user's prefixes, if all that are short enough are of its first
        items; else a new one. And the prefixes that are."""
        versions: dict[int, list[Key]] = {}
        for key, _ in self._policy.cache.of_user(user):
            if key.tokens <= len(history) and key.model == self._policy.cache.model:
                versions.setdefault(key.history, []).append(key)
        for version in sorted(versions, reverse=True):
            of_first = ((key, digest(history[: key.tokens], _first(times, key.tokens))) for key in versions[version])
            if all(self._known[key].digest == told for key, told in of_first):
                return version, frozenset(versions[version])
        self._stale += count and bool(versions)
        return next(self._numbers), frozenset()

    def _forget_absent(self) -> None:
        """What is known of prefixes that are gone."""
        cache = self._policy.cache
        if len(self._known) > 2 * len(cache) + 256:
            self._known = {key: known for key, known in self._known.items() if cache.state(key) is not State.ABSENT}

    def _take(self, actions: list[Action]) -> _Todo:
        """The books follow the policy's decisions in their order; what takes long is left to `_do`."""
        todo = _Todo()
        for action in actions:
            if isinstance(action, Drop):
                held = self._device if action.place is Place.DEVICE else self._host
                if action.key in held:
                    todo.freed.append(held.pop(action.key))
            elif isinstance(action, Reject):
                self._ends(action.request.id, Rejected("late" if action.late else "full"), todo)
            elif isinstance(action, Fail):
                error = self._asked[action.request.id].error if action.request.id in self._asked else None
                self._ends(action.request.id, error or RuntimeError("its ranking failed"), todo)
            else:
                todo.work.append(action)
        if self._policy.next_wakeup() < self._alarm:
            self._earlier.notify_all()
        return todo

    def _ends(self, number: Hashable, error: Exception, todo: _Todo) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            todo.errors.append((asked.future, error))
        if not self._asked:
            self._answered.notify_all()

    # -- without the lock ----------------------------------------------------------------------------------------------

    def _do(self, todo: _Todo) -> None:
        todo.freed.clear()
        for action in todo.work:
            try:
                if isinstance(action, Rank):
                    self._computing.submit(self._guarded, self._rank, action)
                elif isinstance(action, Compute):
                    self._computing.submit(self._guarded, self._compute, action)
                else:
                    self._copying.submit(self._guarded, self._copy, action)
            except RuntimeError:  # closed meanwhile, and all requests with it
                assert self._broken
        for future, error in todo.errors:
            future.set_exception(error)

    def _guarded(self, work: Callable[[Any], None], action: Any) -> None:
        """Work that fails is dealt with inside. If the books themselves are wrong, nothing more is promised: all are told."""
        try:
            if not self._broken:
                work(action)
        except BaseException as error:
            log.exception("the instance is broken and takes no more requests")
            self._break(error)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._stopping = self._broken = True
            left = [asked.future for asked in self._asked.values()]
            self._asked.clear()
            self._answered.notify_all()
            self._earlier.notify_all()
        for future in left:
            future.set_exception(RuntimeError(f"the instance is broken: {error!r}"))

    @property
    def broken(self) -> bool:
        """It has found its own books wrong, or is closed: start another."""
        return self._broken

    def _compute(self, action: Compute) -> None:
        self._began = began = time.perf_counter()
        known, prefix = self._known[action.key], None
        try:
            assert known.history is not None
            prefix = self._scorers[action.key.model].prefix(known.history, known.times)
            assert prefix.num_bytes <= action.size, f"{prefix.num_bytes} bytes, {action.size} were counted"
        except Exception:
            log.warning(
                "the prefix of %d items could not be computed; its user gets full passes",
                action.key.tokens,
                exc_info=True,
            )
        known.history = known.times = None
        self._done(action, began, prefix, self._device)

    def _copy(self, action: Load | Spill) -> None:
        began, copy = time.perf_counter(), None
        loads = isinstance(action, Load)
        try:
            copy = (
                to_device(self._host[action.key], self._scorer.device) if loads else to_host(self._device[action.key])
            )
        except Exception:
            log.warning("a prefix of %d bytes could not be copied", action.size, exc_info=True)
        self._done(action, began, copy, self._device if loads else self._host)

    def _done(
        self, action: Compute | Load | Spill, began: float, made: Prefix | None, place: dict[Key, Prefix]
    ) -> None:
        seconds = time.perf_counter() - began
        with self._lock:
            if made is not None:
                place[action.key] = made
            made = None  # so that what is dropped at once is freed at once
            if isinstance(action, Compute):
                self._no_longer_busy(seconds)
            todo = self._take(self._policy.done(self._clock(), action, seconds=seconds, well=action.key in place))
            self._forget_versions()
        self._do(todo)

    def _rank(self, action: Rank) -> None:
        self._began = began = time.perf_counter()
        asked = [self._asked.get(request.id) for request in action.requests]
        scores: list[np.ndarray] | None = None
        if any(request is None for request in asked):
            assert self._broken, "a request is ranked that nobody has asked"
            return
        pairs = [(request, one) for request, one in zip(action.requests, asked, strict=True) if one is not None]
        try:
            parts = []
            for request, one in pairs:
                fits = request.key is not None and request.key in one.matched
                if request.key is not None and not fits:
                    request.source, request.work = Source.UNUSABLE, ranking_work(0, request.tokens, request.candidates)
                parts.append(Part(one.ask, self._device[request.key] if fits and request.key else None))
            scores = self._scorers[action.model].rank(parts)
        except Exception as error:
            for _, one in pairs:
                one.error = error
        parts = []
        seconds = time.perf_counter() - began
        if scores is not None:
            for (request, one), values in zip(pairs, scores, strict=True):
                with self._lock:
                    mine = self._asked.pop(request.id, None)
                if mine is not None:  # else it was rejected while the instance closed
                    one.future.set_result(Ranked(values, request.source, action.model, time.perf_counter() - one.since))
        with self._lock:
            self._no_longer_busy(seconds)
            todo = self._take(self._policy.done(self._clock(), action, seconds=seconds, well=scores is not None))
            self._forget_versions()
            if not self._asked:
                self._answered.notify_all()
        self._do(todo)

    def _no_longer_busy(self, seconds: float) -> None:
        self._busy += seconds
        self._began = math.inf

    def _forget_versions(self) -> None:
        """Bundles that nothing is ranked with any more; their files are unmapped."""
        if len(self._scorers) > 1:
            needed = self._policy.versions()
            self._scorers = {version: scorer for version, scorer in self._scorers.items() if version in needed}

    def _keep_time(self) -> None:
        while not self._broken:
            with self._lock:
                now, self._alarm = self._clock(), self._policy.next_wakeup()
                if self._alarm > now:
                    self._earlier.wait(min(self._alarm - now, threading.TIMEOUT_MAX))
                    self._alarm = -math.inf
                    continue
            self._guarded(self._wake, None)

    def _wake(self, _: None) -> None:
        with self._lock:
            todo = self._take(self._policy.wake(self._clock()))
        self._do(todo)


def _first(times: np.ndarray | None, count: int) -> np.ndarray | None:
    return None if times is None else times[:count]


def _check_relay(scorer: Scorer, settings: Settings) -> None:
    problem = scorer.relay_problem() if settings.relay else None
    if problem is not None:
        raise ValueError(
            f"relay would change the scores of {type(scorer.model).__name__}: {problem}; switch relay off (Settings(relay=False), "
            f"nestpipe serve --no-relay)"
        )

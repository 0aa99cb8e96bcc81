"""Random operations on the cache, against an account of memory that knows nothing of states.

The account does what the cache says, as an instance would, and asserts what an instance relies on: no budget is ever exceeded,
nothing that is read is ever freed, nothing is computed or loaded that is there or under way, and everyone who asked gets one
answer.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Hashable, Iterable

from nestpipe.serve.cache import Cache
from nestpipe.serve.states import READABLE, Action, Compute, Drop, Hit, Key, Load, Miss, Place, Spill, State, Wait


class Account:
    """The memory of an instance, as its actions leave it. Raises AssertionError as soon as the cache asks for something wrong."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.device: dict[Key, int] = {}  # bytes; of what is under way, too
        self.host: dict[Key, int] = {}
        self.work: dict[Key, Action] = {}  # computations, loads and spills under way
        self.waiting: dict[Hashable, Key] = {}
        self.reading: dict[Hashable, Key] = {}

    def claim(self, key: Key, who: Hashable, **how: object) -> Action:
        assert who not in self.waiting and who not in self.reading
        there, busy = self.readable(key), isinstance(self.work.get(key), Compute | Load)
        actions = self.cache.claim(key, who, **how)  # type: ignore[arg-type]
        *drops, verdict = actions
        assert all(isinstance(action, Drop) for action in drops)
        assert isinstance(verdict, Hit) == there, f"{key} is on the device: {there}; {verdict}"
        assert isinstance(verdict, Wait) == busy, f"{key} is under way: {busy}; {verdict}"
        if isinstance(verdict, Compute | Load | Wait):
            self.waiting[who] = key
        self.do(actions)
        return verdict

    def readable(self, key: Key) -> bool:
        return key in self.device and not isinstance(self.work.get(key), Compute | Load)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            key = action.key
            match action:
                case Drop(place=place):
                    copies = self.device if place is Place.DEVICE else self.host
                    assert key in copies, f"{key} has no copy to drop: {place.value}"
                    assert key not in self.work, f"{key} is dropped while it is copied"
                    assert place is Place.HOST or key not in self.reading.values(), f"{key} is dropped while it is read"
                    del copies[key]
                case Compute(size=size):
                    assert key not in self.device and key not in self.host and key not in self.work
                    self.device[key], self.work[key] = size, action
                case Load(size=size):
                    assert key in self.host and key not in self.device and key not in self.work
                    self.device[key], self.work[key] = size, action
                case Spill(size=size):
                    assert key in self.device and key not in self.host and key not in self.work
                    self.host[key], self.work[key] = size, action
                case Hit(who=who):
                    assert self.readable(key)
                    assert self.waiting.pop(who, key) == key and who not in self.reading
                    self.reading[who] = key
                case Miss(who=who):
                    assert self.waiting.pop(who, key) == key and who not in self.reading
        assert sum(self.device.values()) <= self.cache.pool.device_bytes
        assert sum(self.host.values()) <= self.cache.pool.host_bytes

    def end(self, key: Key, *, well: bool, seconds: float = 1.0) -> None:
        """The work on this prefix is done, or has failed."""
        action, cache = self.work.pop(key), self.cache
        if well:
            if isinstance(action, Compute):
                self.do(cache.computed(key, seconds))
            else:
                self.do(cache.loaded(key) if isinstance(action, Load) else cache.spilled(key))
            return
        del (self.host if isinstance(action, Spill) else self.device)[key]  # what was promised to it
        self.do(cache.failed(key))
        assert key not in self.waiting.values(), f"{key} failed, and someone still waits for it"

    def give_up(self, key: Key, *, seconds: float = 1.0) -> None:
        """A computation that nobody waits for is not done, or not any further."""
        del self.work[key], self.device[key]
        self.do(self.cache.failed(key, cancelled=True, seconds=seconds))

    def release(self, who: Hashable) -> None:
        self.do(self.cache.release(self.reading.pop(who)))

    def leave(self, who: Hashable) -> None:
        self.cache.leave(self.waiting.pop(who), who)

    def check(self) -> None:
        self.cache.pool.check()
        assert self.cache.pool.device_used == sum(self.device.values())
        assert self.cache.pool.host_used == sum(self.host.values())
        assert len(self.cache) == len(self.device.keys() | self.host.keys())
        for key in self.reading.values():
            assert self.cache.state(key) in READABLE
        assert all(self.cache.state(key) in (State.COMPUTING, State.LOADING) for key in self.waiting.values())


ROUND = 10_000  # operations on one cache, before the next with other budgets


def fuzz(operations: int, seed: int = 0, *, users: int = 12) -> dict[str, int]:
    """Does so many random operations, and asserts everything after each one. Returns how often each kind happened."""
    draw, happened = random.Random(seed), collections.Counter[str]()
    for first in range(0, operations, ROUND):
        happened.update(_round(draw, min(ROUND, operations - first), users))
    return dict(happened)


def _round(draw: random.Random, operations: int, users: int) -> collections.Counter[str]:
    device_bytes = draw.randrange(20, 60)
    cache = Cache(
        device_bytes=device_bytes,
        host_bytes=draw.choice([0, device_bytes // 2, device_bytes, 3 * device_bytes]),
        model="m0",
        spill_at=draw.choice([0.0, 0.5, 0.9]),
        spills=draw.choice([1, 2]),
    )
    account, happened = Account(cache), collections.Counter[str]()
    histories = [0] * users
    models = 0

    def claim() -> str:
        user = draw.randrange(users)
        histories[user] += draw.random() < 0.05
        history = max(0, histories[user] - (draw.random() < 0.1))
        tokens = draw.choice((1, 2, 5, 9, 16, 70))
        model = f"m{models - (draw.random() < 0.05)}"
        verdict = account.claim(
            Key(user, history, tokens, model),
            object(),
            size=tokens,
            compute=draw.random() < 0.7,
            compute_seconds=draw.random(),
            load_seconds=draw.random() * 0.5,
            ranking=draw.random() < 0.5,
        )
        return type(verdict).__name__

    def end() -> str:
        if not account.work:
            return "idle"
        key = draw.choice(list(account.work))
        name, well = type(account.work[key]).__name__, draw.random() < 0.95
        account.end(key, well=well)
        return f"{name} {'done' if well else 'failed'}"

    def release() -> str:
        if account.reading:
            account.release(draw.choice(list(account.reading)))
            return "release"
        return "idle"

    def leave() -> str:
        if account.waiting:
            account.leave(draw.choice(list(account.waiting)))
            return "leave"
        return "idle"

    def give_up() -> str:
        wanted = set(account.waiting.values())
        unwanted = [key for key, work in account.work.items() if isinstance(work, Compute) and key not in wanted]
        if not unwanted:
            return "idle"
        account.give_up(draw.choice(unwanted))
        return "give up"

    def spill() -> str:
        actions = cache.spill()
        account.do(actions)
        return "Spill" if actions else "idle"

    def discard() -> str:
        account.do(cache.discard(draw.choice([*account.device, *account.host] or [Key(0, 0, 0, "")])))
        return "discard"

    def switch() -> str:
        nonlocal models
        models += 1
        account.do(cache.switch(f"m{models}"))
        return "switch"

    kinds: dict[Callable[[], str], float] = {
        claim: 10, end: 9, release: 8, leave: 1, give_up: 1, spill: 3, discard: 0.1, switch: 0.02
    }  # fmt: skip
    done = 0
    while done < operations:
        (operation,) = draw.choices(list(kinds), list(kinds.values()))
        if (what := operation()) != "idle":  # there was nothing to end, release, leave or spill
            happened[what] += 1
            done += 1
            account.check()
    return happened

"""The prefixes of one instance: a pool in device memory, and host memory behind it.

The cache decides, the caller acts. Methods return actions (compute this, load that, drop those) in the order in which they
are to be done, and the caller says when one that takes time has ended. Nothing here knows tensors, threads or clocks, so a
server and a simulated fleet run the same code.

A prefix is in one of seven states and moves only as TRANSITIONS (states.py) says; anything else is a mistake of the caller, and
asserted. Budgets hold at every moment, counting what is under way (pool.py).

Spilling is a copy ahead of need. When the device is filled beyond `spill_at`, the least recently used prefix that is on the
device only is copied to the host. The copy takes time, during which (and after which) the prefix is read on the device as
before; only when room is needed is the device copy dropped, at once. A prefix whose copy is not made by then is dropped all
the same, and counted as lost: a new computation never waits for an old prefix to be saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from nestpipe.serve.pool import Entry, Pool
from nestpipe.serve.states import (
    READABLE,
    UNDER_WAY,
    Action,
    Compute,
    Drop,
    Event,
    Hit,
    Key,
    Load,
    Miss,
    Place,
    Spill,
    State,
    Wait,
    Why,
)


class Cache:
    """device_bytes, host_bytes: budgets, never exceeded. host_bytes = 0: no host tier.
    model: version of the current model; prefixes of another are not begun.
    spill_at: share of the device budget beyond which prefixes are copied to the host. spills: how many at once.
    """

    def __init__(
        self, *, device_bytes: int, host_bytes: int = 0, model: str = "", spill_at: float = 0.5, spills: int = 1
    ) -> None:
        if not 0 <= spill_at <= 1:
            raise ValueError(f"spill_at={spill_at}: give a share of the device budget, 0 to 1")
        self.pool = Pool(device_bytes=device_bytes, host_bytes=host_bytes, spills=spills)
        self.counters = self.pool.counters
        self.model, self.spill_at = model, spill_at

    # -- asking --------------------------------------------------------------------------------------------------------

    def state(self, key: Key) -> State:
        entry = self.pool.entries.get(key)
        return entry.state if entry else State.ABSENT

    def of_user(self, user: Hashable) -> Iterator[tuple[Key, State]]:
        """The user's prefixes that are there or under way, but for superseded ones."""
        entries = self.pool.of_user.get(user, {}).items()
        return ((key, entry.state) for key, entry in entries if not entry.superseded)

    def __len__(self) -> int:
        return len(self.pool.entries)

    def claim(
        self,
        key: Key,
        who: Hashable,
        *,
        size: int,
        compute: bool,
        compute_seconds: float = 0.0,
        load_seconds: float = 0.0,
        ranking: bool = True,
    ) -> list[Action]:
        """The prefix for `who`: drops that make room, and at the end of the list what comes of it: Hit, Wait, Miss, or
        Compute or Load, which `who` waits for.

        compute: begin a computation if it is absent (a signal), else it is a Miss (a ranking, which then does the full pass).
        compute_seconds, load_seconds: what it takes without the host's copy, and with it; it is loaded only if that is faster.
        ranking: the claim is by a ranking, not by a signal that expects one: the prefix is then not wasted.
        """
        entry = self.pool.entries.get(key)
        actions = self._supersede_histories(key)
        if entry is not None and entry.state in READABLE:
            self.counters.hits += 1
            entry.used |= ranking
            self.pool.pin(entry)
            return [*actions, Hit(key, who)]
        if entry is not None and entry.state in UNDER_WAY:
            self.counters.waits += 1
            entry.waiters[who] = ranking
            return [*actions, Wait(key, who)]
        if entry is not None and load_seconds < compute_seconds:
            room = self.pool.device_room(entry.size)
            if room is None:
                return [*actions, self._miss(key, who, Why.NO_ROOM)]
            self.counters.loads += 1
            entry.waiters[who] = ranking
            self.pool.move(entry, Event.LOAD)
            return [*actions, *room, Load(key, entry.size)]
        if not compute:
            return [*actions, self._miss(key, who, Why.SLOW_LOAD if entry else Why.ABSENT)]
        why = Why.TOO_LARGE if size > self.pool.device_bytes else self._why_superseded(key)
        if why is None and (room := self.pool.device_room(size)) is not None:
            if entry is not None:  # the copy on the host is of no use
                room += self.pool.drop(entry, Place.HOST)
            entry = Entry(key, size, waiters={who: ranking})
            self.pool.add(entry)
            self.counters.computations += 1
            self.pool.move(entry, Event.COMPUTE)
            return [*actions, *room, Compute(key, size)]
        return [*actions, self._miss(key, who, why or Why.NO_ROOM)]

    def release(self, key: Key) -> list[Action]:
        """Whoever had a Hit no longer reads it."""
        entry = self.pool.entries[key]
        assert entry.pins > 0, f"{key} is released more often than it was claimed"
        self.pool.pin(entry, -1)
        return self._dropped_if_superseded(entry)

    def leave(self, key: Key, who: Hashable) -> None:
        """`who` no longer waits."""
        del self.pool.entries[key].waiters[who]

    def wasted_seconds(self) -> float:
        """Spent on prefixes that no ranking has used: those that are gone, and those that are here."""
        unused = (entry.seconds for entry in self.pool.entries.values() if not entry.used)
        return self.counters.wasted_seconds + sum(unused)

    def waiters(self, key: Key) -> int:
        return len(self.pool.entries[key].waiters)

    # -- what the caller has done --------------------------------------------------------------------------------------

    def computed(self, key: Key, seconds: float = 0.0) -> list[Action]:
        """A Hit for each waiter; before that, drops of what this prefix supersedes. seconds: that it took."""
        self.pool.entries[key].seconds = seconds
        return self._arrived(key, Event.COMPUTED)

    def loaded(self, key: Key) -> list[Action]:
        return self._arrived(key, Event.LOADED)

    def spilled(self, key: Key) -> list[Action]:
        entry = self.pool.entries[key]
        self.pool.move(entry, Event.SPILLED)
        return self._dropped_if_superseded(entry)

    def failed(self, key: Key, *, cancelled: bool = False, seconds: float = 0.0) -> list[Action]:
        """The computation, load or spill has failed, or was given up. A Miss for each waiter. seconds: spent for nothing."""
        entry = self.pool.entries[key]
        self.counters.wasted_seconds += seconds
        self.counters.cancelled += cancelled
        self.counters.failed += not cancelled
        waiters, entry.waiters = entry.waiters, {}
        actions: list[Action] = [Drop(key, Place.HOST)] if entry.state is State.LOADING else []
        entry.unspillable |= entry.state is State.SPILLING  # else it would be tried again at once, and for ever
        self.pool.move(entry, Event.FAIL)
        actions += (self._miss(key, who, Why.FAILED) for who in waiters)
        return actions + self._dropped_if_superseded(entry)

    # -- what the cache wants by itself --------------------------------------------------------------------------------

    def spill(self) -> list[Action]:
        """A copy to begin now, behind the drops that make room for it on the host; or nothing."""
        pool = self.pool
        if pool.spilling >= pool.spills or pool.device_used <= self.spill_at * pool.device_bytes:
            return []
        entry = next((entry for entry in pool.unsaved.values() if entry.size <= pool.host_bytes), None)
        if entry is None or (room := pool.host_room(entry.size)) is None:
            return []
        self.counters.spills += 1
        pool.move(entry, Event.SPILL)
        return [*room, Spill(entry.key, entry.size)]

    def discard(self, key: Key) -> list[Action]:
        """This prefix is not to be used again (reading it failed, say): dropped as soon as nobody reads it."""
        entry = self.pool.entries.get(key)
        return self._supersede(entry) if entry else []

    def switch(self, model: str) -> list[Action]:
        """From now on prefixes of this model only; others are dropped, those in use as soon as they no longer are."""
        self.model = model
        actions: list[Action] = []
        for entry in list(self.pool.entries.values()):
            if entry.key.model != model:
                actions += self._supersede(entry)
        return actions

    # -- newer and older -----------------------------------------------------------------------------------------------

    def _why_superseded(self, key: Key) -> Why | None:
        newer = (other.history > key.history for other in self.pool.of_user.get(key.user, ()))
        return Why.SUPERSEDED if key.model != self.model or any(newer) else None

    def _supersede_histories(self, key: Key) -> list[Action]:
        entries = self.pool.of_user.get(key.user)
        if not entries or (len(entries) == 1 and key in entries):
            return []
        older = [entry for other, entry in entries.items() if other.history < key.history]
        return [action for entry in older for action in self._supersede(entry)]

    def _supersede(self, entry: Entry) -> list[Action]:
        if not entry.superseded:
            entry.superseded = True
            self.counters.superseded += 1
        return self._dropped_if_superseded(entry)

    def _dropped_if_superseded(self, entry: Entry) -> list[Action]:
        actions: list[Action] = []
        if entry.superseded and not entry.pins:
            if entry.state in (State.DEVICE, State.BOTH):
                actions += self.pool.drop(entry, Place.DEVICE)
            if entry.state is State.HOST:
                actions += self.pool.drop(entry, Place.HOST)
        return actions

    # -- answers -----------------------------------------------------------------------------------------------------

    def _miss(self, key: Key, who: Hashable, why: Why) -> Miss:
        self.counters.misses[why] += 1
        return Miss(key, who, why)

    def _arrived(self, key: Key, event: Event) -> list[Action]:
        entry = self.pool.entries[key]
        waiters, entry.waiters = entry.waiters, {}
        entry.used |= any(waiters.values())
        self.pool.pin(entry, len(waiters))
        self.pool.move(entry, event)
        actions: list[Action] = []
        for other in list(self.pool.of_user[key.user].values()):
            if other.key.model == key.model and other.key[1:3] < key[1:3]:
                actions += self._supersede(other)
        actions += (Hit(key, who) for who in waiters)
        return actions + self._dropped_if_superseded(entry)

"""The memory that prefixes lie in, and its books: who is where, in use or idle, and who goes when room is needed.

Memory is counted from the moment it is promised: a computation or a load has its device bytes, and a spill its host bytes, from
its beginning. So budgets hold at every moment, whatever is under way. An entry is changed by `move` and `pin` alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable

from nestpipe.serve.states import (
    ON_DEVICE,
    ON_HOST,
    READABLE,
    TRANSITIONS,
    UNDER_WAY,
    Action,
    Drop,
    Event,
    Key,
    Place,
    State,
    Why,
)


@dataclasses.dataclass
class Counters:
    """What has happened since the beginning.

    hits, waits, loads, misses: what claims came to. computations: asked for; extended: of these, begun behind a shorter prefix;
    cancelled: of these, not begun, or given up between two pieces. failed: computations, loads and spills.
    device_drops, host_drops: to make room; lost: of the former, those of which there was no copy on the host.
    superseded: given up because there was a newer one. wasted: computed, and gone without a ranking having used them;
    wasted_seconds: what these had taken, and what pieces of others had that were never whole.
    """

    hits: int = 0
    waits: int = 0
    loads: int = 0
    computations: int = 0
    extended: int = 0
    misses: collections.Counter[Why] = dataclasses.field(default_factory=collections.Counter)
    failed: int = 0
    cancelled: int = 0
    spills: int = 0
    device_drops: int = 0
    host_drops: int = 0
    lost: int = 0
    superseded: int = 0
    wasted: int = 0
    wasted_seconds: float = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """waiters: who asked while it was under way, and whether for a ranking. used: by a ranking. superseded: dropped as soon as
    nobody reads it. unspillable: a copy to the host has failed, and is not tried again. seconds: that its computation took."""

    key: Key
    size: int
    state: State = State.ABSENT
    pins: int = 0
    waiters: dict[Hashable, bool] = dataclasses.field(default_factory=dict)
    used: bool = False
    superseded: bool = False
    unspillable: bool = False
    seconds: float = 0.0


class Pool:
    """device_bytes, host_bytes: budgets. spills: how many copies to the host are under way at once."""

    def __init__(self, *, device_bytes: int, host_bytes: int, spills: int) -> None:
        if device_bytes < 0 or host_bytes < 0:
            raise ValueError(f"device_bytes={device_bytes}, host_bytes={host_bytes}: give budgets of zero or more")
        if spills < 1:
            raise ValueError(
                f"spills={spills}: give how many copies to the host may be under way at once, at least one"
            )
        self.device_bytes, self.host_bytes, self.spills = device_bytes, host_bytes, spills
        self.device_used = self.host_used = 0
        self.spilling = 0
        self.counters = Counters()
        self.entries: dict[Key, Entry] = {}
        self.of_user: dict[Hashable, dict[Key, Entry]] = {}
        # By least recent use. Idle: read by nobody. Unsaved: those of them that are on the device only. Saved: on the host only.
        self.unsaved: collections.OrderedDict[Key, Entry] = collections.OrderedDict()
        self._idle: collections.OrderedDict[Key, Entry] = collections.OrderedDict()
        self._saved: collections.OrderedDict[Key, Entry] = collections.OrderedDict()
        self._idle_bytes = 0  # on the device, that can be dropped at once
        self._saved_bytes = 0

    def add(self, entry: Entry) -> None:
        assert entry.key not in self.entries
        self.entries[entry.key] = self.of_user.setdefault(entry.key.user, {})[entry.key] = entry

    def device_room(self, size: int) -> list[Action] | None:
        """Drops, done, that leave so many bytes free; None if even all that may be dropped would not do, and nothing is done."""
        needed = self.device_used + size - self.device_bytes
        if needed > self._idle_bytes:
            return None
        victims = []
        if needed > 0:
            for entry in self._idle.values():
                if entry.state is not State.SPILLING:
                    victims.append(entry)
                    needed -= entry.size
                    if needed <= 0:
                        break
        self.counters.device_drops += len(victims)
        self.counters.lost += sum(entry.state is State.DEVICE for entry in victims)
        return [action for entry in victims for action in self.drop(entry, Place.DEVICE)]

    def host_room(self, size: int) -> list[Action] | None:
        """As `device_room`. Copies of what is on the device too are left alone: they would be the next to be spilled again."""
        needed = self.host_used + size - self.host_bytes
        if needed > self._saved_bytes:
            return None
        victims = []
        for entry in self._saved.values():
            if needed <= 0:
                break
            victims.append(entry)
            needed -= entry.size
        self.counters.host_drops += len(victims)
        return [action for entry in victims for action in self.drop(entry, Place.HOST)]

    def drop(self, entry: Entry, place: Place) -> list[Action]:
        assert not (entry.pins and place is Place.DEVICE), f"{entry.key} is in use and cannot be dropped"
        self.move(entry, Event.DROP_DEVICE if place is Place.DEVICE else Event.DROP_HOST)
        return [Drop(entry.key, place)]

    def move(self, entry: Entry, event: Event) -> None:
        before = entry.state
        after = TRANSITIONS.get((before, event))
        assert after is not None, f"{entry.key} is {before.value}: no {event.value}"
        key, size = entry.key, entry.size
        self._idle_bytes -= size * self._droppable(entry)
        self.device_used += size * ((after in ON_DEVICE) - (before in ON_DEVICE))
        self.host_used += size * ((after in ON_HOST) - (before in ON_HOST))
        self.spilling += (after is State.SPILLING) - (before is State.SPILLING)
        self._saved_bytes += size * ((after is State.HOST) - (before is State.HOST))
        entry.state = after
        self._idle_bytes += size * self._droppable(entry)
        if after is State.ABSENT:
            if before is not State.COMPUTING and not entry.used:
                self.counters.wasted += 1
                self.counters.wasted_seconds += entry.seconds
            del self.entries[key], self.of_user[key.user][key]
            if not self.of_user[key.user]:
                del self.of_user[key.user]
        self._enlist(self._idle, entry, after in READABLE and not entry.pins)
        self._enlist(self.unsaved, entry, self._spillable(entry))
        self._enlist(self._saved, entry, after is State.HOST)

    def pin(self, entry: Entry, count: int = 1) -> None:
        self._idle_bytes -= entry.size * self._droppable(entry)
        entry.pins += count
        self._idle_bytes += entry.size * self._droppable(entry)
        self._enlist(self._idle, entry, entry.state in READABLE and not entry.pins)
        self._enlist(self.unsaved, entry, self._spillable(entry))

    @staticmethod
    def _droppable(entry: Entry) -> bool:
        return not entry.pins and entry.state in (State.DEVICE, State.BOTH)

    @staticmethod
    def _spillable(entry: Entry) -> bool:
        return entry.state is State.DEVICE and not (entry.pins or entry.superseded or entry.unspillable)

    @staticmethod
    def _enlist(queue: collections.OrderedDict[Key, Entry], entry: Entry, belongs: bool) -> None:
        """At the end, if it is not there yet: what is read has left the queue, so it comes back as the most recently used."""
        if not belongs:
            queue.pop(entry.key, None)
        elif entry.key not in queue:
            queue[entry.key] = entry

    def check(self) -> None:
        """Asserts everything that must hold at any moment."""
        entries = list(self.entries.values())
        assert self.device_used == sum(entry.size for entry in entries if entry.state in ON_DEVICE) <= self.device_bytes
        assert self.host_used == sum(entry.size for entry in entries if entry.state in ON_HOST) <= self.host_bytes
        assert self._idle_bytes == sum(entry.size for entry in entries if self._droppable(entry))
        assert self.spilling == sum(entry.state is State.SPILLING for entry in entries) <= self.spills
        assert sum(map(len, self.of_user.values())) == len(entries)
        idle = {entry.key for entry in entries if entry.state in READABLE and not entry.pins}
        saved = {entry.key for entry in entries if entry.state is State.HOST}
        assert self._saved_bytes == sum(self.entries[key].size for key in saved)
        assert self._idle.keys() == idle and self._saved.keys() == saved
        for entry in entries:
            assert entry.state is not State.ABSENT and entry.pins >= 0
            assert not entry.pins or entry.state in READABLE, f"{entry.key} is read, yet {entry.state.value}"
            assert not entry.waiters or entry.state in UNDER_WAY, f"{entry.key} is waited for, yet {entry.state.value}"
            spillable = self._spillable(entry)
            assert (entry.key in self.unsaved) == spillable, f"{entry.key} may be spilled: {spillable}"
            assert not self._droppable(entry) or not entry.superseded, f"{entry.key} is superseded, yet still there"

"""The lane of an instance that copies prefixes between host and device, one at a time: loads, and spills when there are none."""

from __future__ import annotations

import collections

from nestpipe.serve.cache import Cache
from nestpipe.serve.costs import Law, copy_work
from nestpipe.serve.states import Action, Load, Spill


class Copies:
    """law: what a copy takes."""

    def __init__(self, cache: Cache, law: Law) -> None:
        self.cache, self.law = cache, law
        self.running: Load | Spill | None = None
        self._loads: collections.deque[Load] = collections.deque()

    def add(self, load: Load) -> None:
        self._loads.append(load)

    def seconds(self, size: int) -> float:
        """Until a load of so many bytes, asked for now, would be done."""
        sizes = [size, *(action.size for action in (self.running, *self._loads) if action)]
        return sum(self.law.seconds(copy_work(size)) for size in sizes)

    def begin(self) -> list[Action]:
        """The next copy, if the lane is free, behind the drops that make room for it."""
        if self.running:
            return []
        actions: list[Action] = [self._loads.popleft()] if self._loads else self.cache.spill()
        if actions:
            assert isinstance(actions[-1], Load | Spill)
            self.running = actions[-1]
        return actions

    def end(self, action: Load | Spill, seconds: float, *, well: bool) -> list[Action]:
        assert action is self.running, f"{action} is not what is being copied"
        self.running = None
        if not well:
            return self.cache.failed(action.key)
        self.law.observe(copy_work(action.size), seconds)
        return self.cache.loaded(action.key) if isinstance(action, Load) else self.cache.spilled(action.key)

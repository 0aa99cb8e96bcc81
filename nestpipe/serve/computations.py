"""Prefixes that are to be computed, piece by piece.

While a long prefix is computed, no ranking can begin. So it is cut into pieces that take a share of the SLO each, every piece
behind what the pieces before it have made; and between two pieces the instance decides anew what goes first, or that nobody
wants the prefix any more. A prefix that is on the device and has become too short is the first piece of the longer one.

To the cache it is one computation: under way, with all of its bytes, until its last piece is done.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from nestpipe.serve import states
from nestpipe.serve.cache import Cache
from nestpipe.serve.costs import Costs, Work, prefix_work
from nestpipe.serve.requests import Piece, Settings
from nestpipe.serve.states import READABLE, Compute, Drop, Key, Place
from nestpipe.serve.trigger import Trigger

BLOCK = 128  # items: attention's tiles have so many queries, and pieces end where tiles do


@dataclasses.dataclass(eq=False, slots=True)
class Computation:
    """A prefix that is not whole yet.

    due: when its ranking is expected, or no longer waits. saves: seconds that a ranking takes less with it.
    made: items that need not be computed any more. extends: the shorter prefix that has them, until the first piece is done.
    spent: seconds of pieces. begun: the first piece. running: a piece is being computed. wanted: somebody waits for it.
    """

    key: Key
    size: int
    due: float
    saves: float
    made: int = 0
    extends: Key | None = None
    spent: float = 0.0
    begun: bool = False
    running: bool = False
    wanted: bool = True

    @property
    def left(self) -> Work:
        return prefix_work(self.key.tokens - self.made, self.made)


class Computations:
    """Of one instance."""

    def __init__(self, settings: Settings, costs: Costs, cache: Cache, trigger: Trigger) -> None:
        self.settings, self.law, self.cache, self.trigger = settings, costs.prefix, cache, trigger
        self._computations: dict[Key, Computation] = {}

    def add(self, compute: Compute, *, due: float, saves: float, extends: Key | None) -> None:
        made = extends.tokens if extends else 0
        self._computations[compute.key] = Computation(compute.key, compute.size, due, saves, made, extends)

    def extensible(self, key: Key | None) -> Key | None:
        """This prefix, if a longer one can begin with it now."""
        can = key is not None and self.settings.piece < math.inf and self.cache.state(key) in READABLE
        return key if can else None

    def seconds_left(self) -> float:
        """What all of them take from here on."""
        return sum(self.law.seconds(computation.left) for computation in self._computations.values())

    def high_left(self, key: Key) -> float:
        """What this one takes from here on, at most; infinity if it has not begun, or is none of these."""
        computation = self._computations.get(key)
        return self.law.high(computation.left) if computation and computation.begun else math.inf

    def versions(self) -> set[str]:
        return {key.model for key in self._computations}

    def hasten(self, key: Key, due: float) -> None:
        """A ranking is expected then, or waits for it until then."""
        if computation := self._computations.get(key):
            computation.due, computation.wanted = min(computation.due, due), True

    # -- pieces --------------------------------------------------------------------------------------------------------

    def first(self) -> Computation | None:
        """The one that is due first."""
        first = min(self._computations.values(), key=lambda computation: computation.due, default=None)
        if first and first.extends and self.cache.state(first.extends) not in READABLE:
            first.extends, first.made = None, 0  # it has been dropped meanwhile
        return first

    def next_piece(self, computation: Computation) -> Piece:
        first, tokens = computation.made, computation.key.tokens
        longest = self.settings.piece * self.settings.slo
        last = tokens
        if self.law.seconds(computation.left) > longest:
            blocks = range(first // BLOCK + 1, tokens // BLOCK + 1)
            fit = bisect.bisect_right(
                blocks, longest, key=lambda block: self.law.seconds(prefix_work(block * BLOCK - first, first))
            )
            last = blocks[max(0, fit - 1)] * BLOCK if blocks else tokens
            last = last if tokens - last >= BLOCK else tokens  # a call for less than a block would be mostly overhead
        return Piece(computation.key, computation.size, first, last, computation.extends)

    def begin(self, piece: Piece) -> list[states.Action]:
        computation = self._computations[piece.key]
        computation.begun = computation.running = True
        if not piece.behind:
            return []
        self.cache.counters.extended += 1
        *drops, hit = self.cache.claim(piece.behind, computation, size=0, compute=False)
        assert isinstance(hit, states.Hit), f"{piece.behind} is extended, yet not there"
        return drops

    def end(self, now: float, piece: Piece, seconds: float, *, well: bool) -> list[states.Action]:
        """A piece is done. Not well: so is the computation, and nothing is left of it."""
        computation = self._computations[piece.key]
        computation.running, computation.extends = False, None
        computation.spent += seconds
        actions = self.cache.release(piece.behind) if piece.behind else []
        if not well:
            del self._computations[piece.key]
            return actions + self.cache.failed(piece.key, seconds=computation.spent)
        self.law.observe(piece.work, seconds)
        computation.made = piece.last
        if not piece.is_last:
            return actions + self.leave(now, piece.key)
        del self._computations[piece.key]
        self.trigger.computed(now)
        return actions + self.cache.computed(piece.key, computation.spent)

    def leave(self, now: float, key: Key) -> list[states.Action]:
        """Somebody no longer waits for it. If nobody does it is not computed, or not any further: unless so little is left to do
        that it pays for users who come back."""
        computation = self._computations.get(key)
        if computation is None or computation.running or self.cache.waiters(key):
            return []
        if computation.begun and self.trigger.pays(
            now, saved_seconds=computation.saves, prefix_seconds=self.law.seconds(computation.left)
        ):
            if computation.wanted:
                computation.due, computation.wanted = now + self.settings.lease, False  # there is time
            return []
        del self._computations[key]
        freed: list[states.Action] = [Drop(key, Place.DEVICE)] if computation.begun else []
        return freed + self.cache.failed(key, cancelled=True, seconds=computation.spent)

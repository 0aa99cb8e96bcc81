"""Which items the users of a load have had, and which candidates are ranked for them: all of it follows from a seed.

A user's items are an endless list, drawn once for all by popularity (the k-th item about as often as 1 / k). A visit
sees a window of it, which grows from visit to visit and sometimes forgets its beginning, as `serve.load` says.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.serve.load import Load, Visit

BLOCK = 1024  # items of a user that are drawn together
FIRST_SECOND, PER_ITEM = 1_600_000_000, 600  # of the times of items: about one in ten minutes


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a visit sends. known: how many of the items there are at the signal. times, now: seconds, if the model looks
    at them."""

    user: str
    history: np.ndarray
    known: int
    candidates: np.ndarray
    times: np.ndarray | None = None
    now: int | None = None


class Histories:
    """items: keys to draw from. times: whether items have them. name: of the users; others are other users to a server."""

    def __init__(
        self, items: np.ndarray, load: Load, *, seed: int = 0, times: bool = False, name: str = "user"
    ) -> None:
        if not len(items):
            raise ValueError("there are no items to draw histories from: give the keys of the bundle's item table")
        self.items, self.load, self.seed, self.times, self.name = items, load, seed, times, name
        self._users: dict[int, np.ndarray] = {}

    def of(self, visit: Visit) -> Asked:
        """What this visit sends at its signal (the first `known` items) and at its request (all)."""
        first = visit.history * self.load.forgotten
        places = np.arange(first, first + visit.tokens)
        draw = np.random.default_rng([self.seed, 1, visit.number])
        candidates = self.items[draw.integers(0, len(self.items), visit.candidates)]
        history = self._list(visit.user, first + visit.tokens)[first : first + visit.tokens]
        times = FIRST_SECOND + PER_ITEM * places + places * 7919 % PER_ITEM if self.times else None
        now = int(times[-1]) + PER_ITEM if times is not None else None
        return Asked(f"{self.name}-{visit.user}", history, visit.known, candidates, times, now)

    def _list(self, user: int, count: int) -> np.ndarray:
        """The first items of a user, at least so many."""
        kept = self._users.get(user, self.items[:0])
        while len(kept) < count:
            draw = np.random.default_rng([self.seed, 0, user, len(kept) // BLOCK])
            places = np.floor(len(self.items) ** draw.random(BLOCK)).astype(np.int64) - 1
            kept = np.concatenate([kept, self.items[places]])
        self._users[user] = kept
        return kept

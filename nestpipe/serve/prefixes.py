"""The prefixes of one instance: the tensors by key, on device and host, and what each was made of."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from nestpipe.models.prefix import Prefix
from nestpipe.serve.cache import Cache
from nestpipe.serve.messages import digest
from nestpipe.serve.requests import Piece
from nestpipe.serve.states import Drop, Key, Place, State

SWEEP = 256  # entries of prefixes that are gone, before they are looked for


@dataclasses.dataclass(eq=False, slots=True)
class Origin:
    """What a prefix is made of. history, times: until all of it is computed."""

    digest: bytes
    history: np.ndarray | None
    times: np.ndarray | None


class Prefixes:
    """Follows the cache, which decides. Not for several threads at once."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.device: dict[Key, Prefix] = {}
        self.half_made: dict[Key, Prefix] = {}  # on the device too, the first pieces of those that are being computed
        self.host: dict[Key, Prefix] = {}
        self._origins: dict[Key, Origin] = {}
        self._versions = itertools.count(1)

    def match(self, user: str, history: np.ndarray, times: np.ndarray | None) -> tuple[int, frozenset[Origin], bool]:
        """The version of a history, as the cache counts them: that of the user's prefixes, if all that are short enough are of
        its first items; else a new one, the newest. And what those are made of (a key may name another prefix later,
        if this one is given up); and whether there are some that are not."""
        versions: dict[int, list[Key]] = {}
        for key, _ in self.cache.of_user(user):
            if key.tokens <= len(history) and key.model == self.cache.model:
                versions.setdefault(key.history, []).append(key)
        for version in sorted(versions, reverse=True):
            keys = versions[version]
            if all(self.is_of(key, history, times) for key in keys):
                return version, frozenset(self._origins[key] for key in keys), False
        return next(self._versions), frozenset(), bool(versions)

    def is_of(self, key: Key, history: np.ndarray, times: np.ndarray | None) -> bool:
        """Whether the prefix is of the first of these items."""
        return self._origins[key].digest == digest(*part(slice(key.tokens), history, times))

    def expect(self, key: Key, history: np.ndarray, times: np.ndarray | None) -> None:
        """This prefix is going to be computed, of the first of these items."""
        if len(self._origins) > 2 * len(self.cache) + SWEEP:
            gone = [key for key in self._origins if self.cache.state(key) is State.ABSENT]
            for other in gone:
                del self._origins[other]
        items = part(slice(key.tokens), history, times)
        self._origins[key] = Origin(digest(*items), *items)

    def origin(self, key: Key) -> Origin:
        return self._origins[key]

    def before(self, piece: Piece) -> Prefix | None:
        """What the piece is to be computed behind."""
        if not piece.first:
            return None
        if piece.behind is None:
            return self.half_made[piece.key]
        origin = self.origin(piece.key)
        assert origin.history is not None and self.is_of(piece.behind, origin.history, origin.times), "of other items"
        return self.device[piece.behind]

    def drop(self, action: Drop) -> Prefix | None:
        """What is no longer kept: for the caller to let go."""
        if action.place is Place.HOST:
            return self.host.pop(action.key, None)
        return self.half_made.pop(action.key, None) or self.device.pop(action.key, None)


def part(which: slice, history: np.ndarray, times: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Some of the items, and their times."""
    return history[which], None if times is None else times[which]

"""Replicas that are averaged now and then: which rows have to be, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nestpipe.arena import Arena
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.rows import NONE


class Awaiting:
    """Keys of one table that any group has used since its replicas were averaged; the others are alike everywhere.

    Steps are counted from 0; replicas are averaged at the end of every `every`-th. Keys are kept by step, because a batch that
    was routed and not trained on comes again.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._of_step: dict[int, np.ndarray] = {}
        self._since = 0

    def begin(self, first: int) -> None:
        """The next batch is `first`, whatever was routed before."""
        self._of_step = {step: keys for step, keys in self._of_step.items() if self._since <= step < first}

    def add(self, step: int, keys: np.ndarray) -> None:
        if self.every > 1:
            self._of_step[step] = keys.copy()
            self._of_step.pop(step - 2 * self.every, None)

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def before(self, step: int) -> np.ndarray:
        """Keys that wait while a batch of this step is under way, besides its own; some of them more than once."""
        first = max(self._since, step - step % self.every)
        return np.concatenate([NONE, *(keys for s, keys in self._of_step.items() if first <= s < step)])

    def settle(self, steps: int) -> None:
        """After so many steps none waits any more."""
        self._since = steps
        self.begin(steps)


def average(
    records: np.ndarray,
    peers: Sequence[int],
    transport: Transport,
    combine: Callable[[np.ndarray, np.ndarray], None],
    arena: Arena,
) -> None:
    """Replaces the records [n, words] of this worker by what the peers' make together: the same bits on all of them.

    Each peer combines an equal part of them: combine([M, rows, words], out [rows, words]), and sends it to all. So 2 (M - 1) / M
    of the records leave each worker, whatever the number of peers.
    """
    here, count, num_words = peers.index(transport.rank), len(peers), records.shape[1]
    bounds = [len(records) * i // count for i in range(count + 1)]
    sent, received = np.zeros(transport.world, np.int64), np.zeros(transport.world, np.int64)
    sent[list(peers)] = np.diff(bounds)
    received[list(peers)] = mine = bounds[here + 1] - bounds[here]
    theirs = arena.take("records of replicas", (count * mine, num_words), np.float32)
    transport.all_to_all(records, sent, theirs, received)
    combine(theirs.reshape(count, mine, num_words), records[bounds[here] : bounds[here + 1]])
    transport.spread([records[a:z] for a, z in zip(bounds[:-1], bounds[1:], strict=True)], peers)

"""A stream for tests. (In a file of its own: reader processes import it, and nothing else that takes long.)"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from nestpipe import Batch, Jagged


class Events:
    """A stream of events that never ends, and of which nothing can be read twice."""

    given = 0  # batches, by all streams of this process

    def __init__(self, rank: int, batch_size: int = 4) -> None:
        self._rank, self._batch_size, self._at = rank, batch_size, 0

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> Batch:
        Events.given += 1
        draw = np.random.default_rng([self._rank, self._at])
        self._at += 1
        users, items = (draw.integers(0, 30, (self._batch_size, 2)).tolist() for _ in range(2))
        dense = {"dense": torch.from_numpy(draw.random((self._batch_size, 2), np.float32))}
        labels = torch.from_numpy(draw.integers(0, 2, self._batch_size).astype(np.float32))
        return Batch({"user": Jagged.from_lists(users), "item": Jagged.from_lists(items)}, dense, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "rank": self._rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self._rank, "one worker's state is another's"
        self._at = state["at"]


class EventData:
    features = ("user", "item")

    def batches(self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0) -> Any:
        return Events(rank, batch_size) if split == "train" else list(itertools.islice(Events(99, batch_size), 2))

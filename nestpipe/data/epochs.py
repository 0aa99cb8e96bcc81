"""The training batches of one worker through all epochs, from where it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from nestpipe.batch import Batch
from nestpipe.data.dataset import skip
from nestpipe.data.epoch import training_batches
from nestpipe.source_state import has_state


class Epochs(Iterator[Batch]):
    """Epoch after epoch, `count` of them or without end; it ends too when one has no batch for this rank.

    passed: batches that were trained on before, and are passed over.
    state: instead, what `state_dict` said behind the last of them.
    how: the arguments of `training_batches`, but the epoch.
    """

    def __init__(self, data: Any, *, count: int | None, passed: int = 0, state: Any = None, **how: Any) -> None:
        self._data, self._how = data, how
        self._numbers = iter(itertools.count() if count is None else range(count))
        self._passed = passed
        self._state = state
        self._epoch = -1
        self._source: Any = None  # what the data gives for the epoch under way: a list, an iterator, a loader
        self._batches: Iterator[Batch] | None = None  # of it
        self._empty = False  # whether the epoch has given nothing yet

    def __next__(self) -> Batch:
        while True:
            if self._batches is None:
                self._batches = self._begin()
            for batch in self._batches:
                self._empty = False
                return batch
            if self._empty:
                raise StopIteration  # this rank's share is empty; it takes part without data
            self._batches = None

    def state_dict(self) -> Any:
        """Where the epoch under way stands; None if the data does not say it."""
        return {"epoch": self._epoch, "source": self._source.state_dict()} if has_state(self._source) else None

    def _begin(self) -> Iterator[Batch]:
        self._epoch = next(self._numbers)
        while self._state is not None and self._epoch < self._state["epoch"]:
            self._epoch = next(self._numbers)
        self._source = training_batches(self._data, epoch=self._epoch, **self._how)
        self._empty = True
        if self._state is not None:
            if not has_state(self._source):
                raise ValueError(
                    f"the checkpoint has a state of the data, and {type(self._data).__name__}.batches gives a "
                    f"{type(self._source).__name__} without load_state_dict(); give it the method, or start a new run"
                )
            self._source.load_state_dict(self._state["source"])
            self._state, self._passed, self._empty = None, 0, False
        batches = iter(self._source)
        skipped = skip(batches, self._passed)
        self._passed -= skipped
        self._empty = self._empty and skipped == 0
        return batches


class Headed(Iterator[Batch]):
    """The first batch, which was read before, and those behind it."""

    def __init__(self, head: Batch | None, batches: Iterator[Batch]) -> None:
        self._head, self._batches = head, batches

    def __next__(self) -> Batch:
        head, self._head = self._head, None
        return next(self._batches) if head is None else head

    def state_dict(self) -> Any:
        """The batches have given the first one, and none behind it that has not been given here."""
        return self._batches.state_dict() if hasattr(self._batches, "state_dict") else None

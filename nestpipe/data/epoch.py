"""Epoch: samples that every rank can read by index. They are cut into batches by samples or by tokens, and dealt to ranks so that
all have as much to compute, without one travelling.

Shape legend: S samples of a global batch, W ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from nestpipe.batch import Batch
from nestpipe.data.dataset import Indexed, num_global_batches, rank_slice
from nestpipe.kernels.dealing import costs_of, deal
from nestpipe.source_state import has_state

PIECE = 256  # samples that a stream is asked for at a time when batches are made by tokens


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The samples of one epoch in its order, any of which can be made alone.

    tokens: the feature whose keys are the tokens.
    lengths: how many tokens the samples at these places have, without making them.
    make: a batch of the samples at these places.
    """

    size: int
    tokens: str
    lengths: Callable[[np.ndarray], np.ndarray]
    make: Callable[[np.ndarray], Batch]


class Cut:
    """An epoch cut into global batches, and these into one batch for each rank.

    batch_size: samples of a rank. batch_tokens: instead, tokens of a rank: it takes samples until the next would make them more,
        and one sample of more is a batch alone.
    squares: samples are dealt to ranks by their tokens and so much for the square of these (see Trainer's `balance`); None:
        every rank has the samples that come next.
    """

    def __init__(
        self,
        epoch: Epoch,
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        world: int,
        squares: float | None,
    ) -> None:
        self._epoch, self._batch_size, self.world, self.squares = epoch, batch_size, world, squares
        self._bounds = None
        if batch_tokens is not None:
            self._bounds = token_bounds(epoch.lengths(np.arange(epoch.size)), batch_tokens)
            self.count = -(-(len(self._bounds) - 1) // world)
        else:
            assert batch_size is not None
            self.count = num_global_batches(epoch.size, batch_size=batch_size, world=world)

    def batches(self, rank: int) -> Indexed:
        return Indexed(self.count, lambda index: self._epoch.make(self.places(index, rank)))

    def places(self, index: int, rank: int) -> np.ndarray:
        """The samples of one rank in global batch `index`, in the order of the epoch."""
        bounds = self._homes(index)
        if self.squares is None:
            return np.arange(bounds[rank], bounds[rank + 1])
        _, worker_S = self._dealt(bounds)
        return bounds[0] + np.flatnonzero(worker_S == rank)

    def costs(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """What each rank has to compute in global batch `index`, [W]: as samples come, and as they are dealt."""
        bounds = self._homes(index)
        cost_S, worker_S = self._dealt(bounds)
        home_S = np.repeat(np.arange(self.world), np.diff(bounds))
        return np.bincount(home_S, cost_S, self.world), np.bincount(worker_S, cost_S, self.world)

    def _dealt(self, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.squares is not None
        cost_S = costs_of(self._epoch.lengths(np.arange(bounds[0], bounds[-1])), self.squares)
        return cost_S, deal(cost_S, np.repeat(np.arange(self.world), np.diff(bounds)), self.world)

    def _homes(self, index: int) -> np.ndarray:
        """Where the samples of each rank begin, [W + 1], if they are not dealt; of a last batch that is not full, as equal parts
        as can be."""
        if self._bounds is not None:
            bounds = self._bounds[index * self.world : (index + 1) * self.world + 1]
            if len(bounds) == self.world + 1:
                return bounds
            begin, end = bounds[0], bounds[-1]
        else:
            assert self._batch_size is not None
            begin = index * self._batch_size * self.world
            end = min(begin + self._batch_size * self.world, self._epoch.size)
        slices = [rank_slice(begin, end, rank=rank, world=self.world) for rank in range(self.world)]
        return np.array([begin, *(last for _, last in slices)], np.int64)


def token_bounds(lengths: np.ndarray, batch_tokens: int) -> np.ndarray:
    """Where batches begin, and the end: each as long as it has no more tokens than that, or one sample."""
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        begin = bounds[-1]
        before = ends[begin - 1] if begin else 0
        bounds.append(max(begin + 1, int(np.searchsorted(ends, before + batch_tokens, side="right"))))
    return np.array(bounds, np.int64)


def by_tokens(batches: Iterable[Batch], batch_tokens: int, *, tokens: str) -> Iterator[Batch]:
    """The samples of a stream in batches of about as many tokens: each takes samples until the next would make it more than
    `batch_tokens`; one sample of more is a batch alone. The last one may be smaller.

    tokens: the feature whose keys are counted.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
    held: list[Batch] = []
    for batch in batches:
        held = [Batch.joined([*held, batch])]
        bounds = token_bounds(held[0].keys[tokens].lengths.numpy(), batch_tokens).tolist()
        for first, last in itertools.pairwise(bounds[:-1]):  # the last one may take more
            yield held[0].slice(first, last)
        held = [held[0].slice(bounds[-2], bounds[-1])] if len(bounds) > 1 else []
    yield from held


def epoch_of(data: Any, split: str, *, seed: int, epoch: int) -> Epoch | None:
    """None if it cannot be read by index."""
    return data.epoch(split, seed=seed, epoch=epoch) if hasattr(data, "epoch") else None


def training_batches(
    data: Any,
    *,
    batch_size: int | None,
    batch_tokens: int | None,
    tokens: str | None,
    squares: float | None,
    rank: int,
    world: int,
    seed: int,
    epoch: int = 0,
) -> Any:
    """The batches of one rank for one epoch of training, by samples or by tokens, dealt where the data can be read by index.

    An iterator; or what the data gives itself, if it has a state: to be restored before it is gone through.

    tokens: the feature whose keys are counted in data that cannot be.
    """
    how = {"rank": rank, "world": world, "seed": seed, "epoch": epoch}
    if batch_tokens is None and squares is None:
        batches = data.batches("train", batch_size=batch_size, **how)
        return batches if has_state(batches) else iter(batches)  # a data set of one's own may give a list
    by_index = epoch_of(data, "train", seed=seed, epoch=epoch)
    if by_index is not None and tokens in (None, by_index.tokens):
        return Cut(by_index, batch_size=batch_size, batch_tokens=batch_tokens, world=world, squares=squares).batches(
            rank
        )
    assert batch_tokens is not None and tokens is not None and squares is None
    batches = data.batches("train", batch_size=PIECE, **how)
    if has_state(batches):
        raise ValueError(
            f"config: train.batch_tokens cuts the batches of {type(data).__name__} anew, and where it stands then no state of it "
            f"says: set train.batch_size, and cut batches by tokens in the data"
        )
    return by_tokens(batches, batch_tokens, tokens=tokens)

"""Dataset: what the trainer asks of data, and how a global batch is cut over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged

SPLITS = ("train", "valid", "test")


class Dataset(Protocol):
    """A source of batches. A config names a class of the user's own by `data.kind = "my_module:MyData"`.

    features: the names in `batch.keys`.
    batches: the batches of one rank for one epoch. `batch_size` is per worker. Training samples are shuffled by (seed,
        epoch); "valid" and "test" come in a fixed order and are the same at every epoch, so that metrics can be
        compared.

    Sequence datasets also have `candidates() -> Tensor`, the sorted keys of the whole catalogue, and give at "valid"
    and "test" `labels`: [B] int64, the key of the target item. Where the history that they give is cut, `dense["seen"]` has
    all keys before the target there.

    Data for rankers, which score a list of candidates for each sample, says `has_lists = True`: `keys["candidates"]` are the
    lists, `labels` a Jagged with a number from 0 to 1 for each candidate, at every split.

    What `batches` returns may have `skip(count) -> int`, which passes over the first batches without making them and returns
    how many there were: a run that is resumed asks for it, and takes them one by one where there is none.

    What `batches` returns may never end; then `train.steps` says when training does, or a signal. If it cannot be read again from
    its beginning (a stream of events), it has `state_dict()`, which says where it stands after the batch that it gave last, and
    `load_state_dict(state)`, which goes on from there: checkpoints hold the state, and a resumed run gives it back instead of
    passing over batches. A state is made of numbers, strings, bytes, lists, dicts, arrays and tensors.

    A data set of which every rank can make any sample by itself may have `epoch(split, seed=, epoch=) -> Epoch`: then batches are
    cut by tokens, and dealt to ranks, without a sample travelling (data/epoch.py).

    A data set that parses files while it is read says so (`parses = True`); it is then read in a process of its own unless
    the config says otherwise, because parsing holds the GIL.
    """

    @property
    def features(self) -> tuple[str, ...]: ...  # to be read: an attribute of the class will do

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]: ...


class Indexed:
    """Batches that can be made in any order: make(0), make(1), ... make(count - 1)."""

    def __init__(self, count: int, make: Callable[[int], Batch]) -> None:
        self._next, self._count, self._make = 0, count, make

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next == self._count:
            raise StopIteration
        self._next += 1
        return self._make(self._next - 1)

    def skip(self, count: int) -> int:
        passed = min(count, self._count - self._next)
        self._next += passed
        return passed


def skip(batches: Iterator[Batch], count: int) -> int:
    """Passes over `count` batches, or all if there are fewer; returns how many."""
    if hasattr(batches, "skip"):
        return batches.skip(count)
    return sum(1 for _ in itertools.islice(batches, count))


def check_request(*, split: str, batch_size: int, rank: int, world: int, seed: int, epoch: int) -> None:
    """Raises ValueError for arguments of `batches` that cannot be met. Called before the first batch is asked for."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(SPLITS)}")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank} of world {world}; it must be between 0 and world - 1")
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed is {seed} and epoch {epoch}; neither may be negative")


def check_at_least(**limits: tuple[float, float]) -> None:
    """`check_at_least(num_items=(num_items, 1))` raises ValueError when the option is below its limit."""
    for name, (value, least) in limits.items():
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def num_global_batches(num_samples: int, *, batch_size: int, world: int) -> int:
    return -(-num_samples // (batch_size * world))


def global_slice(index: int, num_samples: int, *, batch_size: int, world: int) -> tuple[int, int]:
    """The samples of global batch `index`: all ranks together."""
    begin = index * batch_size * world
    return begin, min(begin + batch_size * world, num_samples)


def rank_slice(begin: int, end: int, *, rank: int, world: int) -> tuple[int, int]:
    """The part of one rank: equal parts of a full global batch; of a partial one as equal as can be, perhaps empty."""
    size = end - begin
    return begin + size * rank // world, begin + size * (rank + 1) // world


def generator(*numbers: int) -> np.random.Generator:
    """A generator that depends on the numbers alone (seed, epoch, purpose, ...)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(numbers))))


def jagged(values: np.ndarray, offsets: np.ndarray) -> Jagged:
    return Jagged(torch.from_numpy(values), torch.from_numpy(offsets))


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def sorted_keys(keys: np.ndarray) -> Tensor:
    return torch.from_numpy(np.sort(keys))

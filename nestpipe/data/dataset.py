"""Dataset: what the trainer asks of data, and how a global batch is cut over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged

SPLITS = ("train", "valid", "test")


class Dataset(Protocol):
    """A source of batches.

    features: the names in `batch.keys`.
    batches: the batches of one rank for one epoch. `batch_size` is per worker. Training samples are shuffled by (seed,
        epoch); "valid" and "test" come in a fixed order and are the same at every epoch, so that metrics can be
        compared.

    Sequence datasets also have `candidates() -> Tensor`, the sorted keys of the whole catalogue, and give at "valid"
    and "test" `labels`: [B] int64, the key of the target item.

    A data set that parses files while it is read says so (`parses = True`); it is then read in a process of its own unless
    the config says otherwise, because parsing holds the GIL.
    """

    features: tuple[str, ...]

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]: ...


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


def fixed_jagged(values: np.ndarray) -> Jagged:
    """[B, n] -> B lists of n values each."""
    count, width = values.shape
    return jagged(values.reshape(-1), np.arange(count + 1, dtype=np.int64) * width)


def sorted_keys(keys: np.ndarray) -> Tensor:
    return torch.from_numpy(np.sort(keys))

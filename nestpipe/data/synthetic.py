"""Synthetic: what the data sets share whose samples are drawn, not read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data import dataset


class Synthetic:
    """Any batch of an epoch can be made alone. Classes say how samples are drawn, in `_draw` and `_draw_overlapping`.

    seed: of the hidden law. overlap: of neighbouring training batches; None: left to chance.
    num_samples: of an epoch of each split.
    """

    def __init__(self, *, seed: int, overlap: float | None, num_samples: tuple[int, int, int]) -> None:
        if overlap is not None and not 0 <= overlap <= 1:
            raise ValueError(f"overlap is {overlap}; it must be between 0 and 1")
        self.seed, self.overlap = seed, overlap
        self._num_samples = dict(zip(dataset.SPLITS, num_samples, strict=True))

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        dataset.check_request(split=split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch)
        num_batches = dataset.num_global_batches(self._num_samples[split], batch_size=batch_size, world=world)
        how = {"batch_size": batch_size, "rank": rank, "world": world, "seed": seed, "epoch": epoch}
        return dataset.Indexed(num_batches, lambda index: self.batch(split, index, **how))

    def batch(
        self, split: str, index: int, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Batch:
        """Batch `index` of an epoch, without those before it."""
        train, where = split == "train", self._where(split, seed, epoch)
        begin, end = dataset.global_slice(index, self._num_samples[split], batch_size=batch_size, world=world)
        first, last = dataset.rank_slice(begin, end, rank=rank, world=world)
        if train and self.overlap is not None:  # which is that of all ranks together
            whole = self._draw_overlapping(where, np.arange(begin, end), index, full_size=batch_size * world)
            return whole.select(torch.arange(first - begin, last - begin))
        return self._draw(where, np.arange(first, last), train=train)

    def _where(self, split: str, seed: int, epoch: int) -> tuple[int, ...]:
        """The numbers that the streams of an epoch begin with: evaluation sees the same samples whatever those of training."""
        return (self.seed, dataset.SPLITS.index(split), *((seed, epoch) if split == "train" else (0, 0)))

    def _draw(self, where: tuple[int, ...], samples: np.ndarray, *, train: bool) -> Batch:
        """These samples; where: the numbers that their streams begin with."""
        raise NotImplementedError

    def _draw_overlapping(self, where: tuple[int, ...], samples: np.ndarray, index: int, *, full_size: int) -> Batch:
        """These samples, all of batch `index`, which overlaps with its neighbours. full_size: of a batch that is not the last."""
        raise NotImplementedError

"""The batches that a run trains on: of every epoch, from any place on, in whichever process they are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nestpipe.batch import Batch
from nestpipe.config import Built, Config, TrainSection, dataset_class
from nestpipe.data import Dataset
from nestpipe.data.epoch import Cut, epoch_of
from nestpipe.data.epochs import Epochs
from nestpipe.exchange.samples import token_feature


def dealt_by_index(config: Config, built: Built) -> float | None:
    """What the square of a token costs where the data itself deals samples to ranks, because each of them can read it by index;
    None where it does not: samples stay, or travel (DEAL)."""
    if config.setting.squares is None:
        return None
    by_index = epoch_of(built.data, "train", seed=config.train.seed, epoch=0)
    known = by_index is not None and by_index.tokens == token_feature(built.features)
    return config.setting.squares if known else None


def reads_in_process(config: Config) -> bool:
    parses = getattr(dataset_class(config.data), "parses", False)
    return {"auto": parses, "thread": False, "process": True}[config.train.reader]


def epochs_of(
    data: Dataset,
    settings: TrainSection,
    rank: int,
    world: int,
    passed: int,
    tokens: str | None = None,
    squares: float | None = None,
    state: Any = None,
) -> Iterator[Batch]:
    """The batches of this worker, without the first `passed`, which it was trained on before; `state` says where they end, if the
    data does.

    tokens: the feature whose keys they are. squares: what the square of one costs, where the data deals samples to ranks.
    """
    return Epochs(
        data,
        count=settings.epochs or (1 if settings.steps is None else None),
        passed=passed,
        state=state,
        batch_size=settings.batch_size,
        batch_tokens=settings.batch_tokens,
        tokens=tokens,
        squares=squares,
        rank=rank,
        world=world,
        seed=settings.seed,
    )


def predicted_waiting(
    data: Dataset, settings: TrainSection, world: int, squares: float | None, steps: range
) -> dict[str, float]:
    """Of these steps, the newest thousand: the share that workers would have waited for the slowest if the data had not dealt
    samples to them, and what is left of it; by what samples cost. Nothing where the data does not deal."""
    if squares is None or world == 1 or not steps:
        return {}
    newest, begin, costs = steps[-1000:], 0, np.zeros(3)
    for epoch in itertools.count():
        samples = epoch_of(data, "train", seed=settings.seed, epoch=epoch)
        assert samples is not None, "the data has dealt them"
        batches = Cut(
            samples,
            batch_size=settings.batch_size,
            batch_tokens=settings.batch_tokens,
            world=world,
            squares=squares,
        )
        for step in range(max(begin, newest.start), min(begin + batches.count, newest.stop)):
            undealt_W, dealt_W = batches.costs(step - begin)
            costs += undealt_W.max(), dealt_W.max(), dealt_W.mean()
        begin += batches.count
        if begin >= newest.stop:
            break
    undealt, dealt, mean = costs.tolist()
    return {"undealt": 1 - mean / undealt, "dealt": 1 - mean / dealt} if undealt else {}

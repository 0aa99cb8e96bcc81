"""Rows as they come from a file, in pieces of any size -> shuffled batches of one size. Memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from nestpipe.batch import Batch, Jagged


def batches_of(
    pieces: Iterable[Batch], *, batch_size: int, shuffle_buffer: int, generator: np.random.Generator
) -> Iterator[Batch]:
    """Batches of one size (the last may be smaller), mixed in a buffer of that many rows; 0 leaves the order."""
    if shuffle_buffer:
        pieces = shuffled(pieces, size=shuffle_buffer, generator=generator)
    return cut(pieces, size=batch_size)


def shuffled(pieces: Iterable[Batch], *, size: int, generator: np.random.Generator) -> Iterator[Batch]:
    """Whenever `size` rows are there, half of them, picked at random, go on.

    Halves rather than single rows, because taking rows out of columns costs a copy of all of them: so each row is
    copied about twice, however large the buffer. The rows that stay meet the next ones, so a row can travel further
    than the buffer.
    """
    held: list[Batch] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += piece.size
        if count >= size:
            pool, order = concatenate(held), torch.from_numpy(generator.permutation(count))
            yield pool.select(order[: (count + 1) // 2])
            held = [pool.select(order[(count + 1) // 2 :])]
            count = held[0].size
    if count:
        yield concatenate(held).select(torch.from_numpy(generator.permutation(count)))


def cut(pieces: Iterable[Batch], *, size: int) -> Iterator[Batch]:
    held: list[Batch] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += piece.size
        if count < size:
            continue
        pool = concatenate(held)
        end = count - count % size
        for begin in range(0, end, size):
            yield pool.slice(begin, begin + size)  # views: copies of 26 features cost 4 ms per 1,024 rows
        held = [pool.slice(end, count)]
        count -= end
    if count:
        yield concatenate(held)


def concatenate(batches: list[Batch]) -> Batch:
    """One batch with the samples of all, in order."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Batch(
        keys={name: _concatenate_jagged([batch.keys[name] for batch in batches]) for name in first.keys},
        dense={name: _concatenate_parts([batch.dense[name] for batch in batches]) for name in first.dense},
        labels=None if first.labels is None else torch.cat([_labels(batch) for batch in batches]),
    )


def _labels(batch: Batch) -> torch.Tensor:
    assert batch.labels is not None
    return batch.labels


def _concatenate_parts(parts: list[torch.Tensor | Jagged]) -> torch.Tensor | Jagged:
    if isinstance(parts[0], Jagged):
        return _concatenate_jagged([part for part in parts if isinstance(part, Jagged)])
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def _concatenate_jagged(parts: list[Jagged]) -> Jagged:
    return Jagged.from_lengths(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

"""Rows as they come from a file, in pieces of any size -> shuffled batches of one size. Memory stays bounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data import dataset
from nestpipe.data.files import SplitFiles


class Unparsed:
    """Rows of pieces of a file, in any order, that nobody has looked at yet. Made of one piece: its size, and what parses it.

    A piece is held as it is for as long as one of its rows is: if it has been read, that is with a shuffle buffer six times as
    much text as the buffer has rows of, until skipping is over.
    """

    def __init__(self, size: int, parse: Callable[[], Batch]) -> None:
        self._pieces = [parse]
        self._piece, self._row = np.zeros(size, np.int64), np.arange(size)

    @property
    def size(self) -> int:
        return len(self._row)

    def select(self, rows: torch.Tensor) -> Unparsed:
        return self._with(self._pieces, self._piece[rows.numpy()], self._row[rows.numpy()])

    def slice(self, first: int, last: int) -> Unparsed:
        return self._with(self._pieces, self._piece[first:last], self._row[first:last])

    def parse(self) -> Batch:
        if self.size == 0:
            return self._pieces[0]().slice(0, 0)
        if len(self._pieces) == 1 and np.array_equal(self._row, np.arange(self.size)):
            batch = self._pieces[0]()  # as it was read, which is how nearly all are parsed: no copy
            return batch if batch.size == self.size else batch.slice(0, self.size)
        used, first = np.unique(self._piece, return_inverse=True)
        parts = [self._pieces[k]().select(torch.from_numpy(self._row[self._piece == k])) for k in used]
        order = np.empty(self.size, np.int64)
        # Parts are by piece, rows of a piece as they were.
        order[np.argsort(first, kind="stable")] = np.arange(self.size)
        return Batch.joined(parts).select(torch.from_numpy(order))

    @classmethod
    def joined(cls, many: Sequence[Unparsed]) -> Unparsed:
        starts = np.cumsum([0, *(len(rows._pieces) for rows in many)])
        piece = np.concatenate([rows._piece + start for rows, start in zip(many, starts[:-1], strict=True)])
        pieces = [piece for rows in many for piece in rows._pieces]
        used, piece = np.unique(piece, return_inverse=True)  # the text of others is not kept
        return cls._with([pieces[k] for k in used] or pieces[:1], piece, np.concatenate([rows._row for rows in many]))

    @classmethod
    def _with(cls, pieces: list[Callable[[], Batch]], piece: np.ndarray, row: np.ndarray) -> Unparsed:
        made = cls.__new__(cls)
        made._pieces, made._piece, made._row = pieces, piece, row
        return made


class Stream:
    """Batches of one size (the last may be smaller), mixed in a buffer of that many rows; 0 leaves the order."""

    def __init__(
        self,
        pieces: Iterable[Batch | Unparsed],
        *,
        batch_size: int,
        shuffle_buffer: int,
        generator: np.random.Generator,
    ) -> None:
        self._skipping = False
        if shuffle_buffer:
            pieces = self._shuffled(pieces, shuffle_buffer, generator)
        self._batches = self._cut(pieces, batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return _parsed(next(self._batches))

    def skip(self, count: int) -> int:
        """Passes over the first `count` batches, or all if there are fewer; returns how many. Their rows are not parsed."""
        self._skipping = True
        try:
            return sum(1 for _ in itertools.islice(self._batches, count))
        finally:
            self._skipping = False

    def _taken(self, rows: Batch | Unparsed) -> Batch | Unparsed:
        return rows if self._skipping else _parsed(rows)

    def _together(self, held: list[Batch | Unparsed]) -> Batch | Unparsed:
        unparsed = [rows for rows in held if isinstance(rows, Unparsed)]
        if self._skipping and len(unparsed) == len(held):
            return Unparsed.joined(unparsed)
        return Batch.joined([_parsed(rows) for rows in held])

    def _shuffled(
        self, pieces: Iterable[Batch | Unparsed], size: int, generator: np.random.Generator
    ) -> Iterator[Batch | Unparsed]:
        """Whenever `size` rows are there, half of them, picked at random, go on.

        Halves rather than single rows, because taking rows out of columns costs a copy of all of them: so each row is
        copied about twice, however large the buffer. The rows that stay meet the next ones, so a row can travel further
        than the buffer.
        """
        held: list[Batch | Unparsed] = []
        count = 0
        for piece in pieces:
            held.append(self._taken(piece))
            count += piece.size
            if count >= size:
                pool, order = self._together(held), torch.from_numpy(generator.permutation(count))
                yield pool.select(order[: (count + 1) // 2])
                held = [pool.select(order[(count + 1) // 2 :])]
                count = held[0].size
        if count:
            yield self._together(held).select(torch.from_numpy(generator.permutation(count)))

    def _cut(self, pieces: Iterable[Batch | Unparsed], size: int) -> Iterator[Batch | Unparsed]:
        held: list[Batch | Unparsed] = []
        count = 0
        for piece in pieces:
            held.append(self._taken(piece))
            count += piece.size
            if count < size:
                continue
            pool = self._together(held)
            end = count - count % size
            begin = 0
            while begin < end:
                if not self._skipping and isinstance(pool, Unparsed):  # skipping is over: all that is left, at once
                    pool, begin, end, count = pool.slice(begin, count).parse(), 0, end - begin, count - begin
                yield pool.slice(begin, begin + size)  # views: copies of 26 features cost 4 ms per 1,024 rows
                begin += size
            held = [pool.slice(end, count)]
            count -= end
        if count:
            yield self._together(held)


class Streamed:
    """What the data sets share that read rows from files. Classes say how they are read, in `_pieces`.

    shuffle_buffer: how many training rows are held to be mixed.
    """

    parses = True
    _files: SplitFiles

    def __init__(self, *, shuffle_buffer: int) -> None:
        self._shuffle_buffer = shuffle_buffer

    def remember(self, file: Path) -> None:
        """Keeps in this file what is learned of the training files while they are read, so that a run that goes on reads nothing
        of what it passes over. One file for each worker."""
        self._files.remember(file)

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        dataset.check_request(split=split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch)
        return Stream(
            self._pieces(split, rank, world, seed, epoch),
            batch_size=batch_size,
            shuffle_buffer=self._shuffle_buffer if split == "train" else 0,
            generator=dataset.generator(seed, epoch, rank),
        )

    def _pieces(self, split: str, rank: int, world: int, seed: int, epoch: int) -> Iterator[Batch | Unparsed]:
        """The rows of one rank, in pieces of any size."""
        raise NotImplementedError


def _parsed(rows: Batch | Unparsed) -> Batch:
    return rows.parse() if isinstance(rows, Unparsed) else rows

"""Samples that go to other workers before they are computed on, so that all have as much to do.

Shape legend: S samples of a global batch, by worker that has read them and then as it has them; W workers.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged, labels_of
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.dealing import costs_of, deal
from nestpipe.tables import Feature

ALIGNED = 16  # bytes that every part of a message is a multiple of, so that numbers can be read where they lie


def token_feature(features: Sequence[Feature]) -> str | None:
    """The feature whose keys are the tokens of a sample: the first sequence that is declared, one that is streamed only if there
    is no other."""
    sequences = [feature for feature in features if feature.pooling is None]
    return next((feature.name for feature in sorted(sequences, key=lambda feature: feature.streamed)), None)


class Part(NamedTuple):
    """One tensor or Jagged of a batch: all that must be known of it to read it from a message."""

    place: str  # "keys", "dense", "labels", or "task" for labels of one of several
    name: str
    is_jagged: bool
    dtype: str
    shape: tuple[int, ...]  # of one entry
    weights: str | None  # their type

    def __str__(self) -> str:
        what = f"Jagged of {self.dtype}" if self.is_jagged else self.dtype
        return f"{self.place} {self.name!r}: {what} {list(self.shape)}" + (" with weights" if self.weights else "")


def parts_of(batch: Batch) -> tuple[Part, ...]:
    parts = [
        *(("keys", name, part) for name, part in batch.keys.items()),
        *(("dense", name, part) for name, part in batch.dense.items()),
        *(("task", name, part) if name else ("labels", "labels", part) for name, part in labels_of(batch).items()),
    ]
    return tuple(Part(place, name, *_kind(part)) for place, name, part in parts)


def _kind(part: Jagged | Tensor) -> tuple[bool, str, tuple[int, ...], str | None]:
    values, weights = (part.values, part.weights) if isinstance(part, Jagged) else (part, None)
    named = str(values.dtype).removeprefix("torch."), tuple(values.shape[1:])
    return isinstance(part, Jagged), *named, None if weights is None else str(weights.dtype).removeprefix("torch.")


def pack(batch: Batch) -> np.ndarray:
    """All of a batch as bytes, in the order of its parts."""
    pieces: list[np.ndarray] = []
    for part in (*batch.keys.values(), *batch.dense.values(), *labels_of(batch).values()):
        tensors = [part] if isinstance(part, Tensor) else [part.lengths, part.values]
        tensors += [part.weights] if isinstance(part, Jagged) and part.weights is not None else []
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            pieces += [raw, np.zeros(-len(raw) % ALIGNED, np.uint8)]
    return np.concatenate([np.empty(0, np.uint8), *pieces])


def unpack(message: np.ndarray, parts: Sequence[Part], size: int) -> Batch:
    """What `pack` made of a batch of that many samples; of none, an empty one with the same parts."""
    batch, rest = Batch({}), torch.from_numpy(message)

    def take(count: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        nonlocal rest
        kind: torch.dtype = getattr(torch, dtype)
        num_bytes = count * int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if not num_bytes:
            return torch.empty(count, *shape, dtype=kind)
        values, rest = rest[:num_bytes].view(kind), rest[num_bytes + -num_bytes % ALIGNED :]
        return values.view(count, *shape)

    for part in parts:
        held: Jagged | Tensor
        if part.is_jagged:
            lengths = take(size, "int64", ())
            total = int(lengths.sum())
            values = take(total, part.dtype, part.shape)
            weights = None if part.weights is None else take(total, part.weights, ())
            held = Jagged.from_lengths(values, lengths, weights)
        else:
            held = take(size, part.dtype, part.shape)
        if part.place == "labels":
            batch.labels = held
        elif part.place == "task":
            batch.labels = {**labels_of(batch), part.name: held}
        else:
            getattr(batch, part.place)[part.name] = held
    return batch


class Told(NamedTuple):
    """What each worker has said of its batch."""

    state_W: np.ndarray
    size_W: np.ndarray
    kind_W: np.ndarray  # a hash of its parts; 0 if it has no samples


@dataclasses.dataclass(frozen=True)
class Dealt:
    """This worker's part of a global batch: by worker that has read them, then as they came.

    home, order: which sample of whose batch each is.
    before, after: what this worker's part costs, as it was read and as it was dealt.
    """

    batch: Batch
    home: np.ndarray
    order: np.ndarray
    before: float
    after: float


class Dealer:
    """Deals batches over all workers; `meet` and then, unless they see a reason not to, `deal` are called by all of them alike.

    tokens: the feature whose keys count.
    """

    def __init__(self, transport: Transport, tokens: str) -> None:
        self.transport, self._tokens = transport, tokens
        self._kinds: dict[int, tuple[Part, ...]] = {}  # that workers have told each other of

    def meet(self, state: int, batch: Batch | None = None) -> Told:
        """Tells the others how this worker is, and what batch it has; returns what all have told."""
        size = 0 if batch is None else batch.size
        kind = zlib.crc32(repr(parts_of(batch)).encode()) + 1 if batch is not None and size else 0
        table = np.tile(np.array([state, size, kind], np.int64), (self.transport.world, 1))
        return Told(*self.transport.exchange_rows(table).T)

    def deal(self, batch: Batch, told: Told, squares: float) -> Dealt:
        """Raises ValueError on workers whose batches have other parts than those of the first that has any; nobody's samples
        travel then."""
        rank, world = self.transport.rank, self.transport.world
        kinds = self._learn(batch, told)
        if len(kinds) > 1:
            self._check(kinds[0], int(told.kind_W[rank]))
            return Dealt(batch, np.full(batch.size, rank), np.arange(batch.size), 0.0, 0.0)
        mine = batch.keys[self._tokens].lengths.numpy() if batch.size else np.empty(0, np.int64)
        tokens_S = self.transport.gather(mine, told.size_W)
        cost_S, home_S = costs_of(tokens_S, squares), np.repeat(np.arange(world), told.size_W)
        worker_S = deal(cost_S, home_S, world)
        before_W, after_W = np.bincount(home_S, cost_S, world), np.bincount(worker_S, cost_S, world)
        start_W = np.cumsum(told.size_W) - told.size_W
        here = np.flatnonzero(worker_S == rank)
        if (worker_S != home_S).any():
            batch = self._travel(batch, self._kinds[kinds[0]], worker_S, home_S)
        home = home_S[here]
        return Dealt(batch, home, here - start_W[home], float(before_W[rank]), float(after_W[rank]))

    def _learn(self, batch: Batch, told: Told) -> list[int]:
        """The kinds of batches that there are, by rank."""
        kinds = list(dict.fromkeys(told.kind_W[told.size_W > 0].tolist()))
        if any(kind not in self._kinds for kind in kinds):  # which all see alike
            everybody = self.transport.gather_objects(parts_of(batch))
            self._kinds |= {int(kind): everybody[rank] for rank, kind in enumerate(told.kind_W) if kind}
        return kinds

    def _check(self, first: int, own: int) -> None:
        if own in (0, first):
            return
        theirs, mine = self._kinds[first], self._kinds[own]
        odd = [str(part) for part in dict.fromkeys((*theirs, *mine)) if (part in theirs) != (part in mine)]
        raise ValueError(
            f"samples cannot go from worker to worker, because batches differ: "
            f"{'; '.join(odd) or 'their parts come in another order'}; make the batches of all workers alike, or set "
            f"balance='none'"
        )

    def _travel(self, batch: Batch, parts: Sequence[Part], worker_S: np.ndarray, home_S: np.ndarray) -> Batch:
        """The samples that this worker is to have, by home, then as they came. Those of its own that stay are not sent."""
        transport, rank, world = self.transport, self.transport.rank, self.transport.world
        worker = worker_S[home_S == rank]  # of this worker's own samples
        messages = [np.empty(0, np.uint8)] * world
        for w in np.unique(worker[worker != rank]).tolist():
            messages[w] = pack(batch.select(torch.from_numpy(np.flatnonzero(worker == w))))
        sent_W = np.array([len(message) for message in messages], np.int64)
        comes_W = transport.exchange_rows(sent_W[:, None].copy())[:, 0]
        received = transport.all_to_all(
            np.concatenate(messages), sent_W, np.empty(int(comes_W.sum()), np.uint8), comes_W
        )
        size_W = np.bincount(home_S[worker_S == rank], minlength=world)
        pieces = []
        for w, message in enumerate(np.split(received, np.cumsum(comes_W)[:-1])):
            if size_W[w] and w == rank:
                pieces.append(batch.select(torch.from_numpy(np.flatnonzero(worker == rank))))
            elif size_W[w]:
                pieces.append(unpack(message, parts, int(size_W[w])))
        return Batch.joined(pieces) if pieces else unpack(np.empty(0, np.uint8), parts, 0)

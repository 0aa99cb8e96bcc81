"""Meetings: sums over workers in the middle of a model's forward and backward, for batch norms; safe where one worker fails.

Layers deep inside a model cannot be operations of the schedule. Their sums are part of FWD and BWD instead, in a process group of
their own that only those two use ("statistics" in schedule/ops.py): they are on one lane, one after the other in the order of the
schedule, and a model is the same on every worker, so its sums have one order too.

That order is not taken on trust. Before every sum all workers say what they are about to do: add up so many numbers of which
layer in which direction; nothing more, because the pass is done; nothing at all, for want of samples; or leave, because something
has failed. So a worker without samples follows the others from sum to sum, with zeros; a failure ends the pass on all of them, at
the same sum; and workers whose models do different things hear of it. A pass ends when all have said so.

Running statistics change when the weights do (DENSE), on every worker alike, and not at all by a batch that is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import NotFinite
from nestpipe.exchange.transport import Transport
from nestpipe.models.batch_norm import FORWARD, SyncBatchNorm

ADDS, DONE, EMPTY, FAILED = range(4)  # what a worker says of itself
WAYS = ("forward", "backward")


class Left(Exception):
    """Another worker has failed: its cause is told at AGREE."""


class Meetings:
    """Of the SyncBatchNorms of one worker's model. is_open: a pass is under way, and others may expect this worker."""

    def __init__(self, transport: Transport, model: nn.Module) -> None:
        self.transport, self.is_open = transport, False
        self._refuses = ""  # where no batch norm may be, while that runs
        self._names = {m: name for name, m in model.named_modules() if isinstance(m, SyncBatchNorm)}
        self._layers = list(self._names)
        self._pending: list[tuple[SyncBatchNorm, Tensor]] = []
        for layer in self._layers:
            layer.meet_in(self)

    def close(self) -> None:
        for layer in self._layers:
            layer.meet_in(None)

    @contextlib.contextmanager
    def refusing(self, where: str) -> Iterator[None]:
        """While something runs that is no pass of all workers: there a batch norm would take the statistics of this worker's
        samples for those of all, and workers would drift apart."""
        if self.transport.world == 1:
            yield
            return
        self.is_open, self._refuses = True, where
        try:
            yield
        finally:
            self.is_open, self._refuses = False, ""

    def begin(self) -> None:
        self.is_open = True

    def total(self, module: SyncBatchNorm, way: int, mine: Tensor) -> Tensor:
        """Raises Left if another worker has failed, ValueError on all if one is elsewhere; NotFinite on this one alone, before it
        spoils the sums of all."""
        if self._refuses:
            raise ValueError(
                f"batch norm {self._names[module]!r} is in {self._refuses}, where it cannot meet those of other workers; put it "
                f"into embed, or use LayerNorm"
            )
        if not torch.isfinite(mine).all():
            what = "a value" if way == FORWARD else "a gradient"
            raise NotFinite(
                f"{what} that comes to batch norm {self._names[module]!r} is not finite; look at the samples of this batch and "
                f"at the learning rates, or set on_nonfinite='skip' to leave such batches out and count them"
            )
        told = self._meet(ADDS, self._layers.index(module), way, len(mine))
        assert told is not None
        return self._add(told, mine.cpu().numpy()).to(mine.device)

    def finish(self, *, failed: bool = False, empty: bool = False) -> None:
        """This worker's part of the pass is over, or has failed, or there is nothing for it to do: returns when that of all
        is. Raises as `total` does."""
        while self.is_open:
            told = self._meet(FAILED if failed else EMPTY if empty else DONE)
            if told is not None:
                self._add(told, np.zeros(told[3]))

    def learn(self, *, trains: bool) -> None:
        """The batch has been trained on, or left out."""
        for layer, total in self._pending if trains else ():
            layer.learn(total)
        self.forget()

    def forget(self) -> None:
        self._pending.clear()

    def _meet(self, state: int, layer: int = 0, way: int = 0, size: int = 0) -> np.ndarray | None:
        """What those that add up are about to add up; None: the pass is over."""
        mine = np.array([state, layer, way, size], np.int64)
        told = self.transport.exchange_rows(np.tile(mine, (self.transport.world, 1)))
        adding = told[told[:, 0] == ADDS]
        if (told[:, 0] == FAILED).any():
            self.is_open = False
            if state == FAILED:
                return None
            raise Left
        if not len(adding):
            self.is_open = False
            return None
        if (told[:, 0] == DONE).any() or (adding != adding[0]).any():
            self.is_open = False
            text = "; ".join(f"rank {rank}: {self._spelt(row)}" for rank, row in enumerate(told))
            raise ValueError(
                f"workers do not run the same batch norms in the same order ({text}); a model with SyncBatchNorm must do the "
                f"same on every worker, whatever its samples"
            )
        return adding[0]

    def _spelt(self, row: np.ndarray) -> str:
        state, layer, way, _ = row.tolist()
        if state != ADDS:
            return {DONE: "done", EMPTY: "no samples"}[state]
        return f"{self._names[self._layers[layer]] or 'the model'}, {WAYS[way]}"

    def _add(self, told: np.ndarray, mine: np.ndarray) -> Tensor:
        """By rank, so that all have the same bits."""
        everybody = self.transport.exchange_rows(np.tile(mine, (self.transport.world, 1)))
        total = np.zeros_like(mine)
        for numbers in everybody:
            total += numbers
        sums = torch.from_numpy(total)
        if told[2] == FORWARD:
            self._pending.append((self._layers[told[1]], sums))
        return sums


def batch_norms(model: nn.Module) -> list[str]:
    """The names of those that meet others."""
    return [name for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)]

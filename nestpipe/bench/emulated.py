"""An emulated accelerator: operations that take a set time and use no CPU. Whatever is measured with it is labelled so.

On a machine with a few cores, computing, communicating and looking up share the cores, so that overlapping them gains little
whatever the schedule. With accelerators they do not; here, after its real work, an operation sleeps until its time is
over. Operations, their order and their waiting for each other are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, Output
from nestpipe.schedule.ops import AVERAGE, BWD, EMB, FWD, GRAD, MERGE, Task
from nestpipe.trainer import Trainer

LABEL = "emulated accelerator"
FORWARD = 1 / 3  # of the compute; backward is the rest


class EmulatedModel(nn.Module):
    """Cheap, with real gradients; it counts its tokens, for `pad` to make them last.

    A sample's loss is 0.5 x the sum over its tokens of (row . weight)^2: nothing depends on the other samples.
    feature: a sequence of rows of size `dim`.
    """

    def __init__(self, *, dim: int, feature: str = "history") -> None:
        super().__init__()
        self.feature = feature
        self.tokens = self.squares = 0  # of the last forward: tokens, and the sum over samples of their square
        self.weight = nn.Parameter(torch.full((dim,), 0.01))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        values, offsets = rows[self.feature].values, rows[self.feature].offsets
        self.tokens, self.squares = len(values), int(offsets.diff().square().sum())
        score = values @ self.weight
        return Output(score.new_zeros(batch.size).index_add(0, samples_of(offsets), 0.5 * score * score))


def pad(
    trainer: Trainer,
    seconds: Mapping[str, float] | None = None,
    *,
    seconds_per_token: float = 0.0,
    seconds_per_square: float = 0.0,
    seconds_per_byte: float = 0.0,
    between_replicas: float = 0.0,
) -> None:
    """Makes operations of a trainer last.

    seconds: of the operations named, at least.
    seconds_per_token, seconds_per_square: of FWD and BWD together, at least, for each token of the micro-batch, and for the
        square of each sample's tokens; the model is an EmulatedModel.
    seconds_per_byte: of EMB and GRAD, for each byte that this worker sends in them, on top of the exchange itself: the
        time of an emulated link starts when the last worker has come to it.
    between_replicas: the same of MERGE and AVERAGE.
    """
    model = trainer.model
    lasts: dict[int, float] = {}  # of micro-batches between FWD and BWD

    def around(task: Task, work: Callable[[], None]) -> None:
        name, _, part = task.op
        begin, sent = time.perf_counter(), trainer.sent.rows
        work()
        if name in (EMB, GRAD):
            time.sleep((trainer.sent.rows - sent) * seconds_per_byte)
        elif name in (MERGE, AVERAGE):
            time.sleep((trainer.sent.rows - sent) * between_replicas)
        elif name == FWD and seconds_per_token:
            assert isinstance(model, EmulatedModel)
            lasts[part] = seconds_per_token * model.tokens + seconds_per_square * model.squares
            sleep_until(begin + FORWARD * lasts[part])
        elif name == BWD and seconds_per_token:
            sleep_until(begin + (1 - FORWARD) * lasts.pop(part))
        elif seconds is not None and name in seconds:
            sleep_until(begin + seconds[name])

    trainer.around = around


def sleep_until(deadline: float) -> None:
    """A time of `time.perf_counter`; one that has passed is no sleep."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)


def samples_of(offsets: Tensor) -> Tensor:
    """Which sample each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())

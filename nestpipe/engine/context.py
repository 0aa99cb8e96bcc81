"""Context: all that belongs to one batch in flight, and the numbers that workers agree on about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.engine.outputs import Checked
from nestpipe.engine.rates import StepRates
from nestpipe.engine.rowstream import RowStream
from nestpipe.engine.sharing import Shares
from nestpipe.exchange.owner import OwnerRoute
from nestpipe.exchange.replicas import ReplicaRoute
from nestpipe.exchange.source import SourceRoute
from nestpipe.exchange.window import Window
from nestpipe.kernels.rows import Rows
from nestpipe.sizes import NUM_TOTALS

# What AGREE sums over workers. BAD: losses and gradients that are not finite. TRAINABLE: losses that depend on something.
# TOKENS: keys of the first sequence feature. MARK, MARK_SQUARED: of a worker's learning rates, see engine/rates.py. REACH: of its
# dense gradients, see Reducer.
LOSS, WEIGHT, SAMPLES, BAD, TROUBLE, STOP, QUIT, TRAINABLE, TOKENS, MARK, MARK_SQUARED, REACH = range(NUM_TOTALS)


@dataclasses.dataclass
class StepResult:
    """What one step did, the same on every worker but for `predicted`."""

    step: int  # counted from 1: as many steps as have been done with this one
    loss: float  # mean over the global batch
    samples: int  # of all workers
    weight: float  # what the loss was divided by: samples, or tokens
    skipped: bool = False  # the batch had a loss that is not finite and was left out
    tokens: int = 0  # keys of the first sequence feature, of all workers
    losses: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # of several tasks: the mean of each over its own weights
    lr: float | None = None  # of the dense optimizer's first group, in this step; None: there is none
    # of the dense gradient, before it was clipped; None: without clip_norm, or if skipped
    grad_norm: float | None = None
    # (predictions, labels) of this worker's micro-batches, as they came out of forward, before the update: if a callback
    # `wants_predictions`, and the model gives one number for each sample or candidate. By task where there are several.
    predicted: Sequence[tuple[Any, Any]] = ()


@dataclasses.dataclass
class Context:
    """All that belongs to one batch in flight; it dies with the batch. Buffers are by dim."""

    step: int
    batch: Batch
    window: Window
    arena: Arena
    order: np.ndarray | None = None  # which samples of the batch as it came these are, if they have been moved
    home: np.ndarray | None = None  # whose batch that is, if samples have been dealt over workers
    undealt: float = 0.0  # what this worker's samples would have cost if they had not been
    dealt: float = 0.0  # what they cost
    seconds: float = 0.0  # that the model has taken, forward and backward
    error: BaseException | None = None
    has_data: bool = True  # False: this worker takes part with nothing
    stops: bool = False  # a worker (after ROUTE: any) was asked to stop while it waited for this batch
    ends: bool = False  # agreed in ROUTE: nobody trains on it, because a worker stops or no worker has data any more
    inputs: list[Batch] = dataclasses.field(default_factory=list)  # micro-batches, on the device
    source: SourceRoute = None  # type: ignore[assignment]
    owner: OwnerRoute = None  # type: ignore[assignment]
    replicas: list[ReplicaRoute] = dataclasses.field(default_factory=list)  # one for each set of peers
    revisited: dict[int, np.ndarray] = dataclasses.field(
        default_factory=dict
    )  # by table: keys of steps before, to be averaged
    rows: list[Rows] = dataclasses.field(default_factory=list)  # per table: where this owner's rows of the batch lie
    positions: list[np.ndarray] = dataclasses.field(default_factory=list)  # per table: which of these each key has
    in_tier: list[np.ndarray] = dataclasses.field(default_factory=list)  # per table: their positions in its store
    sent: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # vectors to the sources
    received: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # vectors from the owners
    grads: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # their gradients, to be sent back
    returned: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # gradients at the owner
    leaves: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # rows as the model reads them
    streams: dict[int, list[RowStream]] = dataclasses.field(default_factory=dict)  # of features that are streamed
    outputs: dict[int, Checked] = dataclasses.field(default_factory=dict)  # of micro-batches between FWD and BWD
    left: bool = False  # in the middle of the model's pass, because another worker has failed there
    shares: Shares = dataclasses.field(default_factory=Shares)  # of a loss over the samples of all workers
    predicted: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # see StepResult
    totals: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(NUM_TOTALS))
    of_tasks: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # the sums of losses and weights of each
    rates: StepRates = None  # type: ignore[assignment]  # learning rates, agreed on with the totals
    result: StepResult | None = None
    trains: bool = False  # agreed: there is something to learn, and nothing wrong with it
    cut_short: bool = False  # the operation at hand has failed half-way; all will hear of it

    def named(self, sample: int) -> str:
        """A sample of the batch as users know it: by its place in the batch that it came in."""
        number = sample if self.order is None else int(self.order[sample])
        return f"sample {number}" + (
            "" if self.home is None else f" of the batch that rank {self.home[sample]} has read"
        )

    @property
    def asked_to_stop(self) -> bool:
        """After AGREE: whether one of the workers has been asked to."""
        return bool(self.totals[STOP])

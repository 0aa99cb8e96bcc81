"""The operations of a training step, one method each, on the context of one batch.

The serial schedule runs them in the order they stand here. Only `route` and `agree` decide anything together with the
other workers; a worker whose batch is bad says so there, so that all leave at once instead of waiting for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged, Output
from nestpipe.engine.dense import Dense
from nestpipe.errors import TrainingError, describe
from nestpipe.exchange.owner import OwnerRoute
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.source import SourceRoute, payload_layout
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import Deduplicator
from nestpipe.kernels.rows import NONE, Rows, gather, pool, pool_add, pool_put, rows_of, scatter_add
from nestpipe.store.memory import MemoryStore

OUT_OF_DATA, HAS_DATA, FAILED = 0, 1, 2


@dataclasses.dataclass
class StepResult:
    """What one step did, the same on every worker."""

    step: int
    loss: float  # mean over the global batch
    samples: int  # of all workers
    weight: float  # what the loss was divided by: samples, or tokens
    skipped: bool = False  # the batch had a loss that is not finite and was left out


@dataclasses.dataclass
class Context:
    """All that belongs to one batch in flight; it dies with the batch. Buffers are by dim."""

    step: int
    batch: Batch
    bounds: list[int]  # micro-batch m is samples bounds[m] to bounds[m + 1]
    arena: Arena
    error: BaseException | None = None
    source: SourceRoute = None  # type: ignore[assignment]
    owner: OwnerRoute = None  # type: ignore[assignment]
    rows: list[Rows] = dataclasses.field(default_factory=list)  # per table: where this owner's rows of the batch lie
    positions: list[np.ndarray] = dataclasses.field(default_factory=list)  # per table: the record of each distinct key
    received: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # vectors from the owners
    grads: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # their gradients, same layout
    returned: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # gradients at the owner
    leaves: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # what the model reads now
    output: Output | None = None
    summed: Callable[[], object] = lambda: None  # waits for the sum of totals over workers
    totals: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(5))  # loss, weight, samples, bad, failed


class StepOperations:
    """Everything a step works on: stores, exchange and dense part of one worker."""

    def __init__(
        self,
        plan: ExchangePlan,
        stores: Sequence[MemoryStore],
        transport: Transport,
        dense: Dense,
        *,
        skip_nonfinite: bool,
    ) -> None:
        self.plan, self.stores, self.transport, self.dense = plan, list(stores), transport, dense
        self._skip_nonfinite = skip_nonfinite
        self._source_dedup, self._owner_dedup = Deduplicator(), Deduplicator()

    # -- rows to the model -------------------------------------------------------------------------------------------

    def route(self, ctx: Context, *, has_data: bool) -> bool:
        """Deduplicates keys, buckets them by owner, exchanges them. False if no worker has data any more."""
        transport = self.transport
        if ctx.error is not None:
            ctx.batch, ctx.bounds = Batch.empty([f.name for f in self.plan.features]), [0, 0]
        try:
            ctx.source = SourceRoute(ctx.batch, self.plan, transport, self._source_dedup, ctx.arena)
        except Exception as error:  # what the checks of a batch did not foresee
            ctx.error, ctx.batch, ctx.bounds = error, Batch.empty([f.name for f in self.plan.features]), [0, 0]
            ctx.source = SourceRoute(ctx.batch, self.plan, transport, self._source_dedup, ctx.arena)
        ctx.source.sizes[:, 0] = FAILED if ctx.error is not None else HAS_DATA if has_data else OUT_OF_DATA
        sizes = transport.exchange_rows(ctx.source.sizes)
        if (sizes[:, 0] == FAILED).any():
            self._leave_together(ctx)
        if not (sizes[:, 0] == HAS_DATA).any():
            return False
        _, counts = payload_layout(sizes, self.plan)
        received = ctx.arena.take("payload in", int(counts.sum()), np.int32)
        payload = transport.all_to_all(ctx.source.payload, ctx.source.payload_counts, received, counts)
        ctx.owner = OwnerRoute(sizes, payload, self.plan, self._owner_dedup, ctx.arena)
        return True

    def retrieve(self, ctx: Context) -> None:
        """Finds the rows asked of this owner; those of new keys are born."""
        ctx.rows, ctx.positions = [], []
        for k, (store, owned) in enumerate(zip(self.stores, ctx.owner.tables, strict=True)):
            try:
                positions = store.resolve(owned.keys_V, ctx.step)
            except ValueError as error:
                # Over the row budget: all leave at the next agreement; until then a row of zeros will do.
                ctx.error = ctx.error or error
                zeros = ctx.arena.take(f"read {k}", (1, store.table.dim), np.float32)
                zeros[:] = 0
                ctx.rows.append(rows_of(zeros))
                ctx.positions.append(np.zeros(len(owned.keys_V), np.int64))
                continue
            if store.shares_rows:
                distinct, places = np.empty_like(positions), np.empty(len(positions), np.int32)
                distinct = distinct[: self._owner_dedup(positions, distinct, places)]
                owned.merge(places)
                positions = distinct
            ctx.rows.append(store.rows)
            ctx.positions.append(positions)

    def read(self, ctx: Context) -> None:
        """Like retrieve, for evaluation: nothing is born or counted; keys without a row get their first values."""
        ctx.rows, ctx.positions = [], []
        for k, (store, owned) in enumerate(zip(self.stores, ctx.owner.tables, strict=True)):
            values = ctx.arena.take(f"read {k}", (len(owned.keys_V), store.table.dim), np.float32)
            store.read(owned.keys_V, store.find(owned.keys_V), values)
            ctx.rows.append(rows_of(values))
            ctx.positions.append(np.arange(len(values)))

    def emb(self, ctx: Context) -> None:
        """Sends rows (or bags pooled here) to the workers that asked for them."""
        for dim, members in self.plan.groups.items():
            to_send, to_come = ctx.owner.vectors[dim], ctx.source.vectors[dim]
            sent = ctx.arena.take(f"vectors out {dim}", (int(to_send.sum()), dim), np.float32)
            for k in members:
                ctx.owner.answer(k, ctx.rows[k], ctx.positions[k], sent)
            received = ctx.arena.take(f"vectors in {dim}", (int(to_come.sum()), dim), np.float32)
            ctx.received[dim] = self.transport.all_to_all(sent, to_send, received, to_come)
            grads = ctx.arena.take(f"grads out {dim}", (int(to_come.sum()), dim), np.float32)
            if not all(self.plan.at_owner[k] for k in members):  # gradients of rows are added up, those of bags put
                grads[:] = 0
            ctx.grads[dim] = grads

    # -- the model ---------------------------------------------------------------------------------------------------

    def inputs(self, ctx: Context, m: int, *, train: bool) -> tuple[Batch, dict[str, Any]]:
        """Micro-batch m and its rows, as the model gets them."""
        first, last = ctx.bounds[m], ctx.bounds[m + 1]
        batch = ctx.batch.slice(first, last).to(self.dense.device)
        rows: dict[str, Any] = {}
        for feature in self.plan.features:
            entries = ctx.source.entries[feature.name]
            source, offsets = rows_of(ctx.received[entries.dim]), entries.offsets[first : last + 1]
            if feature.pooling is None:
                leaf = torch.empty(int(offsets[-1] - offsets[0]), entries.dim)
                gather(source, entries.positions[offsets[0] : offsets[-1]], NONE, leaf.numpy())
            else:
                leaf = torch.empty(last - first, entries.dim)
                pool(source, entries.positions, offsets, entries.weights, NONE, leaf.numpy())
            leaf = leaf.to(self.dense.device).requires_grad_(train)
            rows[feature.name] = leaf if feature.pooling else Jagged(leaf, batch.keys[feature.name].offsets)
            ctx.leaves[feature.name] = leaf
        return batch, rows

    def forward(self, ctx: Context, m: int) -> None:
        """Runs the model on micro-batch m; adds its losses to the batch's totals."""
        reduce = m == len(ctx.bounds) - 2
        ctx.output = None
        if ctx.error is None:
            try:
                self._forward(ctx, m, reduce=reduce)
            except Exception as error:
                ctx.error = error
        if reduce:
            if ctx.error is not None:  # the others are in the sum of dense gradients soon: take part, with nothing
                ctx.output = self.dense.forward(Batch({}), {}, reduce=True)
            self.announce(ctx)

    def _forward(self, ctx: Context, m: int, *, reduce: bool) -> None:
        batch, rows = self.inputs(ctx, m, train=True)
        if not batch.size and not reduce:
            return
        output = self.dense.forward(batch, rows, reduce=reduce)
        ctx.output = output
        if not batch.size:
            return
        losses = output.losses.detach()
        weights = torch.ones_like(losses) if output.weights is None else output.weights.detach()
        ctx.totals[0] += float(losses.double().sum())
        ctx.totals[1] += float(weights.double().sum())
        ctx.totals[2] += batch.size
        for what, values in (("loss", losses), ("weight", weights)):
            if torch.isfinite(values).all():
                continue
            ctx.totals[3] += 1
            if not self._skip_nonfinite:
                sample = int((~torch.isfinite(values)).nonzero()[0])
                raise ValueError(
                    f"the {what} of sample {ctx.bounds[m] + sample} is {float(values[sample])}; look at that sample and at "
                    f"the learning rates, or set on_nonfinite='skip' to leave such batches out and count them"
                )

    def announce(self, ctx: Context) -> None:
        """Starts the sum of losses, weights and troubles over workers; it runs beside the last backward."""
        ctx.totals[4] = ctx.error is not None
        ctx.summed = self.transport.start_sum(ctx.totals)

    def backward(self, ctx: Context, m: int) -> None:
        """Gradients of micro-batch m: dense ones into the model, those of rows into the batch's sums, in order."""
        if ctx.output is None:
            return
        self.dense.backward(ctx.output.losses.sum(), reduce=m == len(ctx.bounds) - 2)
        ctx.output = None
        first, last = ctx.bounds[m], ctx.bounds[m + 1]
        for feature in self.plan.features if ctx.error is None else ():
            leaf = ctx.leaves.pop(feature.name)
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            entries = ctx.source.entries[feature.name]
            offsets = entries.offsets[first : last + 1]
            values = grad.cpu().contiguous().numpy()
            if entries.once:
                pool_put(values, entries.positions, offsets, ctx.grads[entries.dim])
            elif feature.pooling is None:
                scatter_add(values, NONE, entries.positions[offsets[0] : offsets[-1]], ctx.grads[entries.dim])
            else:
                pool_add(values, NONE, entries.positions, offsets, entries.weights, ctx.grads[entries.dim])

    def agree(self, ctx: Context) -> bool:
        """What `announce` started: raises on every worker if one has trouble. False: do not train on this batch."""
        ctx.summed()
        if ctx.totals[4]:
            self._leave_together(ctx)
        return bool(ctx.totals[3] == 0 and ctx.totals[1] != 0)

    # -- gradients to the rows ---------------------------------------------------------------------------------------

    def grad(self, ctx: Context) -> None:
        """Sends gradients back to the owners of the rows."""
        for dim in self.plan.groups:
            to_send, to_come = ctx.source.vectors[dim], ctx.owner.vectors[dim]
            received = ctx.arena.take(f"grads in {dim}", (int(to_come.sum()), dim), np.float32)
            ctx.returned[dim] = self.transport.all_to_all(ctx.grads[dim], to_send, received, to_come)

    def update(self, ctx: Context) -> None:
        """Applies every optimizer once, to the sum over all workers divided by the global weight."""
        scale = 1.0 / float(ctx.totals[1])
        for k, store in enumerate(self.stores):
            positions = ctx.positions[k]
            grads = ctx.owner.gradients(k, len(positions), ctx.returned[store.table.dim])
            store.update(positions, grads, scale)
        self.dense.update(scale)

    # -- trouble -----------------------------------------------------------------------------------------------------

    def _leave_together(self, ctx: Context) -> None:
        self.dense.forget()
        messages = self.transport.gather_objects(None if ctx.error is None else describe(ctx.error))
        causes = [f"rank {rank}, batch {ctx.step}: {text}" for rank, text in enumerate(messages) if text is not None]
        raise TrainingError("\n".join(causes), is_ours=ctx.error is not None) from ctx.error


def serial_step(ops: StepOperations, ctx: Context, *, has_data: bool) -> StepResult | None:
    """One step with nothing overlapped: what every other schedule must equal. None once no worker has data."""
    if not ops.route(ctx, has_data=has_data):
        return None
    ops.retrieve(ctx)
    ops.emb(ctx)
    for m in range(len(ctx.bounds) - 1):
        ops.forward(ctx, m)
        ops.backward(ctx, m)
    if ops.agree(ctx):
        ops.grad(ctx)
        ops.update(ctx)
    else:
        ops.dense.forget()
    loss, weight, samples = ctx.totals[:3].tolist()
    return StepResult(
        ctx.step, loss / weight if weight else float("nan"), int(samples), weight, skipped=bool(ctx.totals[3])
    )


def micro_batch_bounds(size: int, count: int) -> list[int]:
    """Cuts `size` samples into `count` runs that differ by at most one sample; some are empty if size < count."""
    return [size * m // count for m in range(count + 1)]

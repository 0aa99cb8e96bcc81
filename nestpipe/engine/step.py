"""The operations of a training step, one method each, on the context of one batch.

The serial schedule runs them in the order they stand here; others run them in several threads, on several batches at once,
and what each touches is written down in schedule/check.py. Only `route` and `agree` decide anything together with the
other workers: a worker in trouble says so there, so that all leave at once instead of waiting for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged, Output
from nestpipe.engine.buffers import DualBuffer
from nestpipe.engine.dense import Dense
from nestpipe.engine.mixing import warn_if_mixed
from nestpipe.engine.versions import Versions
from nestpipe.exchange.layout import Layout, Sizes, payload_layout
from nestpipe.exchange.owner import OwnerRoute
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.source import SourceRoute
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator
from nestpipe.kernels.rows import NONE, Rows, gather, pool, pool_add, pool_put, rows_of, scatter_add
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore

Store = MemoryStore | DiskStore

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
    window: Window
    arena: Arena
    order: np.ndarray | None = None  # which samples of the batch as it came these are, if clustering has moved them
    error: BaseException | None = None
    has_data: bool = True  # False: this worker takes part with nothing
    inputs: list[Batch] = dataclasses.field(default_factory=list)  # micro-batches, on the device
    source: SourceRoute = None  # type: ignore[assignment]
    owner: OwnerRoute = None  # type: ignore[assignment]
    rows: list[Rows] = dataclasses.field(default_factory=list)  # per table: where this owner's rows of the batch lie
    positions: list[np.ndarray] = dataclasses.field(default_factory=list)  # per table: which of these each key has
    in_tier: list[np.ndarray] = dataclasses.field(default_factory=list)  # per table: their positions in its store
    sent: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # vectors to the sources
    received: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # vectors from the owners
    grads: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # their gradients, to be sent back
    returned: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # gradients at the owner
    leaves: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # rows as the model reads them
    outputs: dict[int, Output] = dataclasses.field(default_factory=dict)  # of micro-batches between FWD and BWD
    totals: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(6)
    )  # loss, weight, samples, bad, failed, stop
    result: StepResult | None = None
    trains: bool = False  # agreed: there is something to learn, and nothing wrong with it


class StepOperations:
    """Everything a step works on: stores, exchange and dense part of one worker.

    keys, rows: two transports, because routing may run beside the exchange of another batch's rows.
    versions: checks that every row is read as the update before left it; None: not checked.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        stores: Sequence[Store],
        keys: Transport,
        rows: Transport,
        dense: Dense,
        *,
        skip_nonfinite: bool,
        versions: Versions | None = None,
    ) -> None:
        self.plan, self.stores, self.keys, self.rows, self.dense = plan, list(stores), keys, rows, dense
        self.buffers = [DualBuffer(store) if isinstance(store, DiskStore) else None for store in stores]
        self.trouble: BaseException | None = None  # of an operation after which a batch agrees on nothing any more
        self.retrieved = -1  # the last batch whose keys have been resolved
        self.stop_asked = False  # of this worker, from outside
        self._skip_nonfinite, self._versions = skip_nonfinite, versions
        self._try_mixing = True  # once
        # Each lane has its own: they hold scratch memory.
        self._source_dedup, self._owner_dedup, self._store_dedup = Deduplicator(), Deduplicator(), Deduplicator()

    def begin(self) -> None:
        """A run of batches starts: what is left in buffers belongs to no neighbour, and gradients of a batch that failed to
        nobody."""
        self.dense.forget()
        for buffer in self.buffers:
            if buffer is not None:
                buffer.forget()

    # -- rows to the model -------------------------------------------------------------------------------------------

    def h2d(self, ctx: Context) -> None:
        """Micro-batches on the device. They live as long as the batch, and BWD waits for the device, so that no copy is
        given up while a kernel still reads it."""
        pairs = itertools.pairwise(ctx.window.bounds)
        ctx.inputs = [ctx.batch.slice(first, last).to(self.dense.device) for first, last in pairs]

    def route(self, ctx: Context) -> bool:
        """Deduplicates keys, buckets them by owner, exchanges them. False if no worker has data any more."""
        if ctx.error is not None:
            self._give_up(ctx)
        try:
            ctx.source = self._source_route(ctx)
        except Exception as error:  # what the checks of a batch did not foresee
            ctx.error = error
            self._give_up(ctx)
            ctx.source = self._source_route(ctx)
        ctx.source.sizes.state[:] = FAILED if ctx.error is not None else HAS_DATA if ctx.has_data else OUT_OF_DATA
        sizes = Sizes(self.keys.exchange_rows(ctx.source.sizes.table), len(self.plan.tables), ctx.window.parts)
        if (sizes.state == FAILED).any():
            leave_together(self.keys, ctx)
        if not (sizes.state == HAS_DATA).any():
            return False
        _, counts = payload_layout(sizes, self.plan, ctx.window)
        received = ctx.arena.take("payload in", int(counts.sum()), np.int32)
        payload = self.keys.all_to_all(ctx.source.payload, ctx.source.payload_counts, received, counts)
        ctx.owner = OwnerRoute(sizes, payload, self.plan, ctx.window, self._owner_dedup, ctx.arena)
        for dim in self.plan.groups:
            ctx.sent[dim], ctx.received[dim] = self._buffers(ctx, dim, "vectors", ctx.owner.vectors, ctx.source.vectors)
        return True

    def _source_route(self, ctx: Context) -> SourceRoute:
        return SourceRoute(ctx.batch, self.plan, ctx.window, self.keys, self._source_dedup, ctx.arena)

    def _buffers(self, ctx: Context, dim: int, what: str, out: Layout, into: Layout) -> tuple[np.ndarray, np.ndarray]:
        """What leaves and what comes; with a single worker it is the same."""
        leaves = ctx.arena.take(f"{what} out {dim}", (out.total(dim), dim), np.float32)
        if self.rows.world == 1:
            return leaves, leaves
        return leaves, ctx.arena.take(f"{what} in {dim}", (into.total(dim), dim), np.float32)

    def _give_up(self, ctx: Context) -> None:
        """From here on the worker takes part with an empty batch."""
        ctx.batch = Batch.empty([f.name for f in self.plan.features])
        ctx.window = dataclasses.replace(ctx.window, bounds=[0] * len(ctx.window.bounds))
        self.h2d(ctx)

    def retrieve(self, ctx: Context) -> None:
        """Finds the rows asked of this owner; those of new keys are born. Rows of a lower tier go into a buffer. The
        gradients of the batch start from zero."""
        for dim, members in self.plan.groups.items():
            ctx.grads[dim], ctx.returned[dim] = self._buffers(ctx, dim, "grads", ctx.source.grads, ctx.owner.grads)
            # Gradients of rows are added up, those of bags put. (Asked of the batch's own route: the plan may have been
            # decided by a later batch in the meantime.)
            if not all(ctx.source.entries[f.name].once for k in members for f in self.plan.features_of[k]):
                ctx.grads[dim][:] = 0
        ctx.rows, ctx.positions, ctx.in_tier = [], [], []
        for k in range(len(self.stores)):
            try:
                self._retrieve(ctx, k)
            except Exception as error:
                # Over the row budget, or the disk: all leave at the next agreement; until then a row of zeros will do.
                ctx.error = ctx.error or error
                zeros = ctx.arena.take(f"read {k}", (1, self.stores[k].table.dim), np.float32)
                zeros[:] = 0
                ctx.rows.append(rows_of(zeros))
                ctx.positions.append(np.zeros(len(ctx.owner.tables[k].keys_V), np.int64))
                ctx.in_tier.append(NONE)
        self.retrieved = ctx.step

    def _retrieve(self, ctx: Context, k: int) -> None:
        store, owned, buffer = self.stores[k], ctx.owner.tables[k], self.buffers[k]
        positions = store.resolve(owned.keys_V, ctx.step)
        if store.shares_rows:
            distinct, places = np.empty_like(positions), np.empty(len(positions), np.int32)
            distinct = distinct[: self._store_dedup(positions, distinct, places)]
            owned.merge(places)
            positions = distinct
        if buffer is None:
            assert isinstance(store, MemoryStore)
            rows, used = store.rows, positions
        else:
            rows, used = buffer.fill(ctx.step, positions)
        if self._versions is not None:
            self._versions.retrieve(k, ctx.step, positions, buffer)
        ctx.rows.append(rows)
        ctx.positions.append(used)
        ctx.in_tier.append(positions)

    def sync(self, ctx: Context) -> None:
        """Rows that the batch before used too: from its buffer into this one's. (Rows used in place need none.)"""
        for k, buffer in enumerate(self.buffers):
            if buffer is not None and ctx.error is None:
                buffer.sync(ctx.step)
                if self._versions is not None:
                    self._versions.sync(k, ctx.step, buffer)

    def read(self, ctx: Context) -> None:
        """Like retrieve, for evaluation: nothing is born or counted; keys without a row get their first values."""
        ctx.rows, ctx.positions = [], []
        for k, (store, owned) in enumerate(zip(self.stores, ctx.owner.tables, strict=True)):
            values = ctx.arena.take(f"read {k}", (len(owned.keys_V), store.table.dim), np.float32)
            store.read(owned.keys_V, store.find(owned.keys_V), values)
            ctx.rows.append(rows_of(values))
            ctx.positions.append(np.arange(len(values)))

    def emb(self, ctx: Context, part: int = 0, *, train: bool = True) -> None:
        """Sends the rows (or bags pooled here) of a part of the window to the workers that asked for them."""
        if train and part == 0 and self._versions is not None and ctx.error is None:
            try:
                for k, store in enumerate(self.stores):
                    self._versions.read(k, store.table.name, ctx.step)
            except AssertionError as error:
                ctx.error = error
        for dim, members in self.plan.groups.items():
            for k in members:
                ctx.owner.answer(k, part, ctx.rows[k], ctx.positions[k], ctx.sent[dim])
            self._travel(dim, part, ctx.sent[dim], ctx.owner.vectors, ctx.received[dim], ctx.source.vectors)

    def _travel(self, dim: int, part: int, sent: np.ndarray, out: Layout, received: np.ndarray, into: Layout) -> None:
        leaves, comes = sent[out.part(dim, part)], received[into.part(dim, part)]
        self.rows.all_to_all(leaves, out.counts[dim][part], comes, into.counts[dim][part])

    # -- the model ---------------------------------------------------------------------------------------------------

    def inputs(self, ctx: Context, m: int, *, train: bool) -> tuple[Batch, dict[str, Any]]:
        """Micro-batch m and its rows, as the model gets them."""
        batch = ctx.inputs[m]
        rows: dict[str, Any] = {}
        leaves = ctx.leaves[m] = {}
        size, received = batch.size, {dim: rows_of(vectors) for dim, vectors in ctx.received.items()}
        for feature in self.plan.features:
            entries = ctx.source.entries[feature.name]
            source, offsets = received[entries.dim], entries.of(m, size)
            if feature.pooling is None:
                leaf = torch.empty(int(offsets[-1] - offsets[0]), entries.dim)
                gather(source, entries.positions[offsets[0] : offsets[-1]], NONE, leaf.numpy())
            else:
                leaf = torch.empty(size, entries.dim)
                pool(source, entries.positions, offsets, entries.weights, NONE, leaf.numpy())
            leaf = leaf.to(self.dense.device).requires_grad_(train)
            rows[feature.name] = leaf if feature.pooling else Jagged(leaf, batch.keys[feature.name].offsets)
            leaves[feature.name] = leaf
        return batch, rows

    def forward(self, ctx: Context, m: int) -> None:
        """Runs the model on micro-batch m; adds its losses to the batch's totals."""
        if ctx.error is None:
            try:
                self._forward(ctx, m)
            except Exception as error:
                ctx.error = error

    def _forward(self, ctx: Context, m: int) -> None:
        batch, rows = self.inputs(ctx, m, train=True)
        if not batch.size:
            return
        if self._try_mixing and ctx.window.micro_batches > 1 and batch.size > 1:
            self._try_mixing = False
            if self.rows.rank == 0:
                warn_if_mixed(self.dense.model, batch, rows)
        output = self.dense.forward(batch, rows)
        ctx.outputs[m] = output
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
                number = ctx.window.bounds[m] + sample
                number = number if ctx.order is None else int(ctx.order[number])
                raise ValueError(
                    f"the {what} of sample {number} is {float(values[sample])}; look at that sample and at "
                    f"the learning rates, or set on_nonfinite='skip' to leave such batches out and count them"
                )

    def backward(self, ctx: Context, m: int) -> None:
        """Gradients of micro-batch m: dense ones into the model, those of rows into the batch's sums, in order."""
        output = ctx.outputs.pop(m, None)
        leaves = ctx.leaves.pop(m, {})
        if output is None:
            return
        self.dense.backward(output.losses.sum(), last=m == ctx.window.micro_batches - 1)
        size = ctx.inputs[m].size
        for feature in self.plan.features if ctx.error is None else ():
            leaf = leaves[feature.name]
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            entries = ctx.source.entries[feature.name]
            offsets, positions, grads = entries.of(m, size), entries.grad_positions, ctx.grads[entries.dim]
            values = grad.cpu().contiguous().numpy()
            if entries.once:
                pool_put(values, positions, offsets, grads)
            elif feature.pooling is None:
                scatter_add(values, NONE, positions[offsets[0] : offsets[-1]], grads)
            else:
                pool_add(values, NONE, positions, offsets, entries.weights, grads)

    def agree(self, ctx: Context) -> bool:
        """Sums losses, weights and troubles over workers; raises on every worker if one has trouble. True if one of them has
        been asked to stop."""
        ctx.error = ctx.error or self.trouble
        ctx.totals[4] = ctx.error is not None
        ctx.totals[5] = self.stop_asked
        self.rows.sum(ctx.totals)
        if ctx.totals[4]:
            leave_together(self.rows, ctx)
        ctx.trains = bool(ctx.totals[3] == 0 and ctx.totals[1] != 0)
        return bool(ctx.totals[5])

    # -- gradients to the rows ---------------------------------------------------------------------------------------

    def grad(self, ctx: Context, part: int = 0) -> None:
        """Sends the gradients that are complete with a part of the window back to the owners of the rows."""
        for dim in self.plan.groups:
            self._travel(dim, part, ctx.grads[dim], ctx.source.grads, ctx.returned[dim], ctx.owner.grads)

    def update(self, ctx: Context) -> None:
        """Applies every row optimizer once, to the sum over all workers divided by the global weight."""
        for k, store in enumerate(self.stores if ctx.trains else ()):
            positions = ctx.positions[k]
            grads = ctx.owner.gradients(k, len(positions), ctx.returned[store.table.dim])
            store.update(positions, grads, 1.0 / ctx.totals[1], rows=ctx.rows[k])
        if self._versions is not None:
            for k, buffer in enumerate(self.buffers):
                self._versions.update(k, ctx.step, buffer)

    def dense_update(self, ctx: Context) -> StepResult:
        """The same for the dense optimizer."""
        loss, weight, samples = ctx.totals[:3].tolist()
        if ctx.trains:
            self.dense.update(1.0 / weight)
        else:
            self.dense.forget()
        loss = loss / weight if weight else float("nan")
        return StepResult(ctx.step, loss, int(samples), weight, skipped=bool(ctx.totals[3]))

    def writeback(self, ctx: Context) -> None:
        """Rows of the buffer to their tier, also those of a batch that was left out: new ones are nowhere else."""
        for k, buffer in enumerate(self.buffers):
            if buffer is None or self.trouble is not None:
                continue
            try:
                buffer.write_back(ctx.step, ctx.in_tier[k])
            except Exception as error:
                self.trouble = error
            if self._versions is not None:
                self._versions.writeback(k, ctx.step, ctx.in_tier[k], buffer)

    # -- trouble -----------------------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """After a run: raises on every worker if one has had trouble since its last batch agreed."""
        troubles = np.array([self.trouble is not None], np.int64)
        if self.rows.sum(troubles)[0]:
            leave_together(self.rows, Context(step, Batch({}), Window([0, 0]), Arena(), error=self.trouble))


def leave_together(transport: Transport, ctx: Context) -> None:
    """Raises the same error on every worker: all causes, by rank."""
    transport.raise_together(ctx.error, what=f"batch {ctx.step}")

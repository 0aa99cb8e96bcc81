"""The operations of a training step, one method each, of the operation's name, on the context of one batch.

The serial schedule runs them in the order they stand here; others run them in several threads, on several batches at once,
and what each touches is written down in schedule/ops.py. Only `route` and `agree` decide whether to go on, together with the
other workers: a worker in trouble says so there, so that all leave at once instead of waiting for it. (Before that, DEAL lets
a batch be whose end it sees coming; SHARE and the meetings of batch norms leave their work undone, on all workers, if one has
failed.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged, NotFinite
from nestpipe.engine.averaging import Averaging
from nestpipe.engine.buffers import DualBuffer
from nestpipe.engine.context import (
    BAD,
    LOSS,
    MARK,
    MARK_SQUARED,
    QUIT,
    REACH,
    SAMPLES,
    STOP,
    TOKENS,
    TRAINABLE,
    TROUBLE,
    WEIGHT,
    Context,
    StepResult,
)
from nestpipe.engine.dense import Dense
from nestpipe.engine.flops import FlopCounter
from nestpipe.engine.meeting import Left, Meetings
from nestpipe.engine.mixing import ENOUGH, Embedding, try_mixing
from nestpipe.engine.outputs import Checked, mean_of, sums_of
from nestpipe.engine.rates import Rates, all_alike
from nestpipe.engine.reducer import SAFE, all_finite
from nestpipe.engine.rowstream import RowStream
from nestpipe.engine.scored import scored
from nestpipe.engine.sharing import FAILED as SHARES_NOTHING
from nestpipe.engine.sharing import FINE, SPOILT, Sharing, embed
from nestpipe.engine.versions import Versions
from nestpipe.engine.waiting import KEPT, Load, Loads
from nestpipe.errors import Stopped, TrainingError, describe
from nestpipe.exchange.clustering import cluster
from nestpipe.exchange.layout import Layout, Sizes, payload_layout
from nestpipe.exchange.owner import OwnerRoute
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.replicas import ReplicaRoute
from nestpipe.exchange.requests import Requests, decide
from nestpipe.exchange.samples import Dealer, Told, token_feature
from nestpipe.exchange.source import SourceRoute
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.window import Window
from nestpipe.kernels.keys import Deduplicator
from nestpipe.kernels.rows import NONE, gather, pool, pool_add, pool_put, rows_of, scatter_add
from nestpipe.optim import ScaledRowwiseAdagrad
from nestpipe.rates import Schedule
from nestpipe.sizes import NUM_TOTALS
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore
from nestpipe.tables import Feature

log = logging.getLogger("nestpipe")
Store = MemoryStore | DiskStore

# What a worker says of itself in ROUTE, and when it meets the others before a call; from CALLS on: which call.
OUT_OF_DATA, HAS_DATA, FAILED, STOPS, CALLS = 0, 1, 2, 3, 4
MIXING_TRIALS = 10  # batches; all but the first only as long as no row has a gradient


class StepOperations:
    """Everything a step works on: stores, exchange and dense part of one worker.

    keys, rows: two transports, because routing may run beside the exchange of another batch's rows.
    lr_schedule: of tables that have none of their own, and of the dense part.
    dealer: deals samples over workers, with a transport of its own; None: they stay where they are read.
    meetings: of a model with batch norms: where they meet those of other workers; None: there are none.
    sharing: of a model whose loss is over the samples of all workers: how they meet; None: each worker has its own.
    check_freshness: that every row is read as the update before left it, or one that is `stale_by` updates older.
    try_mixing: whether the batch is, or will be, cut into micro-batches, which the model's loss must not notice.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        stores: Sequence[Store],
        keys: Transport,
        rows: Transport,
        dense: Dense,
        *,
        lr_schedule: Schedule | None = None,
        dealer: Dealer | None = None,
        sharing: Sharing | None = None,
        meetings: Meetings | None = None,
        skip_nonfinite: bool,
        check_freshness: bool = False,
        stale_by: int = 0,
        try_mixing: bool = False,
    ) -> None:
        self.plan, self.keys, self.rows, self.dense_part, self.dealer = plan, keys, rows, dense, dealer
        self.sharing, self.meetings = sharing, meetings
        # What the square of a token costs, in tokens; None: samples stay where they are.
        self.squares: float | None = None
        self.loads = Loads(maxlen=KEPT)  # of this worker's steps so far
        self._tokens = token_feature(plan.features)
        self._check_freshness, self._stale_by = check_freshness, stale_by
        self._rates = Rates(lr_schedule, dense)
        self.use(stores)
        self.trouble: BaseException | None = None  # of an operation after which a batch agrees on nothing any more
        self.stop_asked = False  # of this worker, from outside
        self.problem: BaseException | None = (
            None  # of this worker's on_step: it makes no more calls that others make as well
        )
        self.quitting = False  # whether one of them has one, as all know
        self.parted: TrainingError | None = (
            None  # workers were in different calls, or one had a problem; all have heard it
        )
        self.keeps_predictions = False  # whether a step's result has them
        self.parts = 1  # of the window of the schedule that is run
        self.keys_asked = 0  # of this owner, so far
        self.flops = FlopCounter(dense.model, compiled=dense.is_compiled)
        if meetings is not None and not callable(getattr(dense.model, "flops", None)):
            # A forward whose counting fails would be run again, with other workers elsewhere.
            self.flops.why_not = "the model has batch norms that meet other workers; give it a method flops(batch)"
        self._skip_nonfinite = skip_nonfinite
        self._trials = MIXING_TRIALS if try_mixing else 0  # that are left
        # Each lane has its own: they hold scratch memory.
        self._source_dedup, self._owner_dedup, self._store_dedup = Deduplicator(), Deduplicator(), Deduplicator()
        self._cluster_dedup = Deduplicator()
        self._pinned = dense.device.type != "cpu"

    def use(self, stores: Sequence[Store]) -> None:
        """Works on these tables from here on."""
        self.stores = list(stores)
        self.buffers = [DualBuffer(store) if isinstance(store, DiskStore) else None for store in stores]
        self._versions = Versions(self.stores, self._stale_by) if self._check_freshness else None
        self.averaging = Averaging(self.plan, self.stores, self.buffers, self.rows)

    def begin(self, read: Callable[[], Batch | None], clustering: str, first: int = 0) -> None:
        """A run of batches starts: what is left in buffers belongs to no neighbour, and gradients of a batch that failed to
        nobody. read: gives the batches, of which `first` is the first; see PREFETCH."""
        self.averaging.begin(first)
        self._read, self._clustering, self._dealt_out = read, clustering, False
        self.quitting, self.parted = False, None
        self.dense_part.forget()
        if self.meetings is not None:
            self.meetings.forget()
        for buffer in self.buffers:
            if buffer is not None:
                buffer.forget()

    # -- rows to the model -------------------------------------------------------------------------------------------

    def prefetch(self, ctx: Context) -> None:
        """Takes the next batch, which a thread or process of its own has read and checked; deals its samples to
        micro-batches, unless they are dealt over workers first."""
        try:
            batch = self._read()
            if batch is not None:
                ctx.batch, ctx.has_data = batch, True
        except Stopped:
            ctx.stops = True
        except Exception as problem:
            ctx.error = problem
        if self.dealer is None:
            self._cluster(ctx)

    def deal(self, ctx: Context) -> None:
        """Samples of all workers' batches, dealt anew so that all have as much to compute; then to micro-batches. When workers
        see that this batch is not trained on they leave it, and those after it, as they are: a worker that is told so by
        ROUTE does not come here again."""
        assert self.dealer is not None
        if not self._dealt_out:
            told = self.dealer.meet(self._state(ctx), ctx.batch)
            if (told.state_W >= CALLS).any():
                self._part("train", self.problem or ctx.error)
            leave = np.isin(told.state_W, (FAILED, STOPS)).any()
            self._dealt_out = bool(leave or not (told.state_W == HAS_DATA).any())
            if not self._dealt_out and self.squares is not None and told.size_W.any():
                self._deal(ctx, told, self.squares)
        self._cluster(ctx)

    def _deal(self, ctx: Context, told: Told, squares: float) -> None:
        assert self.dealer is not None
        try:
            dealt = self.dealer.deal(ctx.batch, told, squares)
        except ValueError as problem:  # of this batch; no worker waits for anything more of it
            ctx.error = problem
            return
        ctx.batch, ctx.home, ctx.order = dealt.batch, dealt.home, dealt.order
        ctx.undealt, ctx.dealt = dealt.before, dealt.after

    def _cluster(self, ctx: Context) -> None:
        """Deals the samples to micro-batches."""
        if ctx.error is not None or not (ctx.has_data or ctx.batch.size):
            return
        keys, micro_batches = self.keys, ctx.window.micro_batches
        try:
            order, bounds = cluster(
                ctx.batch,
                self.plan,
                micro_batches,
                self._clustering,
                self._cluster_dedup,
                rank=keys.rank,
                world=keys.world,
            )
            batch = ctx.batch
            if order is not None:
                batch = batch.select(torch.from_numpy(order))
                ctx.order = order if ctx.order is None else ctx.order[order]
                ctx.home = None if ctx.home is None else ctx.home[order]
            ctx.batch = batch.pin_memory() if self._pinned else batch
            ctx.window = dataclasses.replace(ctx.window, bounds=bounds)
        except Exception as problem:
            ctx.error = problem

    def _state(self, ctx: Context) -> int:
        if ctx.error is not None:
            return FAILED
        return STOPS if ctx.stops else HAS_DATA if ctx.has_data else OUT_OF_DATA

    def h2d(self, ctx: Context) -> None:
        """Micro-batches on the device. They live as long as the batch, and BWD waits for the device, so that no copy is
        given up while a kernel still reads it."""
        pairs = itertools.pairwise(ctx.window.bounds)
        ctx.inputs = [ctx.batch.slice(first, last).to(self.dense_part.device) for first, last in pairs]

    def route(self, ctx: Context, *, train: bool = True) -> None:
        """Deduplicates keys, buckets them by owner, decides how they travel where that is open, exchanges them; unless no
        worker has data any more, or one stops. In training, owners tell the other replicas what they were asked."""
        if ctx.error is not None:
            self._give_up(ctx)
        if self.plan.undecided and (self._states(OUT_OF_DATA) >= CALLS).any():  # before workers decide together
            self._part("train", self.problem or ctx.error)
        try:
            requests = self._requests(ctx)
        except Exception as error:  # what the checks of a batch did not foresee
            ctx.error = error
            self._give_up(ctx)
            requests = self._requests(ctx)
        decide(self.plan, requests, self.keys)
        ctx.source = SourceRoute(requests, self.plan, ctx.window, self.keys.world, ctx.arena)
        ctx.source.sizes.state[:] = self._state(ctx)
        sizes = Sizes(self.keys.exchange_rows(ctx.source.sizes.table), len(self.plan.tables), ctx.window.parts)
        if (sizes.state >= CALLS).any():
            self._part("train", self.problem or ctx.error)
        if (sizes.state == FAILED).any():
            leave_together(self.keys, ctx)
        ctx.stops = bool((sizes.state == STOPS).any())
        ctx.ends = ctx.stops or not (sizes.state == HAS_DATA).any()
        if ctx.ends:
            return
        layout = payload_layout(sizes, self.plan, ctx.window)
        received = ctx.arena.take("payload in", layout.total, np.int32)
        payload = self.keys.all_to_all(ctx.source.payload, ctx.source.layout.counts, received, layout.counts)
        ctx.owner = OwnerRoute(sizes, payload, layout, self.plan, ctx.window, self._owner_dedup, ctx.arena)
        if train:
            self.keys_asked += sum(len(owned.row_E) for owned in ctx.owner.tables)
            self._tell_replicas(ctx)
        for dim in self.plan.groups:
            ctx.sent[dim], ctx.received[dim] = self._buffers(ctx, dim, "vectors", ctx.owner.vectors, ctx.source.vectors)

    def _tell_replicas(self, ctx: Context) -> None:
        for peers, members in self.plan.together.items():
            ctx.replicas.append(
                ReplicaRoute(peers, members, ctx.owner, self.plan, ctx.window, self.keys, self._owner_dedup, ctx.arena)
            )
        self.averaging.route(ctx)

    def meet(self, call: str) -> None:
        """Before a call in which workers talk to each other: raises on all of them if one makes another call, or cannot make
        it because of what its on_step has raised. The message is that of ROUTE (of DEAL, if there is one), where those may be
        that go on training."""
        if self.keys.world == 1 and self.problem is None:
            return
        mine = FAILED if self.problem is not None else CALLS + zlib.crc32(call.encode())
        states = self._states(mine) if self.dealer is None else self.dealer.meet(mine).state_W
        if (states == FAILED).any() or (states != states[0]).any():
            self._part(call, self.problem)

    def _states(self, mine: int) -> np.ndarray:
        sizes = Sizes.empty(self.keys.world, len(self.plan.tables), self.parts)
        sizes.state[:] = mine
        return Sizes(self.keys.exchange_rows(sizes.table, counted=False), sizes.num_tables, sizes.parts).state

    def _part(self, call: str, problem: BaseException | None) -> NoReturn:
        told = self.keys.gather_objects((call, None if problem is None else describe(problem)))
        lines = [f"rank {rank}, {call}: {cause}" for rank, (call, cause) in enumerate(told) if cause is not None]
        first = next((rank for rank, (_, cause) in enumerate(told) if cause is not None), 0)
        if not lines:
            calls = ", ".join(f"rank {rank}: {call}" for rank, (call, _) in enumerate(told))
            lines = [
                f"workers make different calls ({calls}); every worker must make the same calls, in the same order"
            ]
        self.parted = TrainingError("\n".join(lines), is_ours=self.keys.rank == first)
        raise self.parted from problem

    def _requests(self, ctx: Context) -> Requests:
        return Requests(ctx.batch, self.plan, ctx.window, self.keys.world, self._source_dedup, ctx.arena)

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
                ctx.cut_short |= not isinstance(error, ValueError)  # which is a refusal, before anything is changed
                zeros = ctx.arena.take(f"read {k}", (1, self.stores[k].table.dim), np.float32)
                zeros[:] = 0
                ctx.rows.append(rows_of(zeros))
                ctx.positions.append(np.zeros(len(ctx.owner.tables[k].keys_V), np.int64))
                ctx.in_tier.append(NONE)

    def _retrieve(self, ctx: Context, k: int) -> None:
        store, owned, buffer = self.stores[k], ctx.owner.tables[k], self.buffers[k]
        positions = store.resolve(owned.keys_V, ctx.step)
        if store.shares_rows:
            distinct, places = np.empty_like(positions), np.empty(len(positions), np.int32)
            distinct = distinct[: self._store_dedup(positions, distinct, places)]
            owned.merge(places)
            positions = distinct
        if self.plan.is_averaged(k):
            positions = self.averaging.wanted(ctx, k, positions)
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
        leaves = ctx.leaves[m] = self._gather(ctx, m, [f for f in self.plan.features if not f.streamed])
        streams = ctx.streams[m] = [self._stream(ctx, m, f, train=train) for f in self.plan.features if f.streamed]
        for leaf in leaves.values():
            leaf.requires_grad_(train)
        of_streams = {stream.feature: stream.streamed(batch.keys[stream.feature].offsets) for stream in streams}
        return batch, self._rows_of(batch, leaves) | of_streams

    def _stream(self, ctx: Context, m: int, feature: Feature, *, train: bool) -> RowStream:
        """The same without a copy: rows stay in the buffer in which they came until the batch ends, and their gradients are added
        to the batch's by the model's backward."""
        entries = ctx.source.entries[feature.name]
        offsets = entries.of(m, ctx.inputs[m].size)
        mine = slice(offsets[0], offsets[-1])
        return RowStream(
            feature.name,
            ctx.received[entries.dim],
            entries.positions[mine],
            ctx.grads[entries.dim] if train else None,
            entries.grad_positions[mine],
            self.dense_part.device,
        )

    def _gather(self, ctx: Context, m: int, features: Sequence[Feature]) -> dict[str, torch.Tensor]:
        """A copy of the rows of micro-batch m, or of its bags, per feature."""
        vectors = {}
        size, received = ctx.inputs[m].size, {dim: rows_of(vectors) for dim, vectors in ctx.received.items()}
        for feature in features:
            entries = ctx.source.entries[feature.name]
            source, offsets = received[entries.dim], entries.of(m, size)
            if feature.pooling is None:
                values = torch.empty(int(offsets[-1] - offsets[0]), entries.dim)
                gather(source, entries.positions[offsets[0] : offsets[-1]], NONE, values.numpy())
            else:
                values = torch.empty(size, entries.dim)
                pool(source, entries.positions, offsets, entries.weights, NONE, values.numpy())
            vectors[feature.name] = values.to(self.dense_part.device)
        return vectors

    def _rows_of(self, batch: Batch, vectors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            f.name: vectors[f.name] if f.pooling else Jagged(vectors[f.name], batch.keys[f.name].offsets)
            for f in self.plan.features
            if f.name in vectors
        }

    def fwd(self, ctx: Context, m: int) -> None:
        """Runs the model on micro-batch m; adds its losses to the batch's totals."""
        with self._meeting(ctx, m):
            if ctx.error is None:
                self._forward(ctx, m)

    @contextlib.contextmanager
    def _meeting(self, ctx: Context, m: int) -> Iterator[None]:
        """A pass of the model; what goes wrong in it is the batch's error. Where batch norms meet those of other workers, it ends
        when all have ended it."""
        if self.meetings is not None:
            self.meetings.begin()
        spoilt = False
        try:
            yield
        except Left:
            ctx.left = True
        except NotFinite as error:
            ctx.totals[BAD] += 1
            ctx.left = spoilt = True
            if not self._skip_nonfinite:
                ctx.error = error
        except Exception as error:
            ctx.error = error
        if self.meetings is not None:
            try:
                self.meetings.finish(failed=spoilt or ctx.error is not None, empty=not ctx.inputs[m].size)
            except Left:
                ctx.left = True
            except ValueError as error:
                ctx.error = error

    def _forward(self, ctx: Context, m: int) -> None:
        batch, rows = self.inputs(ctx, m, train=True)
        if not batch.size:
            return
        doubt = self._try_mixing(ctx, m) if self._trials else None
        tokens = int(self._lengths(batch).sum())

        def run() -> Any:
            if self.sharing is not None:
                with self.dense_part.autocast():
                    return embed(self.dense_part.model, batch, rows)
            return self.dense_part.forward(batch, rows)

        made: Any = self.flops.forward(run, batch, tokens=tokens) if self.flops.counts(ctx.step) else run()
        if doubt is not None and self.rows.rank == 0:
            log.warning(
                f"{doubt}. Set mixes_samples in the model to say that it does (True), is meant so "
                f"('micro-batch'), or does not (False)"
            )
        ctx.totals[SAMPLES] += batch.size
        ctx.totals[TOKENS] += tokens
        if self.sharing is not None:
            ctx.shares.add(m, *made)
        else:
            ctx.outputs[m] = made
            self._add_losses(ctx, made, ctx.window.bounds[m])
            self._keep_predictions(ctx, made, batch)

    def _keep_predictions(self, ctx: Context, output: Checked, batch: Batch) -> None:
        if self.keeps_predictions:
            pair = scored(output, batch)
            ctx.predicted += [] if pair is None else [pair]

    def _add_losses(self, ctx: Context, output: Checked, first: int) -> None:
        """To the batch's totals. first: which sample of the batch the output begins with."""
        losses = output.losses.detach()
        weights = torch.ones_like(losses) if output.weights is None else output.weights.detach()
        ctx.totals[LOSS] += float(losses.double().sum())
        ctx.totals[WEIGHT] += float(weights.double().sum())
        for name, task in output.tasks.items():
            ctx.of_tasks.setdefault(name, np.zeros(2))[:] += sums_of(task.losses, task.weights)
        for what, values in (("loss", losses), ("weight", weights)):
            if torch.isfinite(values).all():
                continue
            ctx.totals[BAD] += 1
            if not self._skip_nonfinite:
                sample = int((~torch.isfinite(values)).nonzero()[0])
                name = ctx.named(first + sample)
                raise ValueError(
                    f"the {what} of {name} is {float(values[sample])}; look at that sample and at "
                    f"the learning rates, or set on_nonfinite='skip' to leave such batches out and count them"
                )

    def _try_mixing(self, ctx: Context, m: int) -> str | None:
        """Raises if the loss of a sample depends on others, as soon as there are rows of enough samples; returns what could not
        be tried."""
        first, last = ctx.window.bounds[m : m + 2]
        if last < 2 or not first < min(ENOUGH, ctx.batch.size) <= last:
            return None
        self._trials -= 1
        model = self.dense_part.model
        if self.sharing is not None:
            model = Embedding(model)
        elif getattr(model, "mixes_samples", None) is not None:
            self._trials = 0
            return None
        batch = ctx.batch.slice(0, last).to(self.dense_part.device)
        parts = [self._gather(ctx, k, self.plan.features) for k in range(m + 1)]
        vectors = {f.name: torch.cat([part[f.name] for part in parts]) for f in self.plan.features}
        trial = try_mixing(model, batch, self._rows_of(batch, vectors))
        if trial.learns or trial.doubt is not None:
            self._trials = 0
        return trial.doubt

    def share(self, ctx: Context) -> None:
        """What this worker's samples are compared with, to all workers; unless one has trouble, which all hear here."""
        assert self.sharing is not None
        if ctx.error is None and not ctx.left:
            ctx.shares.cut()
        bad = ctx.shares.not_finite
        if bad is not None:
            self._spoilt(ctx, *bad)
        state = SHARES_NOTHING if ctx.error is not None or ctx.left else FINE if bad is None else SPOILT
        try:
            self.sharing.share(ctx.shares, state=state, samples=ctx.batch.size)
        except ValueError as error:  # which the others have as well
            ctx.error = error

    def _spoilt(self, ctx: Context, name: str, entry: int, entries: int, value: float) -> None:
        ctx.totals[BAD] += 1
        if not self._skip_nonfinite:
            whose = ctx.named(entry) if entries == ctx.batch.size else f"entry {entry}"
            ctx.error = ValueError(
                f"the model's embed returned {value} in {name!r} of {whose}; look at that sample and at the learning rates, or "
                f"set on_nonfinite='skip' to leave such batches out and count them"
            )

    def compare(self, ctx: Context) -> None:
        """Losses of this worker's samples, and their gradients down to what was shared and what was not."""
        assert self.sharing is not None
        shares, sharing, model = ctx.shares, self.sharing, self.dense_part.model
        if shares.void or ctx.error is not None or not ctx.batch.size:
            return
        nobody = contextlib.nullcontext() if self.meetings is None else self.meetings.refusing("the model's compare")

        def run() -> None:
            with self.dense_part.autocast(), nobody:
                output = sharing.compare(model, shares)
            self._add_losses(ctx, output, 0)
            self._keep_predictions(ctx, output, ctx.batch)
            if output.losses.requires_grad:
                ctx.totals[TRAINABLE] += 1
                self.dense_part.backward(output.losses.sum(), last=False)

        try:
            if self.flops.counts(ctx.step):
                self.flops.backward(run)
            else:
                run()
        except Exception as error:
            ctx.error = error

    def unshare(self, ctx: Context) -> None:
        """Gradients of what this worker has shared, from all workers."""
        assert self.sharing is not None
        self.sharing.unshare(ctx.shares)

    def bwd(self, ctx: Context, m: int) -> None:
        """Gradients of micro-batch m: dense ones into the model, those of rows into the batch's sums, in order."""
        output = ctx.outputs.pop(m, None)
        leaves, streams = ctx.leaves.pop(m, {}), ctx.streams.pop(m, [])
        last = m == ctx.window.micro_batches - 1
        if self.meetings is None:
            self._backward(ctx, m, output, leaves, streams, last=last)
        else:
            with self._meeting(ctx, m):
                if ctx.error is None and not ctx.left:
                    self._backward(ctx, m, output, leaves, streams, last=last)
        for stream in streams:
            stream.close()
        if last and ctx.error is None:
            self._check_dense_gradients(ctx)

    def _backward(
        self,
        ctx: Context,
        m: int,
        output: Checked | None,
        leaves: dict[str, torch.Tensor],
        streams: Sequence[RowStream],
        *,
        last: bool,
    ) -> None:
        ran, loss = output is not None, None
        if output is not None and output.losses.requires_grad:
            ctx.totals[TRAINABLE] += 1
            loss = output.losses.sum()
        elif m in ctx.shares and not ctx.shares.void:
            ran, loss = True, ctx.shares.loss(m)
        if loss is not None:
            if self.flops.counts(ctx.step):
                self.flops.backward(lambda: self.dense_part.backward(loss, last=last))
            else:
                self.dense_part.backward(loss, last=last)
        for stream in streams:
            stream.close()
        if ran and ctx.error is None:
            self._backward_rows(ctx, m, leaves, streams)

    def _backward_rows(
        self, ctx: Context, m: int, leaves: dict[str, torch.Tensor], streams: Sequence[RowStream]
    ) -> None:
        size = ctx.inputs[m].size
        grads_of = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        if not all_finite(list(grads_of.values())):
            name, grad = next((n, g) for n, g in grads_of.items() if not torch.isfinite(g).all())
            self._not_finite(ctx, f"feature {name!r}", float(grad[~torch.isfinite(grad)][0]))
        for stream in streams:
            if stream.not_finite is not None:
                self._not_finite(ctx, f"feature {stream.feature!r}", stream.not_finite)
        for feature in self.plan.features:
            if feature.streamed:  # done, in the model's backward
                continue
            entries = ctx.source.entries[feature.name]
            offsets, positions, grads = entries.of(m, size), entries.grad_positions, ctx.grads[entries.dim]
            values = grads_of[feature.name].cpu().contiguous().numpy()
            if entries.once:
                pool_put(values, positions, offsets, grads)
            elif feature.pooling is None:
                scatter_add(values, NONE, positions[offsets[0] : offsets[-1]], grads)
            else:
                pool_add(values, NONE, positions, offsets, entries.weights, grads)

    def _check_dense_gradients(self, ctx: Context) -> None:
        reach = self.dense_part.reach()
        if math.isfinite(reach):
            ctx.totals[REACH] = reach
        else:
            self._not_finite(ctx, f"parameter {self.dense_part.not_finite()!r}", None)

    def _not_finite(self, ctx: Context, what: str, value: float | None) -> None:
        ctx.totals[BAD] += 1
        if not self._skip_nonfinite:
            ctx.error = ctx.error or ValueError(
                f"the gradient of {what} is {'not finite' if value is None else value}, though the losses are finite; look for a "
                f"square root, a logarithm or a division at zero in the model, or set on_nonfinite='skip' to leave such batches "
                f"out and count them"
            )

    def reduce(self, ctx: Context) -> None:
        """Waits for the sum of dense gradients over workers, which the last backward has begun."""
        self.dense_part.reduce()

    def agree(self, ctx: Context, *, train: bool = True) -> None:
        """Sums losses, weights and troubles over workers; raises on every worker if one has trouble."""
        ctx.error = ctx.error or self.trouble
        if train:
            self._take_rates(ctx)
        ctx.totals[TROUBLE] = ctx.error is not None
        ctx.totals[QUIT] = self.problem is not None
        ctx.totals[STOP] = self.stop_asked or self.problem is not None
        self._sum_totals(ctx)
        if ctx.totals[TROUBLE]:
            leave_together(self.rows, ctx)
        if not all_alike(ctx.totals[MARK], ctx.totals[MARK_SQUARED], self.rows.world):
            self.rows.compare(ctx.rates.named(self.stores, ctx.step))
        if train and ctx.totals[SAMPLES] and not ctx.totals[TRAINABLE] and not ctx.totals[BAD]:
            raise TrainingError(
                f"batch {ctx.step}: the loss depends on no parameter and no row, so there is nothing to train: is this under "
                f"torch.no_grad(), or has the model detached it (.detach(), .item(), .numpy())?",
                is_ours=self.rows.rank == 0,
            )
        if ctx.totals[REACH] > SAFE:
            self._reach_too_far(ctx)
        self.quitting |= bool(ctx.totals[QUIT])
        ctx.trains = bool(ctx.totals[BAD] == 0 and ctx.totals[WEIGHT] != 0)

    def _reach_too_far(self, ctx: Context) -> None:
        """Known to all before rows are updated, though the sum itself may still be on its way."""
        ctx.totals[BAD] += 1
        if not self._skip_nonfinite:
            raise TrainingError(
                f"batch {ctx.step}: the dense gradients of all workers are finite, but so large that their sum may not be; look "
                f"at the learning rates and at the size of the losses, or set on_nonfinite='skip' to leave such batches out and "
                f"count them",
                is_ours=self.rows.rank == 0,
            )

    def _sum_totals(self, ctx: Context) -> None:
        """Over workers, in one message; a worker without samples knows the tasks too, because the model declares them."""
        tasks = self.dense_part.tasks
        sums = [ctx.totals, *(ctx.of_tasks.get(name, np.zeros(2)) for name in tasks)]
        summed = self.rows.sum(np.concatenate(sums) if tasks else ctx.totals)
        ctx.totals = summed[:NUM_TOTALS]
        ctx.of_tasks = {name: summed[NUM_TOTALS + 2 * k :][:2] for k, name in enumerate(tasks)}

    def _take_rates(self, ctx: Context) -> None:
        """Now: the user may set others for the next batch before this one's update is applied."""
        try:
            ctx.rates = self._rates.at(ctx.step, self.stores)
            ctx.totals[MARK], ctx.totals[MARK_SQUARED] = ctx.rates.mark, ctx.rates.mark**2
        except Exception as error:  # of a function of the user's
            ctx.error = ctx.error or error

    # -- gradients to the rows ---------------------------------------------------------------------------------------

    def grad(self, ctx: Context, part: int = 0) -> None:
        """Sends the gradients that are complete with a part of the window back to the owners of the rows."""
        for dim in self.plan.groups:
            self._travel(dim, part, ctx.grads[dim], ctx.source.grads, ctx.returned[dim], ctx.owner.grads)

    def merge(self, ctx: Context, part: int = 0) -> None:
        """Sends sums of the gradients that are complete with a part of the window to the other replicas of the rows."""
        for route in ctx.replicas:
            route.send(part, ctx.owner, ctx.returned, self.rows)

    def update(self, ctx: Context) -> None:
        """Applies every row optimizer once, to the sum over all workers divided by the global weight; of tables whose replicas
        are averaged, to this group's part of it."""
        routes = {k: route for route in ctx.replicas for k in route.members}
        for k, store in enumerate(self.stores if ctx.trains else ()):
            if ctx.step < store.table.frozen_until:
                continue
            positions, scale, sharers = ctx.positions[k], 1.0 / ctx.totals[WEIGHT], NONE
            if self.plan.is_exact(k):
                grads = routes[k].gradients(k, len(positions))
            else:
                grads = ctx.owner.gradients(k, len(positions), ctx.returned[store.table.dim])
            if self.plan.is_averaged(k):
                # Rows that only other groups use stay as they are: an optimizer may move a row without a gradient too.
                used = np.flatnonzero(np.diff(grads.start))
                scale *= len(self.plan.peers[k])
                if isinstance(store.table.optimizer, ScaledRowwiseAdagrad) and store.table.optimizer.is_by_row:
                    sharers = routes[k].sharers(k, len(positions))[used]
                grads = grads._replace(start=np.append(grads.start[used], grads.start[-1]))
                positions = positions[used]
            store.update(positions, grads, scale, rows=ctx.rows[k], sharers=sharers, lr=ctx.rates.rows[k])
        if self._versions is not None:
            for k, buffer in enumerate(self.buffers):
                self._versions.update(k, ctx.step, buffer)

    def average(self, ctx: Context) -> None:
        """Of tables whose replicas are averaged: every so many steps, the rows used since, with their state."""
        self.averaging.average(ctx)

    def dense(self, ctx: Context) -> None:
        """The same for the dense optimizer. The batch has its result."""
        loss, weight, samples, tokens = ctx.totals[[LOSS, WEIGHT, SAMPLES, TOKENS]].tolist()
        norm = None
        if ctx.trains:
            norm = self.dense_part.update(1.0 / weight, lr_factor=ctx.rates.dense_factor)
        else:
            self.dense_part.forget()
        if self.meetings is not None:
            self.meetings.learn(trains=ctx.trains)
        try:
            self.dense_part.next_step()
        except Exception as error:  # of the user's scheduler: the step is complete, and all stop after it
            self.problem = self.problem or error
        lengths = self._lengths(ctx.batch).astype(np.float64)
        self.loads.append(Load(ctx.seconds, lengths.sum(), (lengths * lengths).sum(), ctx.undealt, ctx.dealt))
        loss = mean_of(loss, weight)
        losses = {name: mean_of(*sums.tolist()) for name, sums in ctx.of_tasks.items()}
        skipped = bool(ctx.totals[BAD])
        ctx.result = StepResult(
            ctx.step + 1,
            loss,
            int(samples),
            weight,
            skipped=skipped,
            tokens=int(tokens),
            losses=losses,
            lr=next(iter(ctx.rates.dense), None),
            grad_norm=norm,
            predicted=ctx.predicted,
        )

    def _lengths(self, batch: Batch) -> np.ndarray:
        return NONE if self._tokens is None else batch.keys[self._tokens].lengths.numpy()

    def writeback(self, ctx: Context) -> None:
        """Rows of the buffer to their tier, also those of a batch that was left out: new ones are nowhere else."""
        for k, buffer in enumerate(self.buffers):
            if buffer is None:
                continue
            if self.trouble is not None:
                ctx.cut_short = True
                continue
            try:
                buffer.write_back(ctx.step, ctx.in_tier[k])
            except Exception as error:
                self.trouble, ctx.cut_short = error, True
            if self._versions is not None:
                self._versions.writeback(k, ctx.step, ctx.in_tier[k], buffer)

    # -- trouble -----------------------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """After a run: raises on every worker if one has had trouble since its last batch agreed."""
        troubles = self.rows.sum(np.array([self.trouble is not None, self.problem is not None], np.int64))
        self.quitting |= bool(troubles[1])
        if troubles[0]:
            leave_together(self.rows, Context(step, Batch({}), Window([0, 0]), Arena(), error=self.trouble))


def leave_together(transport: Transport, ctx: Context) -> None:
    """Raises the same error on every worker: all causes, by rank."""
    transport.raise_together(ctx.error, what=f"batch {ctx.step}")

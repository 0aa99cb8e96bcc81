"""Trainer: fit, evaluate, save, load."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe import checkpoint, process
from nestpipe.arena import Arena
from nestpipe.batch import Batch, Jagged, NotFinite
from nestpipe.engine.dense import Dense, checked_output
from nestpipe.engine.loader import Loader, checked
from nestpipe.engine.step import Context, StepOperations, StepResult, micro_batch_bounds, serial_step
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.transport import Transport
from nestpipe.metrics import NDCG, HitRate, rank_all
from nestpipe.store.memory import MemoryStore, StoreStats
from nestpipe.tables import Feature, Table, did_you_mean

log = logging.getLogger("nestpipe")

SCHEDULES = ("serial",)


@dataclasses.dataclass
class FitResult:
    """What a call of `fit` did, the same on every worker."""

    steps: int
    samples: int
    seconds: float
    first_loss: float
    last_loss: float
    skipped: int  # batches left out because something in them was not finite

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class Trainer:
    """Trains a model whose embedding rows live on all workers, by key.

    Start the same program on every worker (`nestpipe train`, or torchrun); each calls fit with its own batches. In a
    plain `python` process there is one worker.

    model: an nn.Module; `forward(batch, rows)` returns losses [B], one per sample, or an Output. rows[name] is a Jagged of
        rows for a sequence feature, a tensor [B, dim] for a pooled one.
    tables, features: what it reads.
    dense_optimizer: makes a torch optimizer from the model's parameters.
    schedule: "serial".
    micro_batches: cuts each batch into this many parts, run one after the other, with one update for all.
    seed: of the first values of rows.
    on_nonfinite: "raise", or "skip": a batch with NaN or infinity in an input (on that worker) or a loss (on all) is left
        out and counted. No row is updated then; rows of keys that were new have been born. Gradients are not looked at.
    data_timeout: seconds without a batch after which a data source counts as dead.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        dense_optimizer: Callable[[Any], torch.optim.Optimizer],
        schedule: str = "serial",
        micro_batches: int = 1,
        seed: int = 0,
        on_nonfinite: str = "raise",
        data_timeout: float = 300.0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}, {did_you_mean(schedule, SCHEDULES)}")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches must be a whole number of at least 1, got {micro_batches!r}")
        plan = ExchangePlan(tables, features)
        process.join_group(data_timeout)
        self.group = dist.group.WORLD if dist.is_initialized() else None
        # Rows and dense gradients travel in groups of their own: each is used by one thread, in one order.
        own = dist.new_group(backend="gloo", timeout=process.patience(data_timeout)) if self.group is not None else None
        self._transport = Transport(own)
        self.rank, self.world = self._transport.rank, self._transport.world
        self.model = model
        self.micro_batches = micro_batches
        self.steps = 0  # batches so far
        self._lr_factor = 1.0
        self.skipped = 0  # batches left out so far: inputs of this worker, losses of all
        self._seed = seed
        self._skip = on_nonfinite == "skip"
        self._data_timeout = data_timeout
        self._names = [feature.name for feature in features]
        if self.world > 1 or micro_batches > 1:
            _refuse_batch_norm(model)
        self._dense = Dense(model, dense_optimizer, self.group)
        stores = [MemoryStore(table, seed=seed, world=self.world) for table in tables]
        self._ops = StepOperations(plan, stores, self._transport, self._dense, skip_nonfinite=self._skip)
        self._arena = Arena()
        self._told = False  # what travels how: said once, after the first batch has decided it

    # -- training ----------------------------------------------------------------------------------------------------

    def fit(
        self, batches: Iterable[Batch], *, steps: int | None = None, on_step: Callable[[StepResult], None] | None = None
    ) -> FitResult:
        """Trains until `steps` are done or no worker has batches left. Workers may have different numbers of batches:
        those that run out early go on serving rows, and all return together. Batches are read ahead: a source must not
        write into tensors that it has given away."""
        loader = Loader(batches, self._names, skip_nonfinite=self._skip, timeout=self._data_timeout, limit=steps)
        started, done, samples, skipped = time.perf_counter(), 0, 0, 0
        first = last = float("nan")
        try:
            while steps is None or done < steps:
                batch, error = None, None
                try:
                    batch = loader.next()
                except Exception as problem:
                    error = problem
                result = self._step(batch, error)
                if result is None:
                    break
                done += 1
                samples += result.samples
                skipped += result.skipped
                if result.weight and not result.skipped:
                    first, last = (result.loss if np.isnan(first) else first), result.loss
                if on_step is not None:
                    on_step(result)
        finally:
            loader.close()
        seconds = time.perf_counter() - started
        self.skipped += loader.skipped
        skipped += int(self._transport.sum(np.array([loader.skipped]))[0])
        return FitResult(done, samples, seconds, first, last, skipped)

    def step(self, batch: Batch | None) -> StepResult | None:
        """One step of your own loop. Every worker calls it; one without data passes None. Returns None once all did."""
        error: Exception | None = None
        if batch is not None:
            try:
                checked(batch, self._names)
            except NotFinite as problem:
                batch, error = Batch.empty(self._names), None if self._skip else problem
                self.skipped += self._skip
            except Exception as problem:
                batch, error = None, problem
        return self._step(batch, error)

    def _step(self, batch: Batch | None, error: BaseException | None) -> StepResult | None:
        has_data = batch is not None
        batch = Batch.empty(self._names) if batch is None else batch
        bounds = micro_batch_bounds(batch.size, self.micro_batches)
        ctx = Context(self.steps, batch, bounds, self._arena, error=error)
        self.model.train()
        result = serial_step(self._ops, ctx, has_data=has_data)
        if result is not None:
            self.steps += 1
            self.skipped += result.skipped
        if not self._told:
            self._told = True
            if self.rank == 0:
                for line in self.describe():
                    log.info(line)
        return result

    def scale_lr(self, factor: float) -> None:
        """Sets all learning rates, of rows and of the dense optimizer, to `factor` times what was declared."""
        for store in self._stores():
            store.lr = store.table.optimizer.lr * factor
        self._dense.scale_lr(factor)
        self._lr_factor = factor

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch], metrics: dict[str, Any]) -> dict[str, float]:
        """The mean loss, and metrics of the model's predictions against the labels, over all workers' batches.

        No row is born, counted or changed. Metrics are objects such as nestpipe.metrics.AUC().
        """
        totals = np.zeros(2)

        def judge(batch: Batch, rows: dict[str, Any]) -> None:
            output = checked_output(self.model(batch, rows), batch.size)
            totals[0] += float(output.losses.double().sum())
            totals[1] += batch.size if output.weights is None else float(output.weights.double().sum())
            for name, metric in metrics.items():
                if output.predictions is None or batch.labels is None:
                    raise ValueError(f"metric {name!r} needs Output.predictions from the model and labels in the batch")
                metric.update(output.predictions, batch.labels)

        self._judge(batches, judge)
        loss, weight = self._transport.sum(totals).tolist()
        results = {name: metric.compute(group=self.group) for name, metric in metrics.items()}
        return {"loss": loss / weight if weight else float("nan"), **results}

    def evaluate_ranking(
        self,
        batches: Iterable[Batch],
        *,
        table: str,
        candidates: Tensor,
        ks: Sequence[int] = (10, 50),
        history: str = "history",
        exclude_seen: bool = True,
    ) -> dict[str, float]:
        """HR@k and NDCG@k of `batch.labels` (target keys) ranked among all candidates, over all workers' batches.

        The model needs `query(batch, rows) -> [B, D]` and `score(query, candidate_rows) -> [B, N]`.
        exclude_seen: leaves the keys of the sample's own `history` out of its ranking (the target stays).
        """
        if exclude_seen and history not in self._names:
            raise ValueError(f"evaluate_ranking: history {history!r}, {did_you_mean(history, self._names)}")
        metrics: dict[str, Any] = {}
        for k in ks:
            metrics[f"HR@{k}"], metrics[f"NDCG@{k}"] = HitRate(k), NDCG(k)
        candidate_rows = self.rows(table, candidates)

        def judge(batch: Batch, rows: dict[str, Any]) -> None:
            if batch.labels is None:
                raise ValueError("ranking needs batch.labels: the key of each sample's target")
            ranks = rank_all(
                self.model.score,  # type: ignore[arg-type]
                queries_BD=self.model.query(batch, rows),  # type: ignore[operator]
                candidates_ND=candidate_rows,
                candidate_keys=candidates,
                target_keys=batch.labels,
                exclude=batch.keys[history] if exclude_seen else None,
            )
            for metric in metrics.values():
                metric.update(ranks)

        self._judge(batches, judge)
        return {name: metric.compute(group=self.group) for name, metric in metrics.items()}

    def _judge(self, batches: Iterable[Batch], judge: Callable[[Batch, dict[str, Any]], None]) -> None:
        """Calls judge(batch, rows) for each batch of this worker, and serves rows until no worker has batches left.
        What goes wrong on one worker is raised on all."""
        loader = Loader(batches, self._names, skip_nonfinite=False, timeout=self._data_timeout)
        self.model.eval()
        try:
            with torch.inference_mode():
                for number in itertools.count():
                    batch, error = None, None
                    try:
                        batch = loader.next()
                    except Exception as problem:
                        error = problem
                    ctx = self._lookup(self._ops, batch, error, number=number)
                    if ctx is None:
                        return
                    try:
                        if ctx.batch.size:
                            judge(*self._ops.inputs(ctx, 0, train=False))
                    except Exception as problem:
                        ctx.error = problem
                    self._ops.announce(ctx)
                    self._ops.agree(ctx)
        finally:
            loader.close()
            self.model.train()

    def _lookup(
        self, ops: StepOperations, batch: Batch | None, error: BaseException | None = None, *, number: int = 0
    ) -> Context | None:
        """The context of a batch whose rows have been read, or None if no worker has one."""
        has_data = batch is not None
        batch = Batch.empty([f.name for f in ops.plan.features]) if batch is None else batch
        ctx = Context(number, batch, [0, batch.size], self._arena, error=error)
        if not ops.route(ctx, has_data=has_data):
            return None
        ops.read(ctx)
        ops.emb(ctx)
        return ctx

    def rows(self, table: str, keys: Tensor) -> Tensor:
        """The rows of any keys, [len(keys), dim], from whichever workers hold them. Every worker must call it.

        A key without a row gives the values it would be born with.
        """
        (store,) = self._stores(table)
        plan = ExchangePlan([dataclasses.replace(store.table, pooled_at="source")], [Feature("keys", table)])
        ops = StepOperations(plan, [store], self._transport, self._dense, skip_nonfinite=False)
        batch, error = None, None
        try:
            batch = checked(Batch({"keys": Jagged.from_lengths(keys, torch.tensor([len(keys)]))}), ["keys"])
        except Exception as problem:
            error = problem
        ctx = self._lookup(ops, batch, error)
        assert ctx is not None
        return ops.inputs(ctx, 0, train=False)[1]["keys"].values

    # -- state -------------------------------------------------------------------------------------------------------

    def _stores(self, table: str | None = None) -> list[MemoryStore]:
        stores = [store for store in self._ops.stores if table is None or store.table.name == table]
        if not stores:
            raise ValueError(f"table {table!r}, {did_you_mean(str(table), [s.table.name for s in self._ops.stores])}")
        return stores

    def save(self, path: str | Path) -> None:
        """Writes tables, model and optimizers to a new folder, which appears only when it is complete."""
        # How a table travels decides the order of sums, so a run that goes on must not decide anew.
        at_owner = {store.table.name: how for store, how in zip(self._stores(), self._ops.plan.at_owner, strict=True)}
        settings = {"lr_factor": self._lr_factor, "pooled_at_owner": at_owner}
        checkpoint.save(Path(path), self._stores(), self._dense, self._transport, step=self.steps, settings=settings)

    def load(self, path: str | Path) -> None:
        """Reads what `save` wrote, on any number of workers, into a trainer that has not trained yet."""
        if self.steps:
            raise ValueError(f"load into a trainer that has not trained yet; this one has done {self.steps} steps")
        self.steps, settings = checkpoint.load(Path(path), self._stores(), self._dense, self._transport)
        self.scale_lr(settings["lr_factor"])
        for k in self._ops.plan.undecided:
            self._ops.plan.resume(k, settings["pooled_at_owner"][self._ops.plan.tables[k].name])

    def digest(self) -> str:
        """A hash over every table's (key, row, optimizer state) and the model's weights.

        The same for any order of rows and any number of workers that hold the same bits.
        """
        sums = np.array([store.digest() for store in self._stores()], np.uint64)
        sums = self._transport.sum(sums.view(np.int64)).view(np.uint64)  # wraps around, as it should
        total = hashlib.blake2b(digest_size=16)
        for store, (a, b) in sorted(zip(self._stores(), sums.tolist(), strict=True), key=lambda one: one[0].table.name):
            total.update(f"{store.table.name} {a:016x} {b:016x};".encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def table_stats(self) -> dict[str, StoreStats]:
        """Rows and bytes of every table, summed over workers."""
        sums = self._transport.sum(np.array([store.stats() for store in self._stores()], np.int64))
        return {store.table.name: StoreStats(*row) for store, row in zip(self._stores(), sums.tolist(), strict=True)}

    def bytes_sent(self) -> int:
        """Bytes of keys, rows and gradients that all workers together have sent to others so far."""
        return int(self._transport.sum(np.array([self._transport.bytes_sent]))[0])

    def describe(self) -> list[str]:
        """What travels how, and what is overlapped: one line each."""
        return [
            *self._ops.plan.describe(),
            f"schedule serial, {self.micro_batches} micro-batch(es): nothing is overlapped but reading data (in a thread) "
            f"and the sum of dense gradients (with the last backward)",
        ]


def _refuse_batch_norm(model: nn.Module) -> None:
    """It mixes the samples of a batch, so splitting the batch over workers or micro-batches would change the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"the model's {name or type(module).__name__} is a batch norm, which mixes samples: its result would depend "
                f"on how the batch is split over workers and micro-batches; use LayerNorm, or one worker and micro_batches=1"
            )

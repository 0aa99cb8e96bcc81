"""Trainer: fit, evaluate, save, load."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe import checkpoint as saved
from nestpipe import process, trace
from nestpipe.arena import Arena
from nestpipe.batch import Batch, NotFinite, one_list
from nestpipe.engine.context import StepResult
from nestpipe.engine.dense import Dense
from nestpipe.engine.describe import overlap
from nestpipe.engine.draws import watched
from nestpipe.engine.engine import Engine
from nestpipe.engine.evaluation import Judge, judge_all, judge_losses, judge_ranking, lookup, start_anew
from nestpipe.engine.heartbeat import Heartbeat
from nestpipe.engine.loader import Loader, checked
from nestpipe.engine.mixing import refuse_mixing
from nestpipe.engine.placing import place_as_saved, place_by_first_batch
from nestpipe.engine.step import StepOperations, Store
from nestpipe.engine.tuning import STEPS, Tuning
from nestpipe.errors import TrainingError, describe, did_you_mean, from_the_users_line
from nestpipe.exchange.plan import ExchangePlan, place
from nestpipe.exchange.transport import Transport
from nestpipe.metrics import NDCG, SEEN_TARGETS, HitRate
from nestpipe.schedule.setting import Setting
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore, StoreStats
from nestpipe.tables import Feature, Table, declarations

log = logging.getLogger("nestpipe")
T = TypeVar("T")
P = ParamSpec("P")
CLOSED = "it is closed"


def _between_steps(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method for which no batch may be in flight; `what` it does, for errors."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def checked_method(*args: P.args, **kwargs: P.kwargs) -> T:
            trainer = args[0]
            assert isinstance(trainer, Trainer)
            trainer._must_be_quiet(what)
            trainer._calls.append(what)
            try:
                return method(*args, **kwargs)
            finally:
                trainer._calls.pop()

        return checked_method

    return decorate


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


class Taken(NamedTuple):
    """A batch, where in this worker's data it was, and how many had been skipped when it was asked for, and when it came."""

    batch: Batch
    place: int
    skipped_before: int
    skipped: int


class Trainer:
    """Trains a model whose embedding rows live on all workers, by key.

    Start the same program on every worker (`nestpipe train`, or torchrun); each calls fit with its own batches. In a
    plain `python` process there is one worker.

    model: an nn.Module; `forward(batch, rows)` returns losses [B], one per sample, or an Output. rows[name] is a Jagged of
        rows for a sequence feature, a tensor [B, dim] for a pooled one. With micro-batches the loss of a sample must not
        depend on the others; see `micro_batches`, and Jagged for reductions of each sample by itself.
    tables, features: what it reads. Without any it is plain data-parallel training, with `rows` an empty dict.
    dense_optimizer: makes a torch optimizer from the model's parameters.
    schedule: "serial"; "dbp" (lookups of the next batches hidden behind the compute of this one); "fwp" (rows and gradients
        travel behind the compute of other micro-batches); "nested" (both): all four give the same result to the bit. Or
        "stale" (for comparison: rows one update behind).
    micro_batches: cuts each batch into this many parts, run one after the other, with one update for all; "auto": as many
        as turn out fastest in the first steps of `fit`. A model whose loss mixes samples (in-batch negatives) says
        `mixes_samples = True` and is then refused here; `False`: it does not, or is meant to mix those of a micro-batch. If it
        says nothing, it is tried on the first batch, and refused if it does.
    window_cache: each row crosses the wire once per batch, however many micro-batches use it. False: once for each of them,
        for comparison.
    clustering: how samples are dealt to micro-batches: "window" (few rows to wait for at both ends of the batch), "shared"
        (samples that share keys together), "taper" (window, with smaller micro-batches at both ends: even less to wait
        for), "none" (as they come). Nothing to do with one worker or one micro-batch.
    look_ahead: how many batches may be on their way behind the one that computes; None is what the schedule's stages need.
    storage: folder for tables of tier "disk": working files, one per table and worker, gone when the trainer is closed.
    record: keeps every operation's start and end, for `save_trace`.
    check_freshness: debug mode: carries a version with every row and raises if a batch reads one that is not fresh. Slow.
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
        micro_batches: int | str = 1,
        window_cache: bool = True,
        clustering: str = "window",
        look_ahead: int | None = None,
        seed: int = 0,
        on_nonfinite: str = "raise",
        data_timeout: float = 300.0,
        storage: str | Path = "nestpipe-storage",
        record: bool = False,
        check_freshness: bool = False,
    ) -> None:
        # What does not fit together is said before anything is opened.
        setting = Setting(schedule, micro_batches, window_cache, clustering, look_ahead)
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        process.check_timeout("data_timeout", data_timeout)
        ExchangePlan(tables, features)
        process.join_group(data_timeout)
        self.group = dist.group.WORLD if dist.is_initialized() else None
        # What is opened here is given up by `close`, when the trainer is dropped, or when this fails.
        opened = contextlib.ExitStack()
        self._close = weakref.finalize(self, opened.close)
        try:
            # Keys, rows and dense gradients travel in groups of their own: each is used by one thread, in one order.
            self._keys, self._rows = (Transport(self._new_group(data_timeout)) for _ in range(2))
            opened.callback(self._keys.close)
            opened.callback(self._rows.close)
            self.rank, self.world = self._rows.rank, self._rows.world
            self.model = model
            self.steps = 0  # batches so far
            self.config: dict[str, Any] | None = None  # what it was made from: goes into checkpoints, as JSON
            self._taken = 0  # batches that this worker has taken from its data, those left out included
            self._loader: Loader | None = None
            self._recent: collections.deque[Taken] = collections.deque()  # the last ones that it has taken
            self._left: tuple[Any, Loader] | None = None  # an iterator, and who has read ahead in it
            self._stopped = False
            self._saving: list[saved.Background] = []
            self._run_id: str | None = uuid.uuid4().hex  # goes into checkpoints; one that goes on keeps it
            self._lr_factor = 1.0
            self.skipped = 0  # batches left out so far: inputs of this worker, losses of all
            self._skip = on_nonfinite == "skip"
            self._data_timeout = data_timeout
            self._seed, self._storage = seed, Path(storage)
            self._names = [feature.name for feature in features]
            refuse_mixing(model, rank=self.rank, world=self.world, micro_batches=micro_batches)
            dense: list[Dense] = []
            self._rows.together(lambda: dense.append(Dense(model, dense_optimizer)), what="model and dense_optimizer")
            (self._dense,) = dense
            options = {"seed": seed, "on_nonfinite": on_nonfinite, "record": record, "check_freshness": check_freshness}
            told = {**declarations(tables, features), **setting.options(), **options, **self._dense.declared()}
            self._rows.compare(told)
            if self.group is not None and self.world > 1:
                self._dense.connect(self.group)
            plan = ExchangePlan(tables, features, place(tables, features, self.world))
            self._opened = opened
            stores = self._open_stores(plan)
            self._ops = StepOperations(
                plan,
                stores,
                self._keys,
                self._rows,
                self._dense,
                skip_nonfinite=self._skip,
                check_freshness=check_freshness,
                try_mixing=micro_batches != 1,
            )
            # With one worker nothing travels, so that it makes no difference who is beside whom.
            self._setting = setting if self.world > 1 else dataclasses.replace(setting, clustering="none")
            self._record = record
            self._tuning = Tuning() if setting.is_auto else None  # until it is done
            self._set_micro_batches(setting.parts)
            self._arena = Arena()
            self._told = False  # what travels how: said once, after the first batch has decided it
            self._torn: str | None = None  # why tables are in between two steps, if they are
            self._calls: list[str] = []  # of this trainer that are running, the innermost last
            if self.world > 1:
                waiting = (self._keys, self._rows, self._dense)
                heart = Heartbeat(
                    self._rows, waiting, self._doing, timeout=process.patience(data_timeout).total_seconds()
                )
                opened.callback(heart.close)
        except BaseException:
            self._close()
            raise

    def _set_micro_batches(self, count: int) -> None:
        self.micro_batches = count
        self._engine = Engine(self._setting.cut_into(count), self._ops, trace=self._record)

    def _new_group(self, timeout: float) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo", timeout=process.patience(timeout)) if self.group is not None else None

    def _open_stores(self, plan: ExchangePlan) -> list[Store]:
        stores: list[Store] = []

        def open_all() -> None:
            for table, owners in zip(plan.tables, plan.owners, strict=True):
                if table.tier == "memory":
                    stores.append(MemoryStore(table, seed=self._seed, owners=owners))
                else:
                    store = DiskStore(table, seed=self._seed, owners=owners, rank=self.rank, folder=self._storage)
                    self._opened.callback(store.close)
                    stores.append(store)

        self._rows.together(open_all, what="tables")
        return stores

    def _empty_stores(self) -> None:
        """As they were at the start."""
        for store in self._ops.stores:
            if isinstance(store, DiskStore):
                store.close()
        self._ops.use(self._open_stores(self._ops.plan))

    def close(self) -> None:
        """Deletes the working files of tables on disk, ends threads and connections, after a moment for a checkpoint that
        is under way; the trainer cannot be used after that. A trainer that is dropped, or a program that ends, does the same."""
        for one in self._saving:
            one.close()
        self._torn, self.group = CLOSED, None
        self._dense.close()
        self._close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _doing(self) -> tuple[str, float] | None:
        """For others that wait for this worker: what it does, and since when; None if it waits as well, or is not asked to do
        anything."""
        waits = any(place.waiting_since is not None for place in (self._keys, self._rows, self._dense))
        work = self._engine.longest_work()
        if work is not None and not (waits and work[0].startswith("on_step")):
            return work
        return None if waits or not self._calls else (self._calls[-1], time.monotonic())

    # -- training ----------------------------------------------------------------------------------------------------

    @_between_steps("train")
    def fit(
        self,
        batches: Iterable[Batch],
        *,
        steps: int | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        pause_every: int | Sequence[int] | None = None,
    ) -> FitResult:
        """Trains until `steps` are done or no worker has batches left. Workers may have different numbers of batches:
        those that run out early go on serving rows, and all return together. Batches are read ahead, in a thread: a source
        must not write into tensors that it has given away, and draws its random numbers from a generator of its own.

        on_step: called after every step, on every worker.
        pause_every: every so many steps (counted from the trainer's first) the pipeline runs empty before on_step is
            called, so that it may evaluate or save; with a schedule that looks ahead it may not do so at other steps. Several
            numbers: at the multiples of each.
        """
        pauses = [pause_every] if isinstance(pause_every, int) else list(pause_every or ())
        if pauses and min(pauses) < 1:
            raise ValueError(f"pause_every must be at least 1, got {pause_every}")
        self._rows.compare({"fit(steps)": steps, "fit(pause_every)": pauses, "steps done before": self.steps})
        left, self._left = self._left, None
        loader = Loader(
            watched(batches, tell=log.warning if self.rank == 0 else log.debug),
            self._names,
            skip_nonfinite=self._skip,
            timeout=self._data_timeout,
            limit=steps,
            after=left[1] if left is not None and left[0] is batches else None,
            stop_asked=lambda: self._ops.stop_asked or self._ops.has_quit,
        )
        self._loader, self._stopped = loader, False
        self._ops.has_quit = self._ops.quitting = False
        started, begin, samples, skipped = time.perf_counter(), self.steps, 0, 0
        first = last = float("nan")
        problem: BaseException | None = None  # of the user's on_step

        def count(result: StepResult) -> None:
            nonlocal samples, skipped, first, last, problem
            samples += result.samples
            skipped += result.skipped
            if result.weight and not result.skipped:
                first, last = (result.loss if np.isnan(first) else first), result.loss
            if on_step is None or self._ops.quitting:  # then it is called on no worker any more
                return
            try:
                on_step(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # All workers hear of it and stop after the same step, with nothing half done.
                problem, self._ops.has_quit = error, True

        def interrupted() -> None:
            log.warning("Ctrl-C: training stops after the batches under way; press it again to stop at once")
            self.stop()

        try:
            with process.first_interrupt(interrupted) as asked:
                while steps is None or self.steps < begin + steps:
                    stop = sys.maxsize if steps is None else begin + steps
                    for every in pauses:
                        stop = min(stop, self.steps - self.steps % every + every)
                    if self._tuning is not None:
                        stop = min(stop, self.steps + STEPS)
                        self._tuning.begin()
                    self._run(self._take, stop, count, abandon=loader.stop)
                    if self._engine.untrained:
                        self._give_back(self._engine.untrained)
                    if self._rows.any(problem is not None):
                        break
                    self._stopped = self._engine.stopped
                    if self._tuning is not None and not self._stopped:
                        self._tune(self._tuning)
                    if self.steps < stop or self.stopped:
                        break  # out of data, or asked to
        finally:
            loader.close()
            self._taken, self._loader = self.position, None
            # Who goes on with the same iterator gets what was read ahead and not trained on.
            self._left = (batches, loader) if isinstance(batches, Iterator) else None
            self._recent.clear()
            self.skipped += loader.skipped
            if self.stopped or asked.is_set():
                self._ops.stop_asked = False  # it has been heard: training may go on with another call
        failure = None
        try:
            self._rows.raise_together(problem, what=f"on_step, after step {self.steps}")
        except TrainingError as error:
            failure = from_the_users_line(problem or error)
        if failure is not None:
            raise failure
        if asked.is_set():
            raise KeyboardInterrupt(f"training has stopped after step {self.steps}; it can go on from there")
        seconds = time.perf_counter() - started
        skipped += int(self._rows.sum(np.array([loader.skipped]))[0])
        if self.steps == begin and steps != 0 and self.rank == 0:
            log.warning("fit has trained nothing: no worker had a batch")
        return FitResult(self.steps - begin, samples, seconds, first, last, skipped)

    def _take(self) -> Batch | None:
        assert self._loader is not None
        place, skipped = self.position, self._loader.skipped
        batch = self._loader.next()
        if batch is not None:
            self._taken += 1
            self._recent.append(Taken(batch, place, skipped, self._loader.skipped))
            while len(self._recent) > self._engine.schedule.look_ahead + 2:
                self._recent.popleft()
        return batch

    def _give_back(self, count: int) -> None:
        """The last `count` batches have been taken and not trained on: who goes on gets them again."""
        assert self._loader is not None
        taken = list(self._recent)[-count:]
        self._loader.take_back([(entry.batch, entry.skipped) for entry in taken], taken[0].skipped_before)
        self._taken = taken[0].place - taken[0].skipped_before

    @property
    def position(self) -> int:
        """How many batches this worker has taken from its data, those left out because of NaN or infinity included: where a run
        that goes on from a checkpoint has to go on reading."""
        return self._taken + (0 if self._loader is None else self._loader.skipped)

    def stop(self) -> None:
        """Asks `fit` to return: all workers do so after the same step, within a few. For signal handlers and other threads."""
        self._ops.stop_asked = True

    @property
    def stop_asked(self) -> bool:
        """Whether this worker has been asked to stop, and `fit` has not heard it yet."""
        return self._ops.stop_asked

    @property
    def stopped(self) -> bool:
        """Whether `fit` has returned because a worker was asked to stop."""
        return self._stopped

    def _tune(self, tuning: Tuning) -> None:
        """After a run of steps: tries another number of micro-batches, or fixes it."""
        tuning.next(self._rows)
        if tuning.micro_batches != self.micro_batches:
            self._set_micro_batches(tuning.micro_batches)
        if tuning.done:
            self._tuning = None
            if self.rank == 0:
                process.tell(tuning)

    @_between_steps("train")
    def step(self, batch: Batch | None) -> StepResult | None:
        """One step of your own loop. Every worker calls it; one without data passes None. Returns None once all did.

        Nothing can be looked up ahead here: `fit` is what hides data movement.
        """
        if self._tuning is not None:
            raise ValueError(
                "micro_batches='auto' is measured by fit; give a number to a trainer whose loop is your own"
            )
        results: list[StepResult] = []
        self._taken += batch is not None

        def read() -> Batch | None:
            if batch is None:
                return None
            try:
                return checked(batch, self._names)
            except NotFinite:
                if not self._skip:
                    raise
                self.skipped += 1
                return Batch.empty(self._names)

        self._run(read, self.steps + 1, results.append)
        return results[0] if results else None

    def _run(
        self,
        read: Callable[[], Batch | None],
        stop: int,
        on_step: Callable[[StepResult], None],
        *,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Trains up to step `stop` (exclusive), or until no worker has data."""
        if self._ops.plan.unplaced:
            read = place_by_first_batch(self._ops, read)

        def finished(result: StepResult) -> None:
            self.steps += 1
            self.skipped += result.skipped
            if self._tuning is not None:
                self._tuning.tick(result, self.world)
            elif not self._told:
                self._told = True
                if self.rank == 0:
                    for line in self.describe():
                        process.tell(line)
            on_step(result)

        if not self.model.training:  # modules that the user has put into eval mode inside a model that trains stay so
            self.model.train()
        try:
            self._engine.run(read, first=self.steps, last=stop, on_step=finished, abandon=abandon)
        except BaseException as error:
            self._torn = self._engine.between(self.steps)
            if isinstance(error, TrainingError):  # which all have: so they can tell each other
                causes = self._rows.gather_objects(self._torn)
                self._torn = next(
                    (f"rank {rank}: {text}" for rank, text in enumerate(causes) if text is not None), None
                )
                from_the_users_line(error)
            elif self.world > 1:
                self._torn = f"this worker left alone ({describe(error)}), and the others are elsewhere"
            raise

    def _must_be_quiet(self, what: str) -> None:
        if self._torn == CLOSED:
            raise ValueError(f"cannot {what}: the trainer is closed; make a new one")
        if self._torn is not None:
            raise ValueError(
                f"cannot {what}: training ended in the middle of step {self.steps + 1}, and the tables are in between two steps "
                f"({self._torn}); load a checkpoint into a new trainer"
            )
        if self._engine.in_flight:
            raise ValueError(
                f"cannot {what} while batches are in flight under schedule {self._engine.schedule.name!r}; do it between "
                f"calls of fit, or in on_step at the steps of fit(pause_every=N)"
            )

    def scale_lr(self, factor: float) -> None:
        """Sets all learning rates, of rows and of the dense optimizer, to `factor` times what was declared."""
        if not 0 <= factor < float("inf"):
            raise ValueError(f"scale_lr: the factor must be a number of at least 0, got {factor}")
        self._scale_row_lr(factor)
        self._dense.scale_lr(factor)

    def _scale_row_lr(self, factor: float) -> None:
        for store in self._ops.stores:
            store.lr = store.table.optimizer.lr * factor
        self._lr_factor = factor

    # -- evaluation --------------------------------------------------------------------------------------------------

    @_between_steps("evaluate")
    def evaluate(self, batches: Iterable[Batch], metrics: dict[str, Any]) -> dict[str, float]:
        """The mean loss, and metrics of the model's predictions against the labels, over all workers' batches.

        No row is born, counted or changed. Metrics are objects such as nestpipe.metrics.AUC(), or your own with
        `update(predictions, labels)`, `compute(group=...)` and `reset()`. They are reset first: what they were fed before
        does not count. One without `reset()` is taken once.
        """
        self._rows.compare({f"metric {name!r}": type(metric).__name__ for name, metric in metrics.items()})
        self._rows.together(lambda: start_anew(metrics), what="metrics")
        judged, totals = judge_losses(self.model, metrics)
        self._judge(batches, judged)
        loss, weight = self._rows.sum(totals).tolist()
        results = {name: metric.compute(group=self.group) for name, metric in metrics.items()}
        return {"loss": loss / weight if weight else float("nan"), **results}

    @_between_steps("evaluate")
    def evaluate_ranking(
        self,
        batches: Iterable[Batch],
        *,
        table: str,
        candidates: Tensor,
        ks: Sequence[int] = (10, 50),
        history: str = "history",
        exclude_seen: bool = True,
        seen_targets: str = "rank",
    ) -> dict[str, float]:
        """HR@k and NDCG@k of `batch.labels` (target keys) ranked among all candidates, over all workers' batches; and how many
        `targets` were ranked, and how many `seen_targets` there were: keys that the user has had before.

        The model needs `query(batch, rows) -> [B, D]` and `score(query, candidate_rows) -> [B, N]`.
        exclude_seen: leaves what the user has had out of the ranking: the keys of `batch.dense["seen"]`, or where the data
            gives none, of the sample's `history`.
        seen_targets: what becomes of a target that is among them: "rank": it is ranked all the same; "miss": it is left out
            too, and counts as not found (as in the public code of HSTU); "skip": its sample does not count.
        """
        if seen_targets not in SEEN_TARGETS:
            raise ValueError(f"seen_targets {seen_targets!r}, {did_you_mean(str(seen_targets), SEEN_TARGETS)}")
        if seen_targets == "miss" and not exclude_seen:
            raise ValueError("seen_targets='miss' is for targets that exclude_seen leaves out; set exclude_seen=True")
        if exclude_seen and history not in self._names:
            raise ValueError(f"evaluate_ranking: history {history!r}, {did_you_mean(history, self._names)}")
        metrics: dict[str, Any] = {}
        for k in ks:
            metrics[f"HR@{k}"], metrics[f"NDCG@{k}"] = HitRate(k), NDCG(k)
        rows = self.rows(table, candidates)
        judged, counts = judge_ranking(
            self.model,
            metrics,
            rows,
            candidates,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
        )
        self._judge(batches, judged)
        ranked, seen = self._rows.sum(counts).tolist()
        results = {name: metric.compute(group=self.group) for name, metric in metrics.items()}
        return {**results, "targets": ranked, "seen_targets": seen}

    def _judge(self, batches: Iterable[Batch], judge: Judge) -> None:
        loader = Loader(batches, self._names, skip_nonfinite=False, timeout=self._data_timeout)
        judge_all(self._ops, self._arena, self.model, loader, judge)

    @_between_steps("read rows")
    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """The rows of any keys, [len(keys), dim], from whichever workers hold them. Every worker must call it.

        A key without a row gives the values it would be born with.
        keys: int64, in a tensor, a NumPy array or a list.
        """
        (store,) = self._stores(table)
        declared = dataclasses.replace(store.table, pooled_at="source")
        plan = ExchangePlan([declared], [Feature("keys", table)], [store.owners])
        ops = StepOperations(plan, [store], self._keys, self._rows, self._dense, skip_nonfinite=False)
        batch, error = None, None
        try:
            batch = checked(Batch({"keys": one_list(keys)}), ["keys"])
        except Exception as problem:
            error = problem
        ctx = lookup(ops, self._arena, batch, error)
        assert ctx is not None
        return ops.inputs(ctx, 0, train=False)[1]["keys"].values

    # -- state -------------------------------------------------------------------------------------------------------

    def _stores(self, table: str | None = None) -> list[Store]:
        stores = [store for store in self._ops.stores if table is None or store.table.name == table]
        if table is not None and not stores:
            raise ValueError(f"table {table!r}, {did_you_mean(str(table), [s.table.name for s in self._ops.stores])}")
        return stores

    @_between_steps("save")
    def save(self, path: str | Path) -> None:
        """Writes tables, model, optimizers, random states and the place in the data to a new folder, which appears only when it
        is complete."""
        self._wait_for_checkpoints()  # one of them may be the same
        saved.save(Path(path), self._content(), self._rows)

    def checkpoints(self, folder: str | Path, *, keep: int = 3, full_every: int = 1) -> saved.Background:
        """For checkpoints that are written while training goes on; see `checkpoint`. The folder is for those of one run: a new
        one, or the one that this trainer was loaded from.

        keep: how many stay. full_every: of so many checkpoints one is full, the others hold what has changed since it.
        """
        if keep < 1 or full_every < 1:
            raise ValueError(f"keep and full_every must be at least 1, got {keep} and {full_every}")
        if full_every > 1:
            for store in self._stores():
                store.track_changes()
        made = saved.Background(
            Path(folder),
            self._rows,
            run=self._run_id,
            step=self.steps,
            keep=keep,
            full_every=full_every,
            tell=log.warning,
        )
        self._saving.append(made)
        return made

    @_between_steps("save")
    def checkpoint(self, into: saved.Background) -> None:
        """Begins FOLDER/step-N; training may go on at once. Every worker calls it, between steps or in a pause of `fit`."""
        self._wait_for_checkpoints()  # a table keeps its rows as they were for one at a time
        into.begin(self._content(into.next_base()))

    def _wait_for_checkpoints(self) -> None:
        for background in self._saving:
            background.wait()

    def _content(self, base: saved.Base | None = None) -> saved.Content:
        # How a table travels decides the order of sums, so a run that goes on must not decide anew.
        plan = self._ops.plan
        names = [store.table.name for store in self._stores()]
        measured = self.micro_batches if self._setting.is_auto and self._tuning is None else None
        settings = {
            "lr_factor": self._lr_factor,
            "pooled_at_owner": dict(zip(names, plan.at_owner, strict=True)),
            "micro_batches": measured,
            "config": self.config,
            "run": self._run_id,
            "owners": {name: None if k in plan.unplaced else plan.owners[k].tolist() for k, name in enumerate(names)},
        }
        return saved.Content(self._stores(), self._dense, self.steps, self.position, settings, base)

    def load(self, path: str | Path, *, tables: Sequence[str] | None = None) -> None:
        """Reads what `save` wrote, on any number of workers, into a trainer that has not trained yet.

        tables: only these of the checkpoint, into the tables of the same names; the others start anew.
        """
        if self._torn == CLOSED:
            self._must_be_quiet("load")
        used = self.steps > 0 or self._torn is not None or not all(store.is_empty for store in self._stores())
        if self._rows.any(used):
            raise ValueError(
                f"load into a trainer that has not trained yet; this one has done {self.steps} steps"
                + ("" if self.steps else " and failed in its first: it has looked up keys. Make a new one")
            )
        self._calls.append("load")
        try:
            loaded = saved.load(
                Path(path),
                self._stores(),
                self._dense,
                self._rows,
                tables=tables,
                place=lambda table, owners: place_as_saved(self._ops, table, owners),
            )
        except BaseException:
            self._empty_stores()  # all or nothing
            raise
        finally:
            self._calls.pop()
        self.steps, settings = loaded.step, loaded.settings
        if tables is None:
            self._run_id = settings.get("run")
        # With another number of workers the data is cut otherwise: as many batches of all workers are passed over.
        same = len(loaded.positions) == self.world
        self._taken = loaded.positions[self.rank] if same else sum(loaded.positions) // self.world
        if loaded.torch_rng is not None:
            saved.set_torch_rng(loaded.torch_rng)
        # Those of the dense optimizer have come with it: a scheduler of the user's own may have set them.
        self._scale_row_lr(settings["lr_factor"])
        if self._tuning is not None and settings.get("micro_batches"):  # measured before
            self._tuning = None
            self._set_micro_batches(settings["micro_batches"])
            if self.rank == 0:
                process.tell(f"micro-batches: {self.micro_batches} [auto; as measured before the checkpoint]")
        plan = self._ops.plan
        for k in plan.undecided:
            name = plan.tables[k].name
            # What is best with one owner is no guide for several.
            if len(settings["owners"].get(name) or ()) != 1 or len(plan.owners[k]) == 1:
                plan.resume(k, settings["pooled_at_owner"].get(name))

    @_between_steps("compute the digest")
    def digest(self) -> str:
        """A hash over every table's (key, row, optimizer state) and the model's weights.

        The same for any order of rows and any number of workers that hold the same bits.
        """
        sums = np.array([store.digest() for store in self._stores()], np.uint64)
        sums = self._rows.sum(sums.view(np.int64)).view(np.uint64)  # wraps around, as it should
        total = hashlib.blake2b(digest_size=16)
        for store, (a, b) in sorted(zip(self._stores(), sums.tolist(), strict=True), key=lambda one: one[0].table.name):
            total.update(f"{store.table.name} {a:016x} {b:016x};".encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            if not isinstance(tensor, Tensor):  # get_extra_state
                total.update(f"{name} {json.dumps(tensor, sort_keys=True)};".encode())
                continue
            total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def on_first(self, work: Callable[[], object], *, what: str) -> None:
        """Done by the first worker while the others wait; what goes wrong is raised on all."""
        self._rows.together(work if self.rank == 0 else None, what=what)

    def wait_for(self, work: Callable[[], T], *, what: str, limit: float) -> T:
        """Does what may take longer than workers wait for each other, at most `limit` seconds; returns when all have done it.
        Raises errors.Stopped on all of them if one is asked to stop meanwhile."""
        return self._rows.patiently(work, what=what, limit=limit, stop_asked=lambda: self.stop_asked)

    def anywhere(self, flag: bool) -> bool:
        """Whether it is so on one of the workers; all of them call it."""
        return self._rows.any(flag)

    def from_first(self, value: Any) -> Any:
        """The first worker's value, on every worker."""
        return self._rows.gather_objects(value)[0]

    @_between_steps("read the sizes of tables")
    def table_stats(self) -> dict[str, StoreStats]:
        """Rows and bytes of every table, summed over workers."""
        sums = self._rows.sum(np.array([store.stats() for store in self._stores()], np.int64))
        return {store.table.name: StoreStats(*row) for store, row in zip(self._stores(), sums.tolist(), strict=True)}

    @_between_steps("count bytes")
    def bytes_sent(self) -> int:
        """Bytes of keys, rows and gradients that all workers together have sent to others so far."""
        return int(self._rows.sum(np.array([self._keys.bytes_sent + self._rows.bytes_sent]))[0])

    def save_trace(self, folder: str | Path) -> None:
        """Writes this worker's recorded operations to the folder of a run, for `nestpipe trace`. With micro_batches="auto",
        those since the number was fixed."""
        trace.save(Path(folder), self._engine.recorded(rank=self.rank, world=self.world))

    def describe(self) -> list[str]:
        """What travels how, and what is overlapped, per table and stage: one line each."""
        lines = overlap(self._engine.setting, self._ops.stores, self._dense.device)
        return [*self._ops.plan.describe(), *lines, *process.describe()]

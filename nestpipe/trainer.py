"""Trainer: fit, evaluate, save, load."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe import checkpoint as saved
from nestpipe import process, trace
from nestpipe.batch import Batch
from nestpipe.engine.context import StepResult
from nestpipe.engine.dense import Dense
from nestpipe.engine.digest import digest
from nestpipe.engine.engine import Around
from nestpipe.engine.evaluation import Evaluation
from nestpipe.engine.heartbeat import Heartbeat
from nestpipe.engine.mixing import refuse_mixing
from nestpipe.engine.placing import place_as_saved
from nestpipe.engine.step import StepOperations, Store
from nestpipe.engine.training import FitResult, Training
from nestpipe.errors import did_you_mean
from nestpipe.exchange.plan import ExchangePlan, place
from nestpipe.exchange.transport import Transport
from nestpipe.exchange.workers import Workers
from nestpipe.schedule.ops import Schedule
from nestpipe.schedule.setting import Setting
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore, StoreStats
from nestpipe.tables import Feature, Table, declarations
from nestpipe.trace.record import RankTrace

log = logging.getLogger("nestpipe")
T = TypeVar("T")
P = ParamSpec("P")
CLOSED = "it is closed"


def _between_steps(what: str, *, meets: bool = True) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method for which no batch may be in flight, and which all workers call; `what` it does, for errors.
    meets: whether workers see first that all of them make this call (a step sees it by itself)."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def checked_method(*args: P.args, **kwargs: P.kwargs) -> T:
            trainer = args[0]
            assert isinstance(trainer, Trainer)
            trainer._must_be_quiet(what)
            trainer._calls.append((what, time.monotonic()))
            try:
                if meets:
                    trainer._ops.meet(what)
                return method(*args, **kwargs)
            finally:
                trainer._calls.pop()

        return checked_method

    return decorate


class Sent(NamedTuple):
    """Bytes of keys, and of rows and their gradients."""

    keys: int
    rows: int


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
    on_nonfinite: "raise", or "skip": a batch with NaN or infinity in an input (on that worker), or in a loss or a gradient (on
        all), is left out and counted. No row is updated then; rows of keys that were new have been born.
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
        self.model = model
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.config: dict[str, Any] | None = None  # what it was made from: goes into checkpoints, as JSON
        self._run_id: str | None = uuid.uuid4().hex  # goes into checkpoints; one that goes on keeps it
        self._lr_factor = 1.0
        self._seed, self._storage = seed, Path(storage)
        self._saving: list[saved.Background] = []
        self._calls: list[tuple[str, float]] = []  # of this trainer that are running, the innermost last; since when
        # What is opened here is given up by `close`, when the trainer is dropped, or when this fails.
        self._opened = contextlib.ExitStack()
        self._close = weakref.finalize(self, self._opened.close)
        try:
            # Keys, rows and dense gradients travel in groups of their own: each is used by one thread, in one order.
            self._keys, self._rows = (Transport(self._new_group(data_timeout)) for _ in range(2))
            self._opened.callback(self._keys.close)
            self._opened.callback(self._rows.close)
            self.rank, self.world = self._rows.rank, self._rows.world
            refuse_mixing(model, rank=self.rank, world=self.world, micro_batches=micro_batches)
            self._dense = self._rows.together(lambda: Dense(model, dense_optimizer), what="model and dense_optimizer")
            options = {"seed": seed, "on_nonfinite": on_nonfinite, "record": record, "check_freshness": check_freshness}
            told = {**declarations(tables, features), **setting.options(), **options, **self._dense.declared()}
            self._rows.compare(told)
            if self.group is not None and self.world > 1:
                self._dense.connect(self.group)
            plan = ExchangePlan(tables, features, place(tables, features, self.world))
            self._ops = StepOperations(
                plan,
                self._open_stores(plan),
                self._keys,
                self._rows,
                self._dense,
                skip_nonfinite=on_nonfinite == "skip",
                check_freshness=check_freshness,
                try_mixing=micro_batches != 1,
            )
            # With one worker nothing travels, so that it makes no difference who is beside whom.
            setting = setting if self.world > 1 else dataclasses.replace(setting, clustering="none")
            skips = on_nonfinite == "skip"
            self._training = Training(
                self._ops, setting, record=record, skip_nonfinite=skips, data_timeout=data_timeout
            )
            self._evaluation = Evaluation(self._ops, data_timeout=data_timeout)
            ops = self._ops  # and not this trainer, which could then not be dropped
            self.workers = Workers(self._rows, lambda: ops.stop_asked)
            if self.world > 1:
                timeout = process.patience(data_timeout).total_seconds()
                heart = Heartbeat(self._rows, (self._keys, self._rows, self._dense), self._doing, timeout=timeout)
                self._opened.callback(heart.close)
        except BaseException:
            self._close()
            raise

    def _new_group(self, timeout: float) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo", timeout=process.patience(timeout)) if self.group is not None else None

    def _open_stores(self, plan: ExchangePlan) -> list[Store]:
        def open_all() -> list[Store]:
            stores: list[Store] = []
            for table, owners in zip(plan.tables, plan.owners, strict=True):
                if table.tier == "memory":
                    stores.append(MemoryStore(table, seed=self._seed, owners=owners))
                else:
                    store = DiskStore(table, seed=self._seed, owners=owners, rank=self.rank, folder=self._storage)
                    self._opened.callback(store.close)
                    stores.append(store)
            return stores

        return self._rows.together(open_all, what="tables")

    def close(self) -> None:
        """Deletes the working files of tables on disk, ends threads and connections, after a moment for a checkpoint that
        is under way; the trainer cannot be used after that. A trainer that is dropped, or a program that ends, does the same."""
        for background in self._saving:
            background.close()
        self._training.torn, self.group = CLOSED, None
        self._dense.close()
        self._close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_be_quiet(self, what: str) -> None:
        torn, engine = self._training.torn, self._training.engine
        if torn == CLOSED:
            raise ValueError(f"cannot {what}: the trainer is closed; make a new one")
        if torn is not None:
            raise ValueError(
                f"cannot {what}: training ended in the middle of step {self.steps + 1}, and the tables are in between two steps "
                f"({torn}); load a checkpoint into a new trainer"
            )
        if engine.in_flight:
            raise ValueError(
                f"cannot {what} while batches are in flight under schedule {engine.schedule.name!r}; do it between "
                f"calls of fit, or in on_step at the steps of fit(pause_every=N)"
            )

    def _doing(self) -> tuple[str, float] | None:
        """For others that wait for this worker: what it does, and since when; None if it waits as well, or is not asked to do
        anything."""
        places = (self._keys, self._rows, self._dense)
        waits = any(place.waiting_since is not None for place in places)
        work = self._training.engine.longest_work()
        if work is not None and not (waits and work[0].startswith("on_step")):
            return work
        if waits or not self._calls:
            return None
        call, since = self._calls[-1]
        return call, max(since, *(place.waited_until for place in places))

    # -- training ----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Batches that have been trained on so far."""
        return self._training.steps

    @property
    def skipped(self) -> int:
        """Batches left out so far because something in them was not finite: inputs of this worker, losses of all."""
        return self._training.skipped

    @property
    def schedule(self) -> Schedule:
        """What runs when, as plain values."""
        return self._training.engine.schedule

    @property
    def micro_batches(self) -> int:
        """Into how many a batch is cut now."""
        return self.schedule.micro_batches

    @property
    def position(self) -> int:
        """How many batches this worker has taken from its data, those left out because of NaN or infinity included: where a run
        that goes on from a checkpoint has to go on reading."""
        return self._training.position

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

        on_step: called after every step, on every worker. If it raises on one of them, all stop, at most as many steps later as
            the schedule works ahead, with nothing half done.
        pause_every: every so many steps (counted from the trainer's first) the pipeline runs empty before on_step is
            called, so that it may evaluate or save; with a schedule that looks ahead it may not do so at other steps. Several
            numbers: at the multiples of each.
        """
        pauses = [pause_every] if isinstance(pause_every, int) else list(pause_every or ())
        if pauses and min(pauses) < 1:
            raise ValueError(f"pause_every must be at least 1, got {pause_every}")
        rates = {"row learning rates, of what was declared": self._lr_factor, **self._dense.learning_rates()}
        asked = {"fit(steps)": steps, "fit(pause_every)": pauses, "steps done before": self.steps}
        self._rows.compare({**asked, **rates})
        return self._training.fit(batches, steps=steps, on_step=on_step, pauses=pauses)

    @_between_steps("train", meets=False)
    def step(self, batch: Batch | None) -> StepResult | None:
        """One step of your own loop. Every worker calls it; one without data passes None. Returns None once all did.

        Nothing can be looked up ahead here: `fit` is what hides data movement.
        """
        return self._training.step(batch)

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
        return self._training.stopped

    def scale_lr(self, factor: float) -> None:
        """Sets all learning rates, of rows and of the dense optimizer, to `factor` times what was declared."""
        if not 0 <= factor < float("inf"):
            raise ValueError(f"scale_lr: the factor must be a number of at least 0, got {factor}")
        self._scale_row_lr(factor)
        self._dense.scale_lr(factor)

    def _scale_row_lr(self, factor: float) -> None:
        for store in self.stores:
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
        return self._evaluation.losses(batches, metrics, self.group)

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
        self._check_table(table)
        return self._evaluation.ranking(
            batches,
            table=table,
            candidates=candidates,
            ks=ks,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
            group=self.group,
        )

    @_between_steps("read rows")
    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """The rows of any keys, [len(keys), dim], from whichever workers hold them. Every worker must call it.

        A key without a row gives the values it would be born with.
        keys: int64, in a tensor, a NumPy array or a list.
        """
        self._check_table(table)
        return self._evaluation.rows(table, keys)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def stores(self) -> list[Store]:
        """This worker's part of every table, in their order: for tools; changes with the program's insides."""
        return self._ops.stores

    def _check_table(self, name: str) -> None:
        names = [store.table.name for store in self.stores]
        if name not in names:
            raise ValueError(f"table {name!r}, {did_you_mean(str(name), names)}")

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
            for store in self.stores:
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
        names = [store.table.name for store in self.stores]
        measured = self.micro_batches if self._training.setting.is_auto and self._training.tuning is None else None
        settings = saved.Settings(
            lr_factor=self._lr_factor,
            pooled_at_owner=dict(zip(names, plan.at_owner, strict=True)),
            owners={name: None if k in plan.unplaced else plan.owners[k].tolist() for k, name in enumerate(names)},
            micro_batches=measured,
            config=self.config,
            run=self._run_id,
        )
        return saved.Content(self.stores, self._dense, self.steps, self.position, settings, base)

    def load(self, path: str | Path, *, tables: Sequence[str] | None = None) -> None:
        """Reads what `save` wrote, on any number of workers, into a trainer that has not trained yet.

        tables: only these of the checkpoint, into the tables of the same names; the others start anew.
        """
        training = self._training
        if training.torn == CLOSED:
            self._must_be_quiet("load")
        self._calls.append(("load", time.monotonic()))
        try:
            self._ops.meet("load")
            self._rows.compare({"load(tables)": None if tables is None else sorted(tables)})
            used = self.steps > 0 or training.torn is not None or not all(store.is_empty for store in self.stores)
            if self._rows.any(used):
                raise ValueError(
                    f"load into a trainer that has not trained yet; this one has done {self.steps} steps"
                    + ("" if self.steps else " and failed in its first: it has looked up keys. Make a new one")
                )
            loaded = self._load_rows(Path(path), tables)
        finally:
            self._calls.pop()
        settings = loaded.settings
        if tables is None:
            self._run_id = settings.run
        # With another number of workers the data is cut otherwise: as many batches of all workers are passed over.
        same = len(loaded.positions) == self.world
        training.start_at(loaded.step, loaded.positions[self.rank] if same else sum(loaded.positions) // self.world)
        if loaded.torch_rng is not None:
            saved.set_torch_rng(loaded.torch_rng)
        # Those of the dense optimizer have come with it: a scheduler of the user's own may have set them.
        self._scale_row_lr(settings.lr_factor)
        if training.tuning is not None and settings.micro_batches:  # measured before
            training.tuning = None
            training.cut_into(settings.micro_batches)
            if self.workers.is_first:
                process.tell(f"micro-batches: {self.micro_batches} [auto; as measured before the checkpoint]")
        plan = self._ops.plan
        for k in plan.undecided:
            name = plan.tables[k].name
            # What is best with one owner is no guide for several.
            if len(settings.owners.get(name) or ()) != 1 or len(plan.owners[k]) == 1:
                plan.resume(k, settings.pooled_at_owner.get(name))

    def _load_rows(self, path: Path, tables: Sequence[str] | None) -> saved.Loaded:
        """All or nothing: after a failure tables, and who owns them, are as they were."""
        decisions = self._ops.plan.decisions()
        try:
            return saved.load(
                path,
                self.stores,
                self._dense,
                self._rows,
                tables=tables,
                place=lambda table, owners: place_as_saved(self._ops, table, owners),
            )
        except BaseException:
            tracked = [store.tracks_changes for store in self.stores]
            for store in self.stores:
                if isinstance(store, DiskStore):
                    store.close()
            self._ops.plan.put_back(decisions)
            self._ops.use(self._open_stores(self._ops.plan))
            self._scale_row_lr(self._lr_factor)
            for store in (store for store, was in zip(self.stores, tracked, strict=True) if was):
                store.track_changes()
            raise

    @_between_steps("compute the digest")
    def digest(self) -> str:
        """A hash over every table's (key, row, optimizer state) and the model's weights.

        The same for any order of rows and any number of workers that hold the same bits.
        """
        return digest(self.stores, self.model, self._rows)

    @_between_steps("read the sizes of tables")
    def table_stats(self) -> dict[str, StoreStats]:
        """Rows and bytes of every table, summed over workers."""
        sums = self._rows.sum(np.array([store.stats() for store in self.stores], np.int64))
        return {store.table.name: StoreStats(*row) for store, row in zip(self.stores, sums.tolist(), strict=True)}

    @property
    def sent(self) -> Sent:
        """Bytes that this worker has sent to others so far."""
        return Sent(self._keys.bytes_sent, self._rows.bytes_sent)

    @_between_steps("count bytes")
    def bytes_sent(self) -> int:
        """Bytes of keys, rows and gradients that all workers together have sent to others so far."""
        return int(self._rows.sum(np.array([sum(self.sent)]))[0])

    # -- what ran when -----------------------------------------------------------------------------------------------

    @property
    def around(self) -> Around | None:
        """Called in place of every operation of a step, with its task and the operation itself: to delay it, to measure it, to
        make it fail. None: nothing is."""
        return self._training.around

    @around.setter
    def around(self, around: Around | None) -> None:
        self._training.around = around

    def recorded(self, *, clear: bool = False) -> RankTrace:
        """What ran when on this worker, of a trainer made with record=True; with micro_batches="auto", since the number was
        fixed. clear: forgets it."""
        return self._training.engine.recorded(rank=self.rank, world=self.world, clear=clear)

    def save_trace(self, folder: str | Path) -> None:
        """Writes this worker's recorded operations to the folder of a run, for `nestpipe trace`."""
        trace.save(Path(folder), self.recorded())

    def describe(self) -> list[str]:
        """What travels how, and what is overlapped, per table and stage: one line each."""
        return self._training.describe()

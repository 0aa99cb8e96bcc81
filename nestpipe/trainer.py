"""Trainer: fit, evaluate, save, load."""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe import checkpoint as saved
from nestpipe import process, trace
from nestpipe.batch import Batch
from nestpipe.engine.context import StepResult
from nestpipe.engine.digest import digest
from nestpipe.engine.engine import Around
from nestpipe.engine.step import Store
from nestpipe.engine.training import FitResult
from nestpipe.engine.worker import CLOSED, Options, Worker
from nestpipe.errors import did_you_mean
from nestpipe.exchange.mesh import Mesh
from nestpipe.exchange.plan import ExchangePlan
from nestpipe.exchange.samples import token_feature
from nestpipe.exchange.workers import Workers
from nestpipe.schedule.ops import Schedule
from nestpipe.schedule.setting import Setting
from nestpipe.store.memory import StoreStats
from nestpipe.tables import Feature, Table
from nestpipe.trace.record import RankTrace

log = logging.getLogger("nestpipe")
T = TypeVar("T")
P = ParamSpec("P")


def _between_steps(what: str, *, meets: bool = True) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method for which no batch may be in flight, and which all workers call; `what` it does, for errors. meets: see Worker."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def checked_method(*args: P.args, **kwargs: P.kwargs) -> T:
            trainer = args[0]
            assert isinstance(trainer, Trainer)
            trainer._worker.must_be_quiet(what)
            with trainer._worker.calling(what, meets=meets):
                return method(*args, **kwargs)

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
        travel behind the compute of other micro-batches); "nested" (both): all four give the same result to the bit. Not
        exact: "semi_async" (rows one update behind, so that none is waited for), "stale" (the same with rows and gradients on
        the compute lane, for comparison).
    micro_batches: cuts each batch into this many parts, run one after the other, with one update for all; "auto": as many
        as turn out fastest in the first steps of `fit`. A model whose loss mixes samples (in-batch negatives) says
        `mixes_samples = True` and is then refused here; "micro-batch": it is meant to mix those of a micro-batch, which is
        told; `False`: it does not, or nothing need be told. If it says nothing, it is
        tried on the first batch, and refused if it does.
    window_cache: each row crosses the wire once per batch, however many micro-batches use it. False: once for each of them,
        for comparison.
    clustering: how samples are dealt to micro-batches: "window" (few rows to wait for at both ends of the batch), "shared"
        (samples that share keys together), "taper" (window, with smaller micro-batches at both ends: even less to wait
        for), "none" (as they come). Nothing to do with one worker or one micro-batch.
    look_ahead: how many batches may be on their way behind the one that computes; None is what the schedule's stages need.
    replicas: groups of workers that each hold all tables, sharded inside, so that rows and their gradients travel inside a group
        only (2D sparse parallelism, docs/two_d.md); any number that divides the workers. Each table says how its replicas are
        kept together (Table's `sync`); exactly, unless it says otherwise.
    near: which workers are put together on a machine: "shards", those of a group; "replicas", those that hold the same rows.
    balance: deals the samples of each batch over workers, so that all have as much to compute (docs/balance.md): "none";
        "tokens": by their tokens, which are the keys of the first sequence feature declared; a number: by tokens and that much
        for the square of each sample's, as attention costs; "auto": by the number that fits the first steps of `fit`. The
        batch of all workers together stays the same, and so do the schedules' results.
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
        replicas: int = 1,
        near: str = "shards",
        balance: str | float = "none",
        seed: int = 0,
        on_nonfinite: str = "raise",
        data_timeout: float = 300.0,
        storage: str | Path = "nestpipe-storage",
        record: bool = False,
        check_freshness: bool = False,
    ) -> None:
        # What does not fit together is said before anything is opened.
        setting = Setting(schedule, micro_batches, window_cache, clustering, look_ahead, replicas, near, balance)
        if setting.deals and token_feature(features) is None:
            raise ValueError(
                f"balance={balance!r} counts the keys of a sequence, and no feature is one: declare one with pooling=None, or "
                f"set balance='none'"
            )
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        process.check_timeout("data_timeout", data_timeout)
        ExchangePlan(tables, features)
        process.join_group(data_timeout)
        self.model = model
        self.config: dict[str, Any] | None = None  # what it was made from: goes into checkpoints, as JSON
        self.recipe: dict[str, Any] | None = (
            None  # the model's kind and arguments: the same, so that a bundle can make it
        )
        self._run_id: str | None = uuid.uuid4().hex  # goes into checkpoints; one that goes on keeps it
        self._saving: list[saved.Background] = []
        # What the worker opens is given up by `close`, when the trainer is dropped, or when this fails.
        opened = contextlib.ExitStack()
        self._close = weakref.finalize(self, opened.close)
        try:
            self._worker = Worker(
                model,
                tables,
                features,
                dense_optimizer=dense_optimizer,
                options=Options(setting, seed, on_nonfinite, record, check_freshness),
                data_timeout=data_timeout,
                storage=Path(storage),
                opened=opened,
            )
        except BaseException:
            self._close()
            raise
        self.rank, self.world = self._worker.rank, self._worker.world
        ops = self._worker.ops  # and not this trainer, which could then not be dropped
        self.workers = Workers(self._worker.rows, lambda: ops.stop_asked)

    def close(self) -> None:
        """Deletes the working files of tables on disk, ends threads and connections, after a moment for a checkpoint that
        is under way; the trainer cannot be used after that. A trainer that is dropped, or a program that ends, does the same."""
        for background in self._saving:
            background.close()
        self._worker.close()
        self._close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- training ----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Batches that have been trained on so far."""
        return self._worker.training.steps

    @property
    def skipped(self) -> int:
        """Batches left out so far because something in them was not finite: inputs of this worker, losses of all."""
        return self._worker.training.skipped

    @property
    def schedule(self) -> Schedule:
        """What runs when, as plain values."""
        return self._worker.training.engine.schedule

    @property
    def micro_batches(self) -> int:
        """Into how many a batch is cut now."""
        return self.schedule.micro_batches

    @property
    def position(self) -> int:
        """How many batches this worker has taken from its data, those left out because of NaN or infinity included: where a run
        that goes on from a checkpoint has to go on reading."""
        return self._worker.training.position

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
        rates = {
            "row learning rates, of what was declared": self._worker.lr_factor,
            **self._worker.dense.learning_rates(),
        }
        asked = {"fit(steps)": steps, "fit(pause_every)": pauses, "steps done before": self.steps}
        self._worker.rows.compare({**asked, **rates})
        return self._worker.training.fit(batches, steps=steps, on_step=on_step, pauses=pauses)

    @_between_steps("train", meets=False)
    def step(self, batch: Batch | None) -> StepResult | None:
        """One step of your own loop. Every worker calls it; one without data passes None. Returns None once all did.

        Nothing can be looked up ahead here: `fit` is what hides data movement.
        """
        return self._worker.training.step(batch)

    def stop(self) -> None:
        """Asks `fit` to return: all workers do so after the same step, within a few. For signal handlers and other threads."""
        self._worker.ops.stop_asked = True

    @property
    def stop_asked(self) -> bool:
        """Whether this worker has been asked to stop, and `fit` has not heard it yet."""
        return self._worker.ops.stop_asked

    @property
    def stopped(self) -> bool:
        """Whether `fit` has returned because a worker was asked to stop."""
        return self._worker.training.stopped

    def scale_lr(self, factor: float) -> None:
        """Sets all learning rates, of rows and of the dense optimizer, to `factor` times what was declared."""
        if not 0 <= factor < float("inf"):
            raise ValueError(f"scale_lr: the factor must be a number of at least 0, got {factor}")
        self._worker.scale_row_lr(factor)
        self._worker.dense.scale_lr(factor)

    # -- evaluation --------------------------------------------------------------------------------------------------

    @_between_steps("evaluate")
    def evaluate(self, batches: Iterable[Batch], metrics: dict[str, Any]) -> dict[str, float]:
        """The mean loss, and metrics of the model's predictions against the labels, over all workers' batches.

        No row is born, counted or changed. Metrics are objects such as nestpipe.metrics.AUC(), or your own with
        `update(predictions, labels)`, `compute(group=...)` and `reset()`. They are reset first: what they were fed before
        does not count. One without `reset()` is taken once.

        Where predictions and labels are Jagged, lists of candidates, a metric gets all of them end to end, unless it says
        `takes_lists = True`, as nestpipe.metrics.GAUC() and ListNDCG(k) do.
        """
        return self._worker.evaluation.losses(batches, metrics, self._worker.group)

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
        return self._worker.evaluation.ranking(
            batches,
            table=table,
            candidates=candidates,
            ks=ks,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
            group=self._worker.group,
        )

    @_between_steps("read rows")
    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """The rows of any keys, [len(keys), dim], from whichever workers hold them. Every worker must call it.

        A key without a row gives the values it would be born with.
        keys: int64, in a tensor, a NumPy array or a list.
        """
        self._check_table(table)
        return self._worker.evaluation.rows(table, keys)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The workers as replicas x shards."""
        return self._worker.mesh

    @property
    def stores(self) -> list[Store]:
        """This worker's part of every table, in their order: for tools; changes with the program's insides."""
        return self._worker.stores

    def _check_table(self, name: str) -> None:
        names = [store.table.name for store in self.stores]
        if name not in names:
            raise ValueError(f"table {name!r}, {did_you_mean(str(name), names)}")

    @_between_steps("save")
    def save(self, path: str | Path) -> None:
        """Writes tables, model, optimizers, random states and the place in the data to a new folder, which appears only when it
        is complete."""
        self._wait_for_checkpoints()  # one of them may be the same
        saved.check_new(Path(path), self._worker.rows)
        self._worker.ops.averaging.settle(self.steps)
        saved.save(Path(path), self._content(), self._worker.rows)

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
            self._worker.rows,
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
        self._worker.ops.averaging.settle(self.steps)
        into.begin(self._content(into.next_base()))

    def _wait_for_checkpoints(self) -> None:
        for background in self._saving:
            background.wait()

    def _content(self, base: saved.Base | None = None) -> saved.Content:
        return saved.content_of(self._worker, config=self.config, recipe=self.recipe, run=self._run_id, base=base)

    def load(self, path: str | Path, *, tables: Sequence[str] | None = None) -> None:
        """Reads what `save` wrote, on any number of workers, into a trainer that has not trained yet: all of it or nothing.

        tables: only these of the checkpoint, into the tables of the same names; the others start anew.
        """
        if self._worker.training.torn == CLOSED:
            self._worker.must_be_quiet("load")
        with self._worker.calling("load"):
            settings = saved.load_into(self._worker, Path(path), tables)
        if tables is None:
            self._run_id = settings.run

    @_between_steps("compute the digest")
    def digest(self) -> str:
        """A hash over every table's (key, row, optimizer state) and the model's weights.

        The same for any order of rows and any number of workers that hold the same bits.
        """
        return digest(self.stores, self._worker.ops.plan, self.model, self._worker.rows)

    @_between_steps("read the sizes of tables")
    def table_stats(self) -> dict[str, StoreStats]:
        """Rows and bytes of every table, summed over workers; rows that have replicas count once, their bytes as often as they
        are held."""
        plan = self._worker.ops.plan
        stats = [
            store.stats().of_copy() if plan.is_copy(k, self.rank) else store.stats()
            for k, store in enumerate(self.stores)
        ]
        sums = self._worker.rows.sum(np.array(stats, np.int64))
        for k, twin in plan.twins.items():
            sums[k] += sums[twin]
        return {self.stores[k].table.name: StoreStats(*sums[k].tolist()) for k in plan.declared}

    @property
    def sent(self) -> Sent:
        """Bytes that this worker has sent to others so far."""
        return Sent(self._worker.keys.bytes_sent, self._worker.rows.bytes_sent)

    @_between_steps("count bytes")
    def bytes_sent(self) -> int:
        """Bytes of keys, rows and gradients that all workers together have sent to others so far."""
        return int(self._worker.rows.sum(np.array([sum(self.sent)]))[0])

    # -- what ran when -----------------------------------------------------------------------------------------------

    @property
    def around(self) -> Around | None:
        """Called in place of every operation of a step, with its task and the operation itself: to delay it, to measure it, to
        make it fail. None: nothing is."""
        return self._worker.training.around

    @around.setter
    def around(self, around: Around | None) -> None:
        self._worker.training.around = around

    def recorded(self, *, clear: bool = False) -> RankTrace:
        """What ran when on this worker, of a trainer made with record=True; with micro_batches="auto", since the number was
        fixed. clear: forgets it."""
        if not self._worker.training.records:
            raise ValueError("nothing was recorded; make the trainer with record=True")
        return self._worker.training.engine.recorded(rank=self.rank, world=self.world, clear=clear)

    def save_trace(self, folder: str | Path) -> None:
        """Writes this worker's recorded operations to the folder of a run, for `nestpipe trace`."""
        trace.save(Path(folder), self.recorded())

    def describe(self) -> list[str]:
        """What travels how, and what is overlapped, per table and stage: one line each."""
        return self._worker.training.describe()

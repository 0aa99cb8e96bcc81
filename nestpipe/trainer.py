"""Trainer: fit, evaluate, predict, save, load."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe import checkpoint as saved
from nestpipe import inference, process, trace
from nestpipe.batch import Batch
from nestpipe.callbacks import Callback, checked, tell
from nestpipe.engine import foreign_rows
from nestpipe.engine.computing import Computing
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
from nestpipe.files import check_local
from nestpipe.inference import Recommended
from nestpipe.metrics import names
from nestpipe.rates import Schedule as LearningRates
from nestpipe.rates import factor_at
from nestpipe.schedule.ops import Schedule
from nestpipe.schedule.setting import Setting
from nestpipe.source_state import from_json
from nestpipe.store.memory import StoreStats
from nestpipe.tables import Feature, Table
from nestpipe.trace.record import RankTrace

log = logging.getLogger("nestpipe")
T = TypeVar("T")
P = ParamSpec("P")
EVALUATED = "nestpipe.evaluated"  # in `extra`: the step after which `fit` has evaluated last


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


def _is_limit(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


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
    lr_schedule: what all learning rates, of rows and of the dense optimizer, are multiplied by in each step: an LRSchedule, or a
        function of the step (counted from 0) alone. A table may have its own.
    lr_scheduler: makes a torch scheduler from the dense optimizer, which then follows it and not lr_schedule: `lambda optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer, 1000)`. It is stepped once after every step and saved in checkpoints.
    clip_norm: largest Euclidean norm of the dense gradient that the optimizer gets, which is the mean over the batch of all
        workers; a longer one is scaled down to it (as torch.nn.utils.clip_grad_norm_). StepResult.grad_norm tells what it was.
        0 means no limit. Rows have `clip`, of each by itself.
    precision: "float32", or "bf16": the model computes under torch.autocast in bfloat16, forward and backward. Parameters, rows,
        gradients, optimizers and losses stay float32.
    compile: runs the model through torch.compile, which on CPUs needs a C++ compiler. It is compiled anew for kinds of inputs
        that it has not had; what it cannot compile runs as it is. A model that does not compile is an error.
    schedule: "serial"; "dbp" (lookups of the next batches hidden behind the compute of this one); "fwp" (rows and gradients
        travel behind the compute of other micro-batches); "nested" (both): all four give the same result to the bit. Not
        exact: "semi_async" (rows one update behind, so that none is waited for), "stale" (the same with rows and gradients on
        the compute lane, for comparison).
    micro_batches: cuts each batch into this many parts, run one after the other, with one update for all; "auto": as many
        as turn out fastest in the first steps of `fit`. A model whose loss mixes samples (in-batch negatives) says
        `mixes_samples = True` and is then refused here; "micro-batch": it is meant to mix those of a micro-batch, which is
        told; "global": those of all workers, in two halves (docs/negatives.md), exact with any split; `False`:
        it does not, or nothing need be told. If it says nothing, it is tried on the first batch, and refused if it does.
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
        lr_schedule: LearningRates | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float = 0.0,
        precision: str = "float32",
        compile: bool = False,
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
        if lr_schedule is not None:
            factor_at(lr_schedule, 0)
        if not _is_limit(clip_norm):
            raise ValueError(f"clip_norm must be a number of at least 0 (0: no limit), got {clip_norm!r}")
        computing = Computing(precision, compile)
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
        # JSON values of your own, by name, the same on every worker: checkpoints hold them, and `load` puts them back. Names that
        # begin with "nestpipe." are ours.
        self.extra: dict[str, Any] = {}
        self._watching: list[
            Callback
        ] = []  # always the same list: what saves in the background knows it, not this trainer
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
                lr_scheduler=lr_scheduler,
                options=Options(
                    setting, seed, on_nonfinite, record, check_freshness, lr_schedule, float(clip_norm), computing
                ),
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

    @property
    def data_state(self) -> Any:
        """What this worker's source of batches said of itself, `state_dict()`, after the last batch that was trained on; None if
        it has no such method. It goes into checkpoints: who has loaded one calls `source.load_state_dict(trainer.data_state)`
        before `fit`, instead of passing over `position` batches."""
        if self._worker.training.data_lost is not None:
            raise ValueError(self._worker.training.data_lost)
        return from_json(self._worker.training.data_state)

    @_between_steps("train")
    def fit(
        self,
        batches: Iterable[Batch],
        *,
        steps: int | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        pause_every: int | Sequence[int] | None = None,
        evaluate: Callable[[], Mapping[str, float] | None] | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> FitResult:
        """Trains until `steps` are done or no worker has batches left. Workers may have different numbers of batches:
        those that run out early go on serving rows, and all return together. Batches are read ahead, in a thread: a source
        must not write into tensors that it has given away, and draws its random numbers from a generator of its own. They may
        never end: then `steps` says when to stop, or `stop` is called. A source with `state_dict()` (torchdata's
        StatefulDataLoader, or one of your own) is asked for it after every batch: see `data_state`.

        on_step: called after every step, on every worker. If it raises on one of them, all stop, at most as many steps later as
            the schedule works ahead, with nothing half done.
        pause_every: every so many steps (counted from the trainer's first) the pipeline runs empty before on_step is
            called, so that it may evaluate or save; with a schedule that looks ahead it may not do so at other steps. Several
            numbers: at the multiples of each.
        evaluate, evaluate_every: every so many steps, in a pause, every worker calls it, as in
            `evaluate=lambda: trainer.evaluate(valid(), {"AUC": AUC()})`; what it returns goes to the callbacks. One that was
            due when a checkpoint was saved, and not done, is done first by the trainer that goes on. None: there was nothing
            to tell.
        callbacks: are told of steps, evaluations and checkpoints: `Best`, trackers (nestpipe.tracking), your own (`Callback`).
            After a step theirs comes first, then the evaluation, then on_step.
        """
        pauses = [pause_every] if isinstance(pause_every, int) else list(pause_every or ())
        if pauses and min(pauses) < 1:
            raise ValueError(f"pause_every must be at least 1, got {pause_every}")
        if (evaluate is None) != (evaluate_every is None):
            raise ValueError("fit: evaluate says how, evaluate_every how often; give both or neither")
        if evaluate_every is not None and evaluate_every < 1:
            raise ValueError(f"evaluate_every must be at least 1, got {evaluate_every}")
        pauses += [evaluate_every] if evaluate_every is not None else []
        rates = {
            "row learning rates, of what was declared": self._worker.lr_factor,
            "learning rates of dense groups": self._worker.dense.learning_rates(),
        }
        asked = {"fit(steps)": steps, "fit(pause_every)": pauses, "steps done before": self.steps}
        self._worker.rows.compare({**asked, **rates})
        training, watching, evaluating = self._worker.training, self._watching, 0.0

        def judge() -> None:
            nonlocal evaluating
            begin = time.perf_counter()
            metrics = None if evaluate is None else evaluate()
            if metrics is not None:
                self.extra[EVALUATED] = self.steps  # before callbacks that may save
                tell(watching, "on_evaluate", "valid", metrics, self.steps)
            evaluating += time.perf_counter() - begin

        def after(result: StepResult) -> None:
            tell(watching, "on_step", result)
            if evaluate_every is not None and self.steps % evaluate_every == 0:
                judge()
            if on_step is not None:
                on_step(result)

        with contextlib.ExitStack() as ending:
            ending.enter_context(self.watched_by(callbacks))
            for callback in reversed(callbacks):
                ending.callback(tell, [callback], "on_end")
            self._worker.ops.keeps_predictions = any(getattr(one, "wants_predictions", False) for one in watching)
            training.enough = False
            self._worker.rows.together(lambda: tell(callbacks, "on_begin"), what="on_begin")
            due = evaluate_every is not None and self.steps > 0 and self.steps % evaluate_every == 0
            if due and self.extra.get(EVALUATED) != self.steps:
                self._worker.rows.together(judge, what="evaluation")
                evaluating = 0.0  # before the seconds that `training` counts
            fitted = training.fit(
                batches, steps=steps, on_step=after if evaluate or on_step or watching else None, pauses=pauses
            )
        fitted.evaluation_seconds = evaluating
        return fitted

    @contextlib.contextmanager
    def watched_by(self, callbacks: Sequence[Callback]) -> Iterator[None]:
        """While it lasts these are told of steps, evaluations and checkpoints, also of those after `fit`; what
        `fit(callbacks=...)` does for one call. Nobody calls their on_begin and on_end here."""
        more = checked(callbacks)
        self._watching.extend(more)
        try:
            yield
        finally:
            del self._watching[len(self._watching) - len(more) :]

    def end_fit(self) -> None:
        """Ends `fit` as if the data had ended: at this pause, if it is called in one (by a callback's on_evaluate, say), or
        before the first step (on_begin); else at the next. All workers end with the first that is told so."""
        self._worker.training.enough = True

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
        """Sets all learning rates, of rows and of the dense optimizer, to `factor` times what was declared, or times what
        lr_schedule or lr_scheduler make of it."""
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
        does not count. One without `reset()` is taken once. One whose `compute()` takes no group, as torchmetrics' do, is fed the
        samples of all workers on each of them: it keeps them in memory.

        Where predictions and labels are Jagged, lists of candidates, a metric gets all of them end to end, unless it says
        `takes_lists = True`, as nestpipe.metrics.GAUC() and ListNDCG(k) do. A metric with an attribute `group`, as GAUC("user")
        has, is given a third argument: the group of each sample, from the dense input or the feature of that name.

        Of a model with several tasks "click/AUC" is of one of them; "AUC" stands for one of each, with a copy of the metric for
        each. The result has "click/AUC" and "click/loss".
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
        metrics: dict[str, Any] | None = None,
        history: str = "history",
        exclude_seen: bool = True,
        seen_targets: str = "rank",
    ) -> dict[str, float]:
        """HR@k and NDCG@k of `batch.labels` (target keys) ranked among all candidates, over all workers' batches; and how many
        `targets` were ranked, and how many `seen_targets` there were: keys that the user has had before.

        The model needs `query(batch, rows) -> [B, D]` and `score(query, candidate_rows) -> [B, N]`.
        metrics: instead of those two: nestpipe.metrics.HitRate(k), NDCG(k), MRR() and Coverage(k), or your own with
            `update(ranks)`.
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
            metrics=names.at(ks) if metrics is None else metrics,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
            group=self._worker.group,
        )

    @_between_steps("predict")
    def predict(self, batches: Iterable[Batch], *, on_batch: Callable[[Batch, Any], None] | None = None) -> Any:
        """What the model predicts for each sample of this worker's batches, in their order: its `predict(batch, rows)`, where
        it has one, else `Output.predictions` of its forward. A tensor [B, ...], or a Jagged where each sample has a list; a
        dict of them for several tasks. The same bits as in `evaluate` of the same batches.

        Every worker calls it; one without batches gets no predictions. No row is born, counted or changed: a key without a row
        counts with the values it would be born with.
        on_batch: is given each batch and its predictions as they come, for more than memory holds; then None is returned.
        """
        return self._worker.evaluation.predictions(batches, on_batch)

    @_between_steps("recommend")
    def recommend(
        self,
        batches: Iterable[Batch],
        k: int,
        *,
        history: str | None = None,
        exclude_seen: bool = True,
        candidates: Tensor | np.ndarray | Sequence[int] | None = None,
        on_batch: Callable[[Batch, Recommended], None] | None = None,
    ) -> Recommended | None:
        """The k items of highest score for each sample of this worker's batches, exactly: every item is scored, a block at a
        time. For models with `query(batch, rows) -> [B, D]` and `score(query, candidate_rows) -> [B, N]`. Every worker calls
        it.

        history: the feature with what the user has had; the model's own `history` if left out. The items are in its table, or in
            that of the feature that the model calls its `item` (TwoTower).
        exclude_seen: leaves out what the user has had: `batch.dense["seen"]`, or where there is none the sample's history.
        candidates: the keys to choose from; all that have a row if left out. Their rows are held in memory.
        on_batch: is given each batch and what is best for it, for more than memory holds; then None is returned.
        """
        name = inference.history_of(self.model, history)
        tables = {feature.name: feature.table for feature in self._worker.ops.plan.features}
        items = inference.items_of(self.model, name, tables)
        if items not in tables or (history is not None and history not in tables):
            raise ValueError(f"recommend: history {name!r}, {did_you_mean(name, list(tables))}")
        return self._worker.evaluation.recommended(
            batches,
            k,
            table=tables[items],
            history=name,
            exclude_seen=exclude_seen,
            candidates=candidates,
            on_batch=on_batch,
        )

    @_between_steps("read rows")
    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """The rows of any keys, [len(keys), dim], from whichever workers hold them. Every worker must call it.

        A key without a row gives the values it would be born with.
        keys: int64, in a tensor, a NumPy array or a list.
        """
        self._check_table(table)
        return self._worker.evaluation.rows(table, keys)

    @_between_steps("put rows")
    def put_rows(
        self,
        table: str,
        keys: Tensor | np.ndarray | Sequence[int],
        rows: Tensor,
        *,
        state: Tensor | None = None,
        updates: int | None = None,
    ) -> None:
        """Gives keys the rows that another program has trained, whether they had one here or not. Every worker calls it, each
        with a part of the keys (or one with all of them and the others with none): every key once. Rows go to the workers
        that hold them. What is wrong with one worker's is raised on all, and nothing has changed then. They count as used by the
        last step; a table with max_rows must have room for them: no other row is given up.

        rows: [N, dim], one for each key. A table of bfloat16 rounds float32, as torch does.
        state: [N, S] float32, what the table's row optimizer keeps beside each row: RowwiseAdagrad one sum, Adagrad dim sums,
            Adam both moments, one after the other. Left out, it begins as that of a newborn row.
        updates: how many updates have made that state, which Adam asks for; before the first step, one number for a table.
        """
        self._check_table(table)
        foreign_rows.put(self._worker, table, keys, rows, state, updates=updates)

    @_between_steps("read optimizer state")
    def row_state(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """What the table's row optimizer keeps beside the rows of any keys, [len(keys), S], as `put_rows` takes it; that of a
        newborn row for a key without one. Every worker must call it."""
        self._check_table(table)
        return foreign_rows.state_of(self._worker, table, keys)

    def keys(self, table: str) -> Tensor:
        """The keys that have a row of their own, sorted: on every worker other ones, on all workers together each once."""
        self._check_table(table)
        self._worker.must_be_quiet("read keys")
        return foreign_rows.keys_of(self._worker, table)

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
    def save(self, path: str | Path, *, replace: bool = False) -> None:
        """Writes tables, model, optimizers, random states and the place in the data to a new folder, which appears only when it
        is complete. replace: a checkpoint that is there stays until then, and goes."""
        path = Path(path)
        new = saved.next_of(path) if replace else path
        self._wait_for_checkpoints()  # one of them may be the same
        if replace:
            self.workers.on_first(lambda: saved.settle(path), what="checkpoint")
        saved.check_new(new, self._worker.rows)
        self._worker.ops.averaging.settle(self.steps)
        saved.save(new, self._content(), self._worker.rows)
        if replace:
            self.workers.on_first(lambda: saved.settle(path), what="checkpoint")
        tell(self._watching, "on_checkpoint", path, self.steps)

    def checkpoints(self, folder: str | Path, *, keep: int = 3, full_every: int = 1) -> saved.Background:
        """For checkpoints that are written while training goes on; see `checkpoint`. The folder is for those of one run: a new
        one, or the one that this trainer was loaded from.

        keep: how many stay. full_every: of so many checkpoints one is full, the others hold what has changed since it.
        """
        if keep < 1 or full_every < 1:
            raise ValueError(f"keep and full_every must be at least 1, got {keep} and {full_every}")
        check_local(Path(folder))
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
            done=functools.partial(tell, self._watching, "on_checkpoint"),
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
        return saved.content_of(
            self._worker,
            config=self.config,
            recipe=self.recipe,
            run=self._run_id,
            base=base,
            extra=self._agreed_extra(),
        )

    def _agreed_extra(self) -> dict[str, Any]:
        """As it is now: the checkpoint may be written later."""
        problem: Exception | None = None
        try:
            text = json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            text, problem = str(error), error
        self._worker.rows.compare({"trainer.extra": text})
        if problem is not None:
            raise ValueError(f"trainer.extra cannot be saved: {problem}; give it values that JSON has") from problem
        return json.loads(text)

    def load(self, path: str | Path, *, tables: Sequence[str] | None = None) -> None:
        """Reads what `save` wrote, on any number of workers, into a trainer that has not trained yet: all of it or nothing.

        tables: only these of the checkpoint, into the tables of the same names; the others start anew.
        """
        if self._worker.training.torn == CLOSED:
            self._worker.must_be_quiet("load")
        with self._worker.calling("load"):
            settings = saved.load_into(self._worker, Path(path), tables)
        if tables is None:
            self._run_id, self.extra = settings.run, dict(settings.extra)

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

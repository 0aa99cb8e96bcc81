"""Looking rows up for evaluation, together with the other workers: nothing is born, counted or changed."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.arena import Arena
from nestpipe.batch import SEEN, Batch, Jagged, one_list
from nestpipe.engine.context import Context
from nestpipe.engine.dense import call
from nestpipe.engine.loader import Loader, checked
from nestpipe.engine.step import StepOperations
from nestpipe.errors import did_you_mean
from nestpipe.exchange.plan import ExchangePlan, Holders
from nestpipe.exchange.window import Window
from nestpipe.metrics import NDCG, SEEN_TARGETS, HitRate, in_lists, rank_all
from nestpipe.tables import Feature

Judge = Callable[[Batch, dict[str, Any]], None]  # looks at a batch and its rows

# Metrics without `reset` that an evaluation has fed, by id, as long as they live.
_used: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def start_anew(metrics: dict[str, Any]) -> None:
    """Metrics forget what they were fed before, so that an evaluation is of its own batches only."""
    names: dict[int, str] = {}
    for name, metric in metrics.items():
        if id(metric) in names:
            raise ValueError(
                f"metrics {names[id(metric)]!r} and {name!r} are one and the same object, which would be fed every batch twice; "
                f"make one for each name"
            )
        names[id(metric)] = name
    for name, metric in metrics.items():
        if hasattr(metric, "reset"):
            metric.reset()
        elif id(metric) in _used:
            raise ValueError(
                f"metric {name!r} ({type(metric).__name__}) has been used before and would add this evaluation to the last "
                f"one; give its class a reset(), or make a new one for every evaluation"
            )
        else:
            try:
                _used[id(metric)] = metric
            except TypeError:  # __slots__: no weak references
                raise ValueError(
                    f"metric {name!r} ({type(metric).__name__}) has no reset(), and because of its __slots__ it cannot be told "
                    f"whether it has been used before; give its class a reset()"
                ) from None


def lookup(
    ops: StepOperations, arena: Arena, batch: Batch | None, error: BaseException | None = None, *, number: int = 0
) -> Context | None:
    """The context of a batch whose rows have been read, or None if no worker has one."""
    has_data = batch is not None
    batch = Batch.empty([f.name for f in ops.plan.features]) if batch is None else batch
    ctx = Context(number, batch, Window([0, batch.size]), arena, error=error, has_data=has_data)
    ops.h2d(ctx)
    ops.route(ctx, train=False)
    if ctx.ends:
        return None
    ops.read(ctx)
    ops.emb(ctx, train=False)
    return ctx


class Evaluation:
    """What is read of a trainer's tables besides training. data_timeout: seconds without a batch after which its source counts
    as dead."""

    def __init__(self, ops: StepOperations, *, data_timeout: float) -> None:
        self._ops, self._data_timeout = ops, data_timeout
        self._arena = Arena()
        self._names = [feature.name for feature in ops.plan.features]
        self._of_table: dict[str, StepOperations] = {}

    def losses(self, batches: Iterable[Batch], metrics: dict[str, Any], group: Any) -> dict[str, float]:
        rows = self._ops.rows
        rows.compare({f"metric {name!r}": type(metric).__name__ for name, metric in metrics.items()})
        rows.together(lambda: start_anew(metrics), what="metrics")
        judge, totals = judge_losses(self._ops.dense_part.model, metrics)
        self._judge_all(batches, judge)
        loss, weight = rows.sum(totals).tolist()
        results = {name: metric.compute(group=group) for name, metric in metrics.items()}
        return {"loss": loss / weight if weight else float("nan"), **results}

    def ranking(
        self,
        batches: Iterable[Batch],
        *,
        table: str,
        candidates: Tensor,
        ks: Sequence[int],
        history: str,
        exclude_seen: bool,
        seen_targets: str,
        group: Any,
    ) -> dict[str, float]:
        if seen_targets not in SEEN_TARGETS:
            raise ValueError(f"seen_targets {seen_targets!r}, {did_you_mean(str(seen_targets), SEEN_TARGETS)}")
        if seen_targets == "miss" and not exclude_seen:
            raise ValueError("seen_targets='miss' is for targets that exclude_seen leaves out; set exclude_seen=True")
        if exclude_seen and history not in self._names:
            raise ValueError(f"evaluate_ranking: history {history!r}, {did_you_mean(history, self._names)}")
        metrics: dict[str, Any] = {}
        for k in ks:
            metrics[f"HR@{k}"], metrics[f"NDCG@{k}"] = HitRate(k), NDCG(k)
        judge, counts = judge_ranking(
            self._ops.dense_part.model,
            metrics,
            self.rows(table, candidates),
            candidates,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
        )
        self._judge_all(batches, judge)
        ranked, seen = self._ops.rows.sum(counts).tolist()
        results = {name: metric.compute(group=group) for name, metric in metrics.items()}
        return {**results, "targets": ranked, "seen_targets": seen}

    def rows(self, table: str, keys: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        batch, error = None, None
        try:
            batch = checked(Batch({"keys": one_list(keys)}), ["keys"])
        except Exception as problem:
            error = problem
        ops = self._reading(table)
        ctx = lookup(ops, self._arena, batch, error)
        assert ctx is not None
        return ops.inputs(ctx, 0, train=False)[1]["keys"].values

    def _reading(self, table: str) -> StepOperations:
        """Operations on that table alone, whose rows come one by one."""
        ops, made = self._ops, self._of_table.get(table)
        stores = [store for store in ops.stores if store.table.name == table]  # its own, and that of its hot rows
        hot = ops.plan.hot[ops.stores.index(stores[0])]
        owners = [store.owners for store in stores]
        if made is None or not _same([*made.stores, *made.plan.owners, made.plan.hot[0]], [*stores, *owners, hot]):
            declared = [dataclasses.replace(store.table, pooled_at="source") for store in stores]
            plan = ExchangePlan(declared, [Feature("keys", table)], [Holders(of_store) for of_store in owners])
            plan.hot[0] = hot
            made = StepOperations(plan, stores, ops.keys, ops.rows, ops.dense_part, skip_nonfinite=False)
            self._of_table[table] = made
        return made

    def _judge_all(self, batches: Iterable[Batch], judge: Judge) -> None:
        """Calls judge(batch, rows) for each batch of this worker, and serves rows until no worker has batches left. What goes
        wrong on one worker is raised on all."""
        ops, model = self._ops, self._ops.dense_part.model
        loader = Loader(batches, self._names, skip_nonfinite=False, timeout=self._data_timeout)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():  # not inference_mode: what a model caches meanwhile must be of use in training
                for number in itertools.count():
                    batch, error = None, None
                    try:
                        batch = loader.next()
                    except Exception as problem:
                        error = problem
                    ctx = lookup(ops, self._arena, batch, error, number=number)
                    if ctx is None:
                        return
                    try:
                        if ctx.batch.size:
                            judge(*ops.inputs(ctx, 0, train=False))
                    except Exception as problem:
                        ctx.error = problem
                    ops.agree(ctx, train=False)
        finally:
            loader.close()
            for module, training in modes:
                module.training = training


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def judge_losses(model: nn.Module, metrics: dict[str, Any]) -> tuple[Judge, np.ndarray]:
    """Adds losses and weights of a batch up in the returned array, and feeds its predictions to the metrics."""
    totals = np.zeros(2)

    def judge(batch: Batch, rows: dict[str, Any]) -> None:
        output = call(model, batch, rows)
        totals[0] += float(output.losses.double().sum())
        totals[1] += batch.size if output.weights is None else float(output.weights.double().sum())
        for name, metric in metrics.items():
            if output.predictions is None or batch.labels is None:
                missing = "labels in the batch" if batch.labels is None else "Output.predictions from the model"
                raise ValueError(f"metric {name!r} needs {missing}")
            metric.update(*_for(metric, name, output.predictions, batch.labels))

    return judge, totals


def _for(
    metric: Any, name: str, predictions: Tensor | Jagged, labels: Tensor | Jagged
) -> tuple[Tensor | Jagged, Tensor | Jagged]:
    """Lists of candidates go to a metric as lists if it takes them so, else all candidates end to end."""
    lists = getattr(metric, "takes_lists", False)
    if isinstance(predictions, Jagged) != isinstance(labels, Jagged) or (lists and not isinstance(labels, Jagged)):
        kinds = ["a Jagged" if isinstance(part, Jagged) else "a tensor" for part in (predictions, labels)]
        raise ValueError(
            f"metric {name!r}: predictions are {kinds[0]}, labels {kinds[1]}; it needs "
            f"{'a Jagged of both, one list per sample' if lists else 'both alike'}"
        )
    if not isinstance(predictions, Jagged) or not isinstance(labels, Jagged):
        return predictions, labels
    if not torch.equal(predictions.offsets, labels.offsets):
        raise ValueError(f"metric {name!r}: a sample has another number of predictions than of labels")
    return (predictions, labels) if lists else (predictions.values, labels.values)


def judge_ranking(
    model: nn.Module,
    metrics: dict[str, Any],
    candidate_rows: Tensor,
    candidates: Tensor,
    *,
    history: str,
    exclude_seen: bool,
    seen_targets: str,
) -> tuple[Judge, np.ndarray]:
    """Feeds the rank of each sample's target among all candidates to the metrics; for the rest see `evaluate_ranking`. The
    returned array counts targets that were ranked, and those that the sample's user has had before."""
    counts = np.zeros(2, np.int64)

    def judge(batch: Batch, rows: dict[str, Any]) -> None:
        if not isinstance(batch.labels, Tensor):
            raise ValueError("ranking needs batch.labels, a tensor: the key of each sample's target")
        seen = _seen(batch, history)
        ranks = rank_all(
            model.score,  # type: ignore[arg-type]
            queries_BD=model.query(batch, rows),  # type: ignore[operator]
            candidates_ND=candidate_rows,
            candidate_keys=candidates,
            target_keys=batch.labels,
            exclude=seen if exclude_seen else None,
        )
        if seen is not None:
            again_B = in_lists(batch.labels, seen)
            counts[1] += int(again_B.sum())
            if seen_targets == "skip":
                ranks = ranks[~again_B]
            elif seen_targets == "miss":  # behind all others, whatever k
                ranks = ranks.masked_fill(again_B, torch.iinfo(ranks.dtype).max)
        counts[0] += len(ranks)
        for metric in metrics.values():
            metric.update(ranks)

    return judge, counts


def _seen(batch: Batch, history: str) -> Jagged | None:
    """All that each sample's user has had: what the data says, else the history that the model reads, if there is one."""
    seen = batch.dense.get(SEEN)
    if seen is None:
        return batch.keys.get(history)
    if not isinstance(seen, Jagged) or seen.values.dtype != torch.int64:
        raise ValueError(f"batch.dense[{SEEN!r}] must be a Jagged of int64 keys: all that each sample's user has had")
    return seen

"""Looking rows up for evaluation, together with the other workers: nothing is born, counted or changed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe import inference
from nestpipe.arena import Arena
from nestpipe.batch import Batch, one_list
from nestpipe.engine.context import Context
from nestpipe.engine.judging import Judge, Judged, by_task, candidate_blocks, judge_losses, judge_ranking, start_anew
from nestpipe.engine.loader import Loader, checked
from nestpipe.engine.outputs import mean_of, tasks_of
from nestpipe.engine.step import StepOperations
from nestpipe.errors import did_you_mean
from nestpipe.exchange.plan import ExchangePlan, Holders
from nestpipe.exchange.window import Window
from nestpipe.inference import Recommended
from nestpipe.metrics.ranking import SEEN_TARGETS
from nestpipe.ops.precision import wide
from nestpipe.tables import Feature

OnBatch = Callable[[Batch, Any], None]  # takes a batch and what the model says of its samples


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
        rows, model = self._ops.rows, self._ops.dense_part.model
        tasks = tasks_of(model)
        rows.compare({f"metric {name!r}": type(metric).__name__ for name, metric in metrics.items()})

        def begin() -> list[Judged]:
            start_anew(metrics)
            return by_task(metrics, tasks)

        judged = rows.together(begin, what="metrics")
        judge, totals = judge_losses(model, judged, autocast=self._ops.dense_part.autocast)
        self._judge_all(batches, judge)
        names = ["loss", *(f"{task}/loss" for task in tasks)]
        losses = {name: mean_of(*sums) for name, sums in zip(names, rows.sum(totals).tolist(), strict=True)}
        return losses | {metric.name: metric.metric.compute(group=group) for metric in judged}

    def ranking(
        self,
        batches: Iterable[Batch],
        *,
        table: str,
        candidates: Tensor,
        metrics: Mapping[str, Any],
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
        rows = self._ops.rows
        kinds = {f"metric {name!r}": type(metric).__name__ for name, metric in metrics.items()}
        rows.compare({"ranking: table of the items": table, **kinds})
        rows.together(lambda: start_anew(metrics), what="metrics")
        judge, counts = judge_ranking(
            self._ops.dense_part.model,
            metrics,
            self.rows(table, candidates),
            candidates,
            history=history,
            exclude_seen=exclude_seen,
            seen_targets=seen_targets,
            autocast=self._ops.dense_part.autocast,
        )
        self._judge_all(batches, judge)
        ranked, seen = rows.sum(counts).tolist()
        results = {name: metric.compute(group=group) for name, metric in metrics.items()}
        return {**results, "targets": ranked, "seen_targets": seen}

    def predictions(self, batches: Iterable[Batch], on_batch: OnBatch | None) -> Any:
        """Of this worker's samples, in order; None if on_batch takes them."""
        dense, kept = self._ops.dense_part, []

        def judge(batch: Batch, rows: dict[str, Any]) -> None:
            with dense.autocast():
                made = wide(inference.predict(dense.model, batch, rows))
            made = inference.on_cpu(made, batch.size)
            if on_batch is None:
                kept.append(made)
            else:
                on_batch(batch, made)

        self._judge_all(batches, judge)
        # A worker without samples gets none of the others' kind. All tell it, also those whose on_batch has taken everything.
        kinds = self._ops.rows.gather_objects(inference.none_of(kept[0]) if kept else None)
        if on_batch is not None:
            return None
        return inference.joined([next((kind for kind in kinds if kind is not None), torch.empty(0)), *kept])

    def recommended(
        self,
        batches: Iterable[Batch],
        k: int,
        *,
        table: str,
        history: str,
        exclude_seen: bool,
        candidates: Tensor | np.ndarray | Sequence[int] | None,
        on_batch: OnBatch | None,
    ) -> Recommended | None:
        """The same of the best items."""
        model, kept = self._ops.dense_part.model, []
        self._ops.rows.compare(
            {"recommend: table of the items": table, "recommend: candidates": "all" if candidates is None else "given"}
        )
        given = self._ops.rows.together(lambda: self._given(candidates), what="candidates")
        every = np.unique(self._keys(table)) if given is None else given
        self._ops.rows.together(lambda: inference.check_k(k, len(every)), what="candidates")
        blocks = candidate_blocks(torch.from_numpy(every), self.rows(table, every))

        def judge(batch: Batch, rows: dict[str, Any]) -> None:
            with self._ops.dense_part.autocast():
                queries = wide(model.query(batch, rows))  # type: ignore[operator]
            seen = inference.to_leave_out(batch, history) if exclude_seen else None
            best = inference.recommend(model.score, queries, blocks, k, seen=seen)  # type: ignore[arg-type]
            if on_batch is None:
                kept.append(best)
            else:
                on_batch(batch, best)

        self._judge_all(batches, judge)
        if on_batch is not None:
            return None
        none = Recommended(torch.empty(0, k, dtype=torch.int64), torch.empty(0, k))
        return Recommended(*(torch.cat(parts) for parts in zip(none, *kept, strict=True)))

    def _given(self, candidates: Tensor | np.ndarray | Sequence[int] | None) -> np.ndarray | None:
        inference.need_query_and_score(self._ops.dense_part.model, "`recommend`")
        if candidates is None:
            return None
        return inference.unique_sorted(one_list(candidates).values.numpy())

    def _keys(self, table: str) -> np.ndarray:
        """All keys of a table that have a row of their own, on all workers."""
        stores = [store for store in self._ops.stores if store.table.name == table]
        mine = [np.empty(0, np.int64), *(keys for store in stores for keys in store.saved_keys())]
        return np.concatenate(self._ops.rows.gather_objects(np.concatenate(mine)))

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

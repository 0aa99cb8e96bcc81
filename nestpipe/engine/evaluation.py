"""Looking rows up for evaluation, together with the other workers: nothing is born, counted or changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.engine.dense import call
from nestpipe.engine.loader import Loader
from nestpipe.engine.step import Context, StepOperations
from nestpipe.exchange.window import Window
from nestpipe.metrics import rank_all

Judge = Callable[[Batch, dict[str, Any]], None]  # looks at a batch and its rows


def lookup(
    ops: StepOperations, arena: Arena, batch: Batch | None, error: BaseException | None = None, *, number: int = 0
) -> Context | None:
    """The context of a batch whose rows have been read, or None if no worker has one."""
    has_data = batch is not None
    batch = Batch.empty([f.name for f in ops.plan.features]) if batch is None else batch
    ctx = Context(number, batch, Window([0, batch.size]), arena, error=error, has_data=has_data)
    ops.h2d(ctx)
    if not ops.route(ctx):
        return None
    ops.read(ctx)
    ops.emb(ctx, train=False)
    return ctx


def judge_all(ops: StepOperations, arena: Arena, model: nn.Module, loader: Loader, judge: Judge) -> None:
    """Calls judge(batch, rows) for each batch of this worker, and serves rows until no worker has batches left. What goes
    wrong on one worker is raised on all."""
    model.eval()
    try:
        with torch.inference_mode():
            for number in itertools.count():
                batch, error = None, None
                try:
                    batch = loader.next()
                except Exception as problem:
                    error = problem
                ctx = lookup(ops, arena, batch, error, number=number)
                if ctx is None:
                    return
                try:
                    if ctx.batch.size:
                        judge(*ops.inputs(ctx, 0, train=False))
                except Exception as problem:
                    ctx.error = problem
                ops.agree(ctx)
    finally:
        loader.close()
        model.train()


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
            metric.update(output.predictions, batch.labels)

    return judge, totals


def judge_ranking(
    model: nn.Module, metrics: dict[str, Any], candidate_rows: Tensor, candidates: Tensor, exclude: str | None
) -> Judge:
    """Feeds the rank of each sample's target among all candidates to the metrics. exclude: the feature whose keys are left
    out of a sample's ranking."""

    def judge(batch: Batch, rows: dict[str, Any]) -> None:
        if batch.labels is None:
            raise ValueError("ranking needs batch.labels: the key of each sample's target")
        ranks = rank_all(
            model.score,  # type: ignore[arg-type]
            queries_BD=model.query(batch, rows),  # type: ignore[operator]
            candidates_ND=candidate_rows,
            candidate_keys=candidates,
            target_keys=batch.labels,
            exclude=None if exclude is None else batch.keys[exclude],
        )
        for metric in metrics.values():
            metric.update(ranks)

    return judge

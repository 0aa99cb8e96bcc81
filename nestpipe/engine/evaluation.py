"""Looking rows up for evaluation, together with the other workers: nothing is born, counted or changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nestpipe.arena import Arena
from nestpipe.batch import Batch
from nestpipe.engine.loader import Loader
from nestpipe.engine.step import Context, StepOperations
from nestpipe.exchange.window import Window


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


def judge_all(
    ops: StepOperations, arena: Arena, model: nn.Module, loader: Loader, judge: Callable[[Batch, dict[str, Any]], None]
) -> None:
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

"""What a run tells of itself: entries of result.json, and the lines that `nestpipe train` prints at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nestpipe.best import Best
from nestpipe.config import Config
from nestpipe.engine.balance import Balance
from nestpipe.engine.waiting import Waiting
from nestpipe.running.feeding import reads_in_process
from nestpipe.running.resuming import BEST, CHECKPOINT
from nestpipe.tracking.progress import in_words
from nestpipe.trainer import FitResult, Trainer

CURVES = {"tensorboard": "tensorboard --logdir {folder}", "mlflow": "MLflow", "wandb": "Weights & Biases"}


def result_of(
    trainer: Trainer,
    config: Config,
    fitted: FitResult,
    best: Best | None,
    begun: int,
    predict: Callable[[range], dict[str, float]],
) -> dict[str, Any]:
    """`steps` are of all of its training, the other figures of the `session_steps` since it was started or resumed. Evaluations
    count neither for `seconds` nor for samples per second.

    predict: what waiting for the slowest worker would have been in some steps.
    """
    tables = {
        name: {**stats._asdict(), "bytes_per_row": stats.bytes_per_row} for name, stats in trainer.table_stats().items()
    }
    return {
        "schedule": config.setting.schedule,
        "micro_batches": trainer.micro_batches,
        "workers": trainer.world,
        "steps": trainer.steps,
        "resumed_after": begun,
        "ended_by": _why_it_ended(trainer, config, fitted, best),
        "best": None if best is None else {"metric": best.metric, "value": best.value, "step": best.step},
        "session_steps": fitted.steps,
        "samples": fitted.samples,
        "seconds": fitted.training_seconds,
        "evaluation_seconds": fitted.evaluation_seconds,
        "samples_per_second": fitted.samples_per_second,
        "tokens": fitted.tokens,
        "tokens_per_second": fitted.tokens_per_second,
        "mfu": fitted.mfu,
        "work": None if fitted.work is None else dataclasses.asdict(fitted.work),
        "first_loss": fitted.first_loss,
        "last_loss": fitted.last_loss,
        "skipped_batches": fitted.skipped,
        "reader": "process" if reads_in_process(config) else "thread",
        "digest": trainer.digest(),
        "bytes_sent": trainer.bytes_sent(),
        "balance": None if fitted.balance is None else dataclasses.asdict(fitted.balance),
        "waiting": None
        if fitted.waiting is None
        else dataclasses.asdict(fitted.waiting) | predict(range(begun, trainer.steps)),
        "replicas": config.setting.replicas,
        "tables": tables,
    }


def _why_it_ended(trainer: Trainer, config: Config, fitted: FitResult, best: Best | None) -> str:
    """In a word: "steps": all were done. "patience": nothing got better. "callback": one has called end_fit. "data": no more."""
    if config.train.steps is not None and trainer.steps >= config.train.steps:
        return "steps"
    if best is not None and best.has_waited_enough:
        return "patience"
    return "callback" if fitted.ended_early else "data"


def lines_of(result: dict[str, Any], config: Config, folder: Path) -> Iterator[str]:
    """For who has waited for it."""
    before = result["resumed_after"]
    yield (
        f"{result['steps']} steps{f', {before} of them before it was resumed; since then' if before else ','} "
        f"{result['samples']:,} samples in {result['seconds']:.1f} s ({result['samples_per_second']:,.0f} samples/s); "
        f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}"
    )
    work = result["work"]
    if work is not None:
        tokens = f"{result['tokens_per_second']:,.0f} tokens/s, " if result["tokens"] else ""
        used = f"not known ({work['why_not']})" if result["mfu"] is None else f"{result['mfu']:.1%}"
        yield (
            f"{tokens}MFU {used} of {work['machine'] / 1e9:,.0f} GFLOP/s, peak memory of a worker {work['memory'] / 1e6:,.0f} MB"
        )
    if result["workers"] > 1 and result["balance"] is not None:
        yield f"balance over workers (the most over the mean): {Balance(**result['balance'])}"
    if result["workers"] > 1 and result["waiting"] is not None:
        yield f"waiting for the slowest worker: {Waiting(**result['waiting'])}"
    for name, table in result["tables"].items():
        yield (
            f"table {name}: {table['rows']:,} rows, {table['bytes'] / 1e6:,.1f} MB, {table['bytes_per_row']:.0f} bytes a row"
        )
    if result["skipped_batches"]:
        yield f"{result['skipped_batches']} batches were skipped: something in them was not finite"
    best = result["best"]
    if best is not None and best["step"] is not None:
        patience = f"; ended early, with no better one in {config.train.patience} evaluations"
        ended = patience if result["ended_by"] == "patience" else ""
        yield f"best: {best['metric']} {best['value']:.4f} after step {best['step']}{ended}"
    if result["metrics"]:
        of = " of the best checkpoint" if result["judged"] == BEST else ""
        yield f"metrics{of}: {in_words(result['metrics'])}"
    yield f"digest: {result['digest']}"
    curves = " and ".join(CURVES[name].format(folder=folder) for name in config.train.track)
    models = f"{folder}/{CHECKPOINT}" + (f", the best {folder}/{BEST}" if (folder / BEST).is_dir() else "")
    yield f"results: {folder}/result.json, {f'curves: {curves}, ' if curves else ''}model and tables: {models}"

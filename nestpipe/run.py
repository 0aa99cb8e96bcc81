"""One run from a config: data, trainer, curves, evaluation, result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nestpipe import trace
from nestpipe.batch import Batch
from nestpipe.checkpoint import Damaged, complete, folder_of
from nestpipe.config import Built, Config, TrainSection, build
from nestpipe.data import DATASETS, Dataset, reader
from nestpipe.data.dataset import skip
from nestpipe.engine.step import StepResult
from nestpipe.metrics import AUC, NormalizedEntropy
from nestpipe.process import join_group
from nestpipe.trainer import Trainer

CHECKPOINT = "final"
PASSING = 0.01  # of train.timeout, that a resumed run may take for each batch that it passes over
log = logging.getLogger("nestpipe")


def make_trainer(config: Config, *, storage: Path, record: bool = False) -> tuple[Trainer, Built]:
    join_group(config.train.timeout)
    built = build(config)
    trainer = Trainer(
        built.model,
        built.tables,
        built.features,
        dense_optimizer=built.dense_optimizer,
        schedule=config.schedule.name,
        micro_batches=config.schedule.micro_batches,
        window_cache=config.schedule.window_cache,
        clustering=config.schedule.clustering,
        seed=config.train.seed,
        on_nonfinite=config.train.on_nonfinite,
        data_timeout=config.train.timeout,
        look_ahead=config.schedule.look_ahead,
        storage=storage if config.train.storage is None else Path(config.train.storage),
        record=record,
        check_freshness=config.schedule.check_freshness,
    )
    trainer.config = _plain(config.to_dict())
    # After the model was built: from here on every rank draws its own dropout.
    torch.manual_seed(config.train.seed * 65_537 + trainer.rank)
    return trainer, built


class Stopped(Exception):
    """Training was asked to stop by a signal, and has saved what it had."""


def train(
    config: Config, *, folder: Path, json_file: Path | None, record: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Trains, evaluates, saves; returns what `--json` writes.

    record: keeps what ran when, for `nestpipe trace`. resume: goes on from the newest sound checkpoint of the run folder, if
    there is one. SIGTERM saves a checkpoint and raises Stopped.
    """
    if _reads_in_process(config):
        reader.prepare()
    trainer, built = make_trainer(config, storage=folder / "storage", record=record)
    with _asked_by_signal(trainer):  # also while it is closed: a launcher ends the others when one leaves
        try:
            return _train(trainer, built, config, folder=folder, json_file=json_file, record=record, resume=resume)
        finally:
            trainer.close()


def _train(
    trainer: Trainer,
    built: Built,
    config: Config,
    *,
    folder: Path,
    json_file: Path | None,
    record: bool,
    resume: bool,
) -> dict[str, Any]:
    first = trainer.rank == 0
    saved = folder / "checkpoints" if config.train.checkpoints is None else Path(config.train.checkpoints)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _set_aside(folder, None if resume else saved)
        write_json(folder / "config.json", config.to_dict())

    trainer.on_first(prepare, what="run folder")
    if resume:
        _resume(trainer, saved)
    curves = Curves(folder, enabled=first, steps=config.train.steps, done=trainer.steps)
    validate, every = config.train.eval_every, config.train.checkpoint_every
    checkpoints = trainer.checkpoints(saved, keep=config.train.keep_checkpoints, full_every=config.train.full_every)

    def on_step(result: StepResult) -> None:
        curves.step(result)
        if config.train.lr_decay == "cosine":
            trainer.scale_lr(_cosine(trainer.steps, config.train.steps or 1))
        if validate and trainer.steps % validate == 0:
            curves.metrics("valid", evaluate_split(trainer, built, config, "valid"), trainer.steps)
        if every and trainer.steps % every == 0:
            trainer.checkpoint(checkpoints)

    what = (built.data, config.train, trainer.rank, trainer.world, trainer.position)
    steps = None if config.train.steps is None else max(0, config.train.steps - trainer.steps)
    try:
        with contextlib.ExitStack() as stack:
            batches: Iterator[Batch] = _epochs(*what)
            if _reads_in_process(config):
                batches = stack.enter_context(reader.in_process(_epochs, *what))
            if trainer.steps and steps != 0:  # passing over what it was trained on before may take long
                limit = config.train.timeout * (1 + PASSING * trainer.position)
                head = trainer.wait_for(lambda: next(batches, None), what="passing over data", limit=limit)
                batches = itertools.chain([] if head is None else [head], batches)
            pauses = [number for number in (validate, every) if number]
            fitted = trainer.fit(batches, steps=steps, on_step=on_step, pause_every=pauses)
        curves.close_bar()
        checkpoints.wait()
        if trainer.stopped:
            path = saved / folder_of(trainer.steps)
            if not trainer.from_first(path.exists()):
                trainer.save(path)
            raise Stopped(f"stopped by a signal after step {trainer.steps}; saved to {path}; go on with --resume")
        metrics = evaluate_split(trainer, built, config, config.train.eval_split)
        curves.metrics(config.train.eval_split, metrics, trainer.steps)
    finally:
        curves.close()
    if record:
        trainer.save_trace(folder)
    trainer.save(folder / CHECKPOINT)
    digest, stats, sent = trainer.digest(), trainer.table_stats(), trainer.bytes_sent()
    result = {
        "schedule": config.schedule.name,
        "micro_batches": trainer.micro_batches,
        "workers": trainer.world,
        "steps": fitted.steps,
        "samples": fitted.samples,
        "seconds": fitted.seconds,
        "samples_per_second": fitted.samples_per_second,
        "first_loss": fitted.first_loss,
        "last_loss": fitted.last_loss,
        "skipped_batches": fitted.skipped,
        "metrics": metrics,
        "digest": digest,
        "bytes_sent": sent,
        "tables": {name: {**one._asdict(), "bytes_per_row": one.bytes_per_row} for name, one in stats.items()},
    }
    if first:
        write_json(folder / "result.json", result)
        if json_file is not None:
            write_json(json_file, result)
    return result


def evaluate(config: Config, *, checkpoint: Path, split: str) -> dict[str, float]:
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint.parent} has no checkpoint {checkpoint.name!r}: the run has not finished")
    trainer, built = make_trainer(config, storage=checkpoint.parent / "storage-of-evaluate")
    try:
        trainer.load(checkpoint)
        return evaluate_split(trainer, built, config, split)
    finally:
        trainer.close()


def evaluate_split(trainer: Trainer, built: Built, config: Config, split: str) -> dict[str, float]:
    """HR@k and NDCG@k for a model that ranks candidates, AUC and normalized entropy for one that predicts clicks."""
    settings = config.train
    batches = built.data.batches(
        split, batch_size=settings.eval_batch_size, rank=trainer.rank, world=trainer.world, seed=settings.seed
    )
    if hasattr(built.model, "score") and hasattr(built.data, "candidates"):
        history = getattr(built.model, "history", "history")
        table = next(feature.table for feature in built.features if feature.name == history)
        return trainer.evaluate_ranking(
            batches,
            table=table,
            candidates=built.data.candidates(),
            ks=settings.rank_at,
            history=history,
            exclude_seen=settings.exclude_seen,
            seen_targets=settings.seen_targets,
        )
    return trainer.evaluate(batches, {"AUC": AUC(), "NE": NormalizedEntropy()})


def _reads_in_process(config: Config) -> bool:
    parses = getattr(DATASETS[config.data["kind"]], "parses", False)
    return {"auto": parses, "thread": False, "process": True}[config.train.reader]


def _resume(trainer: Trainer, folder: Path) -> None:
    """Loads the newest sound checkpoint; what is wrong with newer ones is told, and they are put out of the way."""
    names = trainer.from_first([path.name for path in complete(folder)])
    for name in names:
        try:
            trainer.load(folder / name)
        except Damaged as error:
            if trainer.rank == 0:
                log.warning(f"{error}")
            trainer.on_first(functools.partial(_put_aside, folder / name), what="checkpoint")
            continue
        if trainer.rank == 0:
            log.warning(f"resuming after step {trainer.steps}, from {folder / name}")
        return
    if trainer.rank == 0:
        log.warning(f"no {'sound ' if names else ''}checkpoint in {folder}: starting from the beginning")


def _put_aside(path: Path) -> None:
    """Under a name that is no checkpoint's: its step will be saved anew."""
    free = (path.with_name(f"damaged-{path.name}-{number}") for number in itertools.count(1))
    path.rename(next(place for place in free if not place.exists()))


@contextlib.contextmanager
def _asked_by_signal(trainer: Trainer) -> Iterator[None]:
    """While it lasts, SIGTERM asks training to stop; where signals cannot be caught (another thread) it is as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _epochs(data: Dataset, settings: TrainSection, rank: int, world: int, passed: int) -> Iterator[Batch]:
    """The batches of this worker, without the first `passed`, which it was trained on before."""
    epochs = settings.epochs or (1 if settings.steps is None else None)
    for epoch in itertools.count() if epochs is None else range(epochs):
        source = data.batches(
            "train", batch_size=settings.batch_size, rank=rank, world=world, seed=settings.seed, epoch=epoch
        )
        batches = iter(source)  # a data set of one's own may give a list
        skipped = skip(batches, passed)
        passed -= skipped
        empty = skipped == 0
        for batch in batches:
            empty = False
            yield batch
        if empty:
            return  # this rank's share is empty; it takes part without data


def _set_aside(folder: Path, checkpoints: Path | None) -> None:
    """An earlier run's result must not stand beside this one's; its checkpoints are kept under another name."""
    (folder / "result.json").unlink(missing_ok=True)
    trace.clear(folder)
    for old in (folder / CHECKPOINT, *([checkpoints] if checkpoints is not None else [])):
        if old.exists():
            free = (old.with_name(f"{old.name}-{number}") for number in itertools.count(1))
            old.rename(next(path for path in free if not path.exists()))


def _cosine(step: int, steps: int) -> float:
    return max(0.05, 0.5 * (1.0 + math.cos(math.pi * step / steps)))


def write_json(path: Path, value: Any) -> None:
    """Complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not defined (a metric of an empty split) becomes null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_writable(*files: Path | None, folder: Path | None = None) -> None:
    """Raises ValueError now rather than after the work whose result would be written there. None: nothing is."""
    for path, must_be_folder in ((folder, True), *((file, False) for file in files)):
        if path is None:
            continue
        try:
            existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        except OSError as error:  # a name that is too long, say
            raise ValueError(f"cannot write {path}: {error.strerror or error}; choose another path") from error
        must_be_folder = must_be_folder or existing != path
        which = "it" if existing == path else existing
        if existing.is_dir() != must_be_folder:
            kind = "a file" if must_be_folder else "a folder"
            raise ValueError(f"cannot write {path}: {which} is {kind}; choose another path")
        if not os.access(existing, os.W_OK):
            raise ValueError(f"cannot write {path}: no permission to write {existing}; choose another path")


def in_words(metrics: dict[str, float]) -> str:
    """`HR@10 0.0612, targets 22,363`: counts are whole numbers."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in metrics.items()
    )


SAY_EVERY = 10.0  # seconds between lines where there is no terminal for a bar


class Curves:
    """Progress (a bar on a terminal, a line now and then elsewhere) and curves for TensorBoard, on one rank."""

    def __init__(self, folder: Path, *, enabled: bool, steps: int | None, done: int = 0) -> None:
        self._bar: tqdm | None = None
        self._writer: Any = None
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is used

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._bar = tqdm(
            total=steps, initial=done, unit="step", mininterval=0.2, dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._of = "" if steps is None else f"/{steps}"
        self._samples, self._since = 0, time.perf_counter()
        self._said = self._since

    def step(self, result: StepResult) -> None:
        if self._bar is None:
            return
        self._samples += result.samples
        now = time.perf_counter()
        if now - self._since > 0.2:
            rate = self._samples / (now - self._since)
            state = f"loss {result.loss:.4f}, {rate:,.0f} samples/s"
            self._bar.set_postfix_str(state, refresh=False)
            if self._bar.disable and now - self._said > SAY_EVERY:
                print(f"step {result.step + 1}{self._of}: {state}", file=sys.stderr, flush=True)
                self._said = now
            self._writer.add_scalar("train/loss", result.loss, result.step)
            self._writer.add_scalar("train/samples_per_second", rate, result.step)
            self._since, self._samples = now, 0
        self._bar.update(1)

    def metrics(self, split: str, metrics: dict[str, float], step: int) -> None:
        if self._writer is None:
            return
        for name, value in metrics.items():
            if isinstance(value, float):  # counts make no curves
                self._writer.add_scalar(f"{split}/{name}", value, step)
        tqdm.write(f"step {step}, {split}: {in_words(metrics)}")

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        self.close_bar()
        if self._writer is not None:
            self._writer.close()

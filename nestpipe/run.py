"""One run from a config: data, trainer, curves, evaluation, result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nestpipe.batch import Batch
from nestpipe.best import Best
from nestpipe.callbacks import Callback, tell
from nestpipe.checkpoint import folder_of
from nestpipe.config import Built, Config
from nestpipe.config.fitted import take_fitted
from nestpipe.data import reader
from nestpipe.data.epochs import Headed
from nestpipe.data.stream import Streamed
from nestpipe.engine.context import StepResult
from nestpipe.errors import Stopped, TrainingError
from nestpipe.exchange.samples import token_feature
from nestpipe.files import write_json
from nestpipe.running.evaluating import check_best_metric, evaluate_split, try_evaluations
from nestpipe.running.feeding import dealt_by_index, epochs_of, predicted_waiting, reads_in_process
from nestpipe.running.making import make_trainer, trainer_of
from nestpipe.running.places import check_places, check_unused
from nestpipe.running.result import result_of
from nestpipe.running.resuming import (
    BEST,
    CHECKPOINT,
    CHECKPOINTS,
    NEXT,
    checkpoint_folder,
    newest_first,
    replace_final,
    resume_from,
)
from nestpipe.running.signals import asked_by_signal
from nestpipe.tracking import check_installed, tracker_class
from nestpipe.tracking.progress import Progress, in_words
from nestpipe.trainer import Trainer

__all__ = ["check_places", "check_unused", "evaluate", "in_words", "make_trainer", "train"]

PASSING = 0.01  # of train.timeout, that a resumed run may take for each batch that it passes over
log = logging.getLogger("nestpipe")


def train(
    config: Config,
    *,
    folder: str | Path,
    json_file: Path | None = None,
    record: bool = False,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """What `nestpipe train` does: trains, saves, evaluates; returns what it writes to result.json, on every worker. What can be
    wrong with the evaluation is looked for before the training, and what goes wrong after it costs nothing: the last
    checkpoint is there.

    record: keeps what ran when, for `nestpipe trace`. resume: goes on from the newest sound checkpoint of the run folder, if
    there is one; without it the folder must have no run in it. SIGTERM saves a checkpoint and raises Stopped.
    json_file: is written too. callbacks: are told of the training, beside the trackers of train.track; see Trainer.fit.
    """
    folder = Path(folder)
    check_places(config, folder)
    if resume:
        take_fitted(config, newest_first(folder, checkpoint_folder(config, folder)))
    else:
        check_unused(config, folder)
    if reads_in_process(config):
        reader.prepare()
    trainer, built = make_trainer(config, storage=folder / "storage", record=record)
    with contextlib.ExitStack() as watching:  # ends with the last figure that there is to tell
        with asked_by_signal(trainer):  # also while it is closed: a launcher ends the others when one leaves
            try:
                ended = _train(
                    trainer, built, config, folder, watching, record=record, resume=resume, callbacks=callbacks
                )
                if ended.best is None:
                    _finish(trainer, built, config, folder, ended, json_file)
            finally:
                trainer.close()
        if ended.best is not None:
            # Rows of another step: in a trainer of its own, made when the first has given back its memory.
            del trainer
            with _judging_after_training(folder):
                trainer = trainer_of(config, built, storage=folder / "storage-of-evaluate")
            with asked_by_signal(trainer):
                try:
                    _finish(trainer, built, config, folder, ended, json_file)
                finally:
                    trainer.close()
    return ended.result


@dataclasses.dataclass
class _Ended:
    """A training that is over and saved. result: what it tells of itself. best: a checkpoint that is to be judged in place of the
    last. before: all of it was there when the run began. watchers: are told of what is still to come."""

    result: dict[str, Any]
    best: Path | None
    before: bool
    watchers: Sequence[Callback]


def _train(
    trainer: Trainer,
    built: Built,
    config: Config,
    folder: Path,
    watching: contextlib.ExitStack,
    *,
    record: bool,
    resume: bool,
    callbacks: Sequence[Callback],
) -> _Ended:
    first, final, saved = trainer.rank == 0, folder / CHECKPOINT, checkpoint_folder(config, folder)
    settings = config.train
    # Until `prepare` nothing in the run folder is touched but checkpoints that are damaged: what is refused leaves it as it was.
    trainer.workers.on_first(lambda: check_installed(settings.track), what="train.track")
    check_best_metric(built, config)
    try:
        try_evaluations(trainer, built, config)
    except Stopped:
        raise Stopped("stopped by a signal before the first step; there is nothing to save") from None
    loaded = resume_from(trainer, folder, saved) if resume else None
    checkpoints = trainer.checkpoints(saved, keep=settings.keep_checkpoints, full_every=settings.full_every)
    best = _best_of(trainer, config, folder)
    begun, every = trainer.steps, settings.checkpoint_every

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NEXT).exists():
            replace_final(folder)
        write_json(folder / "config.json", config.to_dict())

    def save_somewhere() -> Path:
        """Where checkpoints belong, or if that fails in the run folder."""
        name = folder_of(trainer.steps)
        try:
            return _save_once(trainer, saved / name)
        except TrainingError as error:
            if saved == folder / CHECKPOINTS:
                raise
            if first:
                log.warning(f"{saved / name} cannot be saved, {folder / CHECKPOINTS} takes its place: {error}")
            return _save_once(trainer, folder / CHECKPOINTS / name)

    def leave() -> NoReturn:
        """After a signal: with all that was trained on saved."""
        if not trainer.steps:
            raise Stopped("stopped by a signal before the first step; there is nothing to save")
        path = loaded if trainer.steps == begun and loaded is not None else save_somewhere()
        raise Stopped(f"stopped by a signal after step {trainer.steps}; saved to {path}; go on with --resume")

    def validate() -> dict[str, float] | None:
        try:
            return _judge(trainer, built, config, "valid", samples=settings.eval_samples)
        except TrainingError as error:
            if first:
                log.warning(f"the evaluation after step {trainer.steps} failed, training goes on: {error}")
            return None

    def on_step(result: StepResult) -> None:
        if every and trainer.steps % every == 0:
            trainer.checkpoint(checkpoints)

    tokens, squares = token_feature(built.features), dealt_by_index(config, built)
    what = (built.data, settings, trainer.rank, trainer.world, trainer.position, tokens, squares, trainer.data_state)
    if isinstance(built.data, Streamed):
        built.data.remember(folder / "lines" / f"{trainer.rank}.jsonl")
    steps = None if settings.steps is None else max(0, settings.steps - trainer.steps)
    if best is not None and best.has_waited_enough:
        steps = 0
    with contextlib.ExitStack() as reading:
        batches: Iterator[Batch] = epochs_of(*what)
        if reads_in_process(config):
            batches = reading.enter_context(reader.in_process(epochs_of, *what))
        more = steps != 0
        if trainer.steps and more:  # passing over what it was trained on before may take long
            limit = settings.timeout * (1 + PASSING * trainer.position)
            try:
                head = trainer.workers.wait_for(lambda: next(batches, None), what="passing over data", limit=limit)
            except Stopped:
                leave()
            batches = Headed(head, batches)
            more = trainer.workers.any(head is not None)
        finished = loaded == final and not more  # before: all is there, and stays as it is
        if not finished:
            trainer.workers.on_first(prepare, what="run folder")
            loaded = final if loaded == folder / NEXT else loaded
        progress = Progress(enabled=first and not finished, steps=settings.steps, done=trainer.steps)
        watching.callback(progress.close)
        watchers: list[Callback] = [progress]
        for name in settings.track if first and not finished else ():
            tracker = tracker_class(name)(folder, params=config.to_dict())
            watching.callback(tracker.on_end)
            watchers.append(tracker)
        if trainer.workers.any(trainer.stop_asked):
            leave()
        validates = settings.eval_every > 0 and not finished
        with trainer.watched_by(watchers):
            fitted = trainer.fit(
                batches,
                steps=steps,
                on_step=on_step,
                pause_every=every or None,
                evaluate=validate if validates else None,
                evaluate_every=settings.eval_every if validates else None,
                callbacks=[*([] if best is None else [best]), *callbacks],
            )
            reading.close()
            progress.close()
            checkpoints.wait()
    if trainer.stopped:
        leave()
    if loaded != final or trainer.steps > begun:
        trainer.save(folder / NEXT)
        trainer.workers.on_first(lambda: replace_final(folder), what="final checkpoint")
        tell(watchers, "on_checkpoint", final, trainer.steps)
    with _judging_after_training(folder, tell_it=first):
        if record and not finished:
            trainer.workers.wait_for(lambda: trainer.save_trace(folder), what="trace", limit=settings.timeout)
        predict = functools.partial(predicted_waiting, built.data, settings, trainer.world, squares)
        result = result_of(trainer, config, fitted, best, begun, predict)
        judged = None if best is None else best.checkpoint()
        if best is not None and best.step is not None and judged is None and first:
            log.warning(f"{folder / BEST} does not hold the best ({best.in_words()}): the last checkpoint is judged")
    result["judged"] = CHECKPOINT if judged is None else BEST
    if best is not None and best.step == trainer.steps:
        judged = None  # the rows are here
    return _Ended(result, judged if settings.eval_split != "none" else None, finished, watchers)


def _finish(
    trainer: Trainer, built: Built, config: Config, folder: Path, ended: _Ended, json_file: Path | None
) -> None:
    """Judges the run and writes its result."""
    split, result = config.train.eval_split, ended.result
    with _judging_after_training(folder, tell_it=trainer.rank == 0):
        if ended.best is not None:
            trainer.load(ended.best)
        metrics: dict[str, float] | None = {}
        if split != "none":
            metrics = None if trainer.workers.any(trainer.stop_asked) else _judge(trainer, built, config, split)
            if metrics is None:
                raise Stopped("stopped by a signal")
            tell(ended.watchers, "on_evaluate", split, metrics, trainer.steps)
        result["metrics"] = metrics

        def write() -> None:
            if not (ended.before and (folder / "result.json").exists()):
                write_json(folder / "result.json", result)
            if json_file is not None:
                write_json(json_file, result)

        trainer.workers.on_first(write, what="result")


@contextlib.contextmanager
def _judging_after_training(folder: Path, *, tell_it: bool = False) -> Iterator[None]:
    """What goes wrong in it has not cost the training, and that is told."""
    after = f"the training is complete and saved to {folder / CHECKPOINT}; `nestpipe evaluate {folder}` judges it"
    try:
        yield
    except Stopped as error:
        raise Stopped(f"{error}; {after}") from error
    except Exception:
        if tell_it:
            log.warning(after)
        raise


def _judge(
    trainer: Trainer, built: Built, config: Config, split: str, *, samples: int | None = None
) -> dict[str, float] | None:
    """None if a worker is asked to stop meanwhile."""
    try:
        return evaluate_split(trainer, built, config, split, samples=samples)
    except (TrainingError, Stopped):
        if trainer.workers.any(trainer.stop_asked):
            return None
        raise


def _best_of(trainer: Trainer, config: Config, folder: Path) -> Best | None:
    settings = config.train
    if settings.best_metric is None:
        return None
    return Best(
        trainer,
        settings.best_metric,
        folder=folder / BEST,
        patience=settings.patience,
        direction=None if settings.best_direction == "auto" else settings.best_direction,
    )


def _save_once(trainer: Trainer, path: Path) -> Path:
    if not trainer.workers.from_first(os.path.exists(path)):  # not Path.exists, which raises where it may not look
        trainer.save(path)
    return path


def evaluate(config: Config, *, checkpoint: Path, split: str) -> dict[str, float]:
    if not checkpoint.is_dir():
        kept = "the run keeps none (train.best_metric), or has not been evaluated yet"
        why = kept if checkpoint.name == BEST else "the run has not finished"
        raise ValueError(f"{checkpoint.parent} has no checkpoint {checkpoint.name!r}: {why}")
    config = dataclasses.replace(
        config, setting=dataclasses.replace(config.setting, replicas=1)
    )  # on any number of workers
    trainer, built = make_trainer(config, storage=checkpoint.parent / "storage-of-evaluate")
    try:
        trainer.load(checkpoint)
        return evaluate_split(trainer, built, config, split)
    finally:
        trainer.close()

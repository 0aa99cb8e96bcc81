"""The checkpoints of a run folder: which one a run goes on from, and how the last one takes its place."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from pathlib import Path

from nestpipe import trace
from nestpipe.checkpoint import Damaged, complete, next_of
from nestpipe.checkpoint import manifest as manifests
from nestpipe.config import Config
from nestpipe.trainer import Trainer

CHECKPOINT = "final"
BEST = "best"  # by train.best_metric
CHECKPOINTS = "checkpoints"  # those before it, unless train.checkpoints names another folder
NEXT = "final-next"  # what will take its place, complete, until the one before is out of the way
log = logging.getLogger("nestpipe")


def checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / CHECKPOINTS if config.train.checkpoints is None else Path(config.train.checkpoints)


def resume_from(trainer: Trainer, folder: Path, saved: Path) -> Path | None:
    """Loads the newest sound checkpoint and returns it; what is wrong with newer ones is told, and they are put out of the way
    once one has been loaded."""
    damaged, loaded = [], None
    for path in trainer.workers.from_first(newest_first(folder, saved)):
        try:
            trainer.load(path)
        except Damaged as error:
            damaged.append(path)
            if trainer.rank == 0:
                log.warning(f"{error}")
            continue
        trainer.scale_lr(1.0)  # a version before this one saved what train.lr_decay had made of them
        loaded = path
        break
    for path in damaged:
        trainer.workers.on_first(functools.partial(_put_aside, path), what="checkpoint")
    if trainer.rank == 0 and loaded is not None:
        log.warning(f"resuming after step {trainer.steps}, from {loaded}")
    elif trainer.rank == 0:
        log.warning(f"no {'sound ' if damaged else ''}checkpoint in {saved}: starting from the beginning")
    return loaded


def newest_first(folder: Path, saved: Path) -> list[Path]:
    """All that a run can go on from; of the same step, the one that would be evaluated first."""
    # Checkpoints are also in the run folder if they could not be saved where they belong.
    paths = dict.fromkeys((*complete(saved), *complete(folder / CHECKPOINTS)))
    places = [(manifests.step_of(path.name), 0, path) for path in paths]
    best = folder / BEST
    for order, path in zip((-2, -1, 1, 2), (next_of(best), best, folder / CHECKPOINT, folder / NEXT), strict=True):
        if path.exists():
            try:
                places.append((manifests.read(path).step, order, path))
            except Damaged:
                places.append((sys.maxsize, order, path))  # it is told and put out of the way, as others are
    return [path for *_, path in sorted(places, reverse=True)]


def _put_aside(path: Path) -> None:
    """Under a name that is no checkpoint's: its step will be saved anew."""
    free = (path.with_name(f"damaged-{path.name}-{number}") for number in itertools.count(1))
    path.rename(next(place for place in free if not place.exists()))


def replace_final(folder: Path) -> None:
    """The one before is kept under another name; what told of it goes."""
    old = folder / CHECKPOINT
    (folder / "result.json").unlink(missing_ok=True)
    trace.clear(folder)
    if old.exists():
        free = (old.with_name(f"{old.name}-{number}") for number in itertools.count(1))
        old.rename(next(path for path in free if not path.exists()))
    (folder / NEXT).rename(old)

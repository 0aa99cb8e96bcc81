"""Where a run is written: looked at before the training begins."""

from __future__ import annotations

from pathlib import Path

from nestpipe.checkpoint import complete, next_of
from nestpipe.config import Config
from nestpipe.files import check_writable
from nestpipe.running.resuming import BEST, CHECKPOINT, CHECKPOINTS, NEXT, checkpoint_folder


def check_places(config: Config, folder: Path) -> None:
    """Raises ValueError if the run could not be written where it belongs: itself, its checkpoints, its tables on disk."""
    for place in (folder, checkpoint_folder(config, folder), Path(config.train.storage or folder)):
        check_writable(folder=place)


def check_unused(config: Config, folder: Path) -> None:
    """Raises ValueError if there is a run in the folder already, or checkpoints of one where this one's belong."""
    best = folder / BEST
    for name in ("config.json", "result.json", CHECKPOINT, NEXT, BEST, next_of(best).name, "tensorboard"):
        if (folder / name).exists():
            raise ValueError(
                f"{folder} has a run in it already ({name}): go on with it by --resume (from the beginning, if it has saved "
                f"nothing yet), or choose another --out"
            )
    for path in (*complete(checkpoint_folder(config, folder)), *complete(folder / CHECKPOINTS)):
        raise ValueError(
            f"{path.parent} has checkpoints of a run ({path.name}): go on with it by --resume, or choose another --out or "
            f"train.checkpoints"
        )

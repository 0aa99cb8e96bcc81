"""The checkpoint that is exported: of a run, of a folder of checkpoints, or one itself; also while the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import Damaged, Manifest
from nestpipe.checkpoint.settings import Settings

FINAL, CHECKPOINTS, CONFIG = "final", "checkpoints", "config.json"  # of a run folder


def checkpoint_of(path: Path) -> Path:
    """The newest complete checkpoint of a run, or of a folder of checkpoints; or the checkpoint itself."""
    if (path / manifests.MANIFEST).exists():
        return path
    if manifests.complete(path):
        return manifests.complete(path)[0]
    steps = {}
    for found in (*manifests.complete(path / CHECKPOINTS)[:1], path / FINAL):
        with contextlib.suppress(Damaged):  # there is none, or not yet
            steps[found] = manifests.read(found).step
    if steps:
        return max(steps, key=lambda found: (steps[found], found.name == FINAL))
    if (path / CONFIG).exists():
        raise ValueError(
            f"{path} has no complete checkpoint yet; set train.checkpoint_every to have some before the run's end, or give the "
            f"folder that train.checkpoints names"
        )
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a checkpoint, or of a run")
    raise ValueError(f"{path} is neither a run folder nor a checkpoint, nor a folder of checkpoints")


@contextlib.contextmanager
def sound(path: Path) -> Iterator[Sequence[Manifest]]:
    """The chain of manifests of a checkpoint, to be read. Every byte is checked meanwhile, in a thread; what is wrong is raised
    at the end at the latest: nothing that was made of it may get its name before."""
    chain = manifests.chain(path)
    with ThreadPoolExecutor(1) as beside:
        checking = beside.submit(manifests.require_sound, path)
        try:
            yield chain
            checking.result()
        except Exception as error:
            # What was read may have been nonsense, and led to anything: then that is what to tell.
            problem = checking.exception()
            for manifest in chain:
                if not (manifest.path / manifests.MANIFEST).exists():
                    raise ValueError(
                        f"{manifest.path} was removed while it was exported: a run keeps its newest checkpoints only "
                        f"(train.keep_checkpoints); export a newer one"
                    ) from error
            if isinstance(problem, Damaged):
                raise problem from None
            raise


def need_declarations(chain: Sequence[Manifest]) -> Settings:
    """What a bundle says of tables and features; ValueError if the checkpoint does not know."""
    settings = chain[0].settings
    if settings.features is None or settings.inits is None:
        raise ValueError(
            f"{chain[0].path} was saved by an earlier version of nestpipe, which did not note features and first values: load it "
            f"with this version (--resume, or Trainer.load) and save it again"
        )
    return settings

"""A checkpoint in the place of another: the old one stays until the new one is complete, whenever the program ends."""

from __future__ import annotations

import shutil
from pathlib import Path

from nestpipe.sealed import sync_folder


def next_of(path: Path) -> Path:
    """What will take the place of a checkpoint, complete, until the one before is out of the way."""
    return path.with_name(f"{path.name}-next")


def settle(path: Path) -> None:
    """What is complete takes its place, also where a program has ended in between. For one worker."""
    old, new = path.with_name(f".{path.name}.old"), next_of(path)
    if new.exists():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)

"""Files that are there whole or not at all: a reader, or whoever comes after a crash, never meets half of one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write: what stands there becomes `path` at the end, or goes if an error ends it. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """JSON has no NaN: what is not defined (a metric of an empty split) becomes null."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_local(path: Path) -> None:
    """Raises ValueError for a URL, which would become a folder named "s3:" here."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ValueError(
            f"cannot write {path}: it is a URL, and what is written stays on file systems: give a path, of a shared disk or a "
            f"mounted bucket where several machines write"
        )


def check_writable(*files: Path | None, folder: Path | None = None) -> None:
    """Raises ValueError now rather than after the work whose result would be written there. None: nothing is."""
    for path, must_be_folder in ((folder, True), *((file, False) for file in files)):
        if path is None:
            continue
        check_local(path)
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

"""Folders that are there whole or not at all: a manifest names every file with its size and CRC-32, and has a checksum itself.

    manifest.json   written last
    manifest.sum    the CRC-32 of the manifest

Checkpoints and bundles are such folders. What else their manifests say is theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST, SUM = "manifest.json", "manifest.sum"
BLOCK = 1 << 20

Files = Mapping[str, tuple[int, int]]  # {name: (bytes, CRC-32)}


class Damaged(ValueError):
    """A folder that must not be loaded; says which file, what is wrong with it and what to do."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a folder is, for messages. formats: the numbers that are read. cut_off: what leaves one without a manifest.
    remedy: what to do about one that is damaged."""

    name: str
    formats: tuple[int, ...]
    cut_off: str
    remedy: str


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def write(path: Path, values: Mapping[str, Any], files: Files) -> int:
    """Seals a folder, all of whose files are there; it survives a loss of power from here on. Returns the CRC-32 of the
    manifest."""
    listed = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in files.items()}
    text = (json.dumps({**values, "files": listed}, indent=1) + "\n").encode()
    write_durably(path / SUM, f"{zlib.crc32(text):08x}\n".encode())
    write_durably(path / MANIFEST, text)
    sync_folder(path)
    return zlib.crc32(text)


def read(path: Path, kind: Kind) -> tuple[dict[str, Any], int]:
    """What a manifest says, and its CRC-32. Checks the manifest itself, not the files that it names."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        if not path.exists():
            raise Damaged(f"{path} does not exist; give the folder of a {kind.name}") from None
        raise Damaged(
            f"{path} is not a {kind.name}: it has no {MANIFEST}; {kind.cut_off}, or it is another folder"
        ) from None
    except OSError as error:
        raise Damaged(f"{path / MANIFEST} cannot be read: {error.strerror or error}") from error
    try:
        values = json.loads(text)
        number = values["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path / MANIFEST} is damaged ({error}); {kind.remedy}") from None
    if values.get("kind", "checkpoint") != kind.name:  # checkpoints do not say what they are
        raise Damaged(f"{path} is a {values.get('kind', 'checkpoint')!s:.20}; give the folder of a {kind.name}")
    if number not in kind.formats or type(number) is not int:
        known = " to ".join(str(limit) for limit in sorted({min(kind.formats), max(kind.formats)}))
        raise Damaged(
            f"{path} has format {number!r:.40}, this version of nestpipe reads {known}: use the version that wrote it"
        )
    try:
        told = (path / SUM).read_bytes()
    except OSError as error:
        raise Damaged(f"{path / SUM} cannot be read ({error.strerror or error}); {kind.remedy}") from None
    if told != f"{zlib.crc32(text):08x}\n".encode():
        raise Damaged(f"{path / MANIFEST} is damaged: it does not fit its checksum in {SUM}; {kind.remedy}")
    return values, zlib.crc32(text)


def files_of(values: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of a manifest; ValueError, KeyError or TypeError for what `write` never wrote."""
    return {name: (whole(file["bytes"], 0), int(file["crc32"], 16)) for name, file in values["files"].items()}


def whole(value: Any, least: int) -> int:
    """An entry of a manifest that counts something."""
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{value!r:.40} must be a whole number of at least {least}")
    return value


def problem_of(folder: Path, name: str, size: int, crc: int | None) -> str | None:
    """What is wrong with a file; reads all of it. crc None: only its size is looked at."""
    file = folder / name
    if os.path.basename(name) != name:
        return f"{folder / MANIFEST} names a file {name!r} that is not in its folder"
    try:
        size_here, crc_here = (file.stat().st_size, None) if crc is None else checksum(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}"
    except ValueError as error:  # a name that no file can have
        return f"{folder / MANIFEST} names a file {name!r:.60} that cannot be: {error}"
    if size_here != size:
        return f"{file} has {size_here:,} bytes instead of {size:,}"
    if crc_here != crc:
        return f"{file} is damaged: its checksum is {crc_here:08x} instead of {crc:08x}"
    return None


# -- a new one ---------------------------------------------------------------------------------------------------------


def partial_of(path: Path) -> Path:
    """Where a folder is until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Where to write the files of a new folder, and its manifest: it gets its name at the end; an error leaves nothing of it.

    What an earlier process left there when it was killed goes first. One that is still at it has a lock.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} exists already; choose another name, nothing is overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _lock(handle, partial, path)
        try:
            for left in partial.iterdir():
                left.unlink()
            yield partial
            os.rename(partial, path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _lock(handle: int, partial: Path, path: Path) -> None:
    import fcntl  # not on Windows, where checkpoints are read all the same

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process; wait for it, or choose another name") from None
    # Whoever had the lock before may have given the folder its name in between: it is not ours to write into.
    if not partial.exists() or not os.path.samestat(os.fstat(handle), partial.stat()):
        raise ValueError(f"{path} has just been written by another process; choose another name")


# -- files that survive ------------------------------------------------------------------------------------------------


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Names of files are in their folder; it has to reach the disk as well. (Windows has no such thing.)"""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

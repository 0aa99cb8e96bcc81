"""The manifest of a checkpoint: what it holds, and a checksum of every file, so that nothing damaged is ever loaded.

    manifest.json   written last, with the size and CRC-32 of every other file
    manifest.sum    the CRC-32 of the manifest itself

A folder of checkpoints has one folder for each, `step-000000120`; one that is still being written has another name.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from nestpipe import sealed
from nestpipe.checkpoint.settings import Settings
from nestpipe.sealed import MANIFEST, SUM, Damaged, whole
from nestpipe.tensorfile import TensorReader

__all__ = ["MANIFEST", "SUM", "Damaged"]  # of every sealed folder, and so of this one

FORMAT = 3
SHARED_OUT = 4  # the same, but that a worker's rows may be in files of others: an earlier version would not miss them
BEFORE = 2  # the same, but that an incremental one named its base without saying which bytes that was
DENSE, OPTIMIZER, OPTIMIZER_SETTINGS = "dense.safetensors", "dense-optimizer.safetensors", "dense-optimizer.json"
KIND = sealed.Kind(
    "checkpoint",
    (BEFORE, FORMAT, SHARED_OUT),
    cut_off="the save that wrote it was cut off",
    remedy="take an earlier checkpoint",
)
_NAME = re.compile(r"step-(\d{9,})")


@dataclasses.dataclass(frozen=True)
class Base:
    """A full checkpoint, a folder beside the one that builds on it. crc: of its manifest, so that another one under the same name
    is not taken for it. step: rows that no batch from this step on has used are as they are there."""

    name: str
    crc: int

    @property
    def step(self) -> int:
        return step_of(self.name)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """path: the checkpoint's folder. crc: of the manifest itself, where it was read.
    base: where rows lie that have not changed since; None: this one is full.
    tables: what was declared of each. files: {name: (bytes, CRC-32)}.
    """

    path: Path
    step: int
    world: int
    tables: Sequence[Mapping[str, Any]]
    settings: Settings
    files: Mapping[str, tuple[int, int]]
    base: Base | None = None
    crc: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def folder_of(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def table_file(name: str, rank: int, world: int) -> str:
    return f"table-{quote(name, safe='')}.{rank}-of-{world}.safetensors"


def state_file(rank: int, world: int) -> str:
    return f"state.{rank}-of-{world}.json"


def write(manifest: Manifest) -> int:
    """Makes a folder, all of whose other files are there, a checkpoint; it survives a loss of power from here on. Returns the
    CRC-32 of the manifest."""
    base = manifest.base
    values = {
        "format": SHARED_OUT if manifest.settings.shared_out else FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "base": None if base is None else {"name": base.name, "crc32": f"{base.crc:08x}"},
        "tables": list(manifest.tables),
        "settings": manifest.settings.to_json(),
    }
    return sealed.write(manifest.path, values, manifest.files)


def read(path: Path) -> Manifest:
    """Checks the manifest itself, not the files that it names."""
    values, crc = sealed.read(path, KIND)
    try:
        manifest = Manifest(
            path=path,
            step=whole(values["step"], 0),
            world=whole(values["world"], 1),
            base=_base(values["base"], path, values["format"]),
            crc=crc,
            tables=[_table(table) for table in values["tables"]],
            settings=Settings.from_json(values["settings"]),
            files=sealed.files_of(values),
        )
        if manifest.world > len(manifest.files):  # each has at least one; said before a large number is counted up to
            raise ValueError(f"it names {len(manifest.files)} files of {manifest.world} workers")
        ranks = range(manifest.world)
        for table, owners in manifest.settings.owners.items():  # None: not decided yet
            if owners is not None and not (
                owners and all(type(worker) is int and worker in ranks for worker in owners)
            ):
                raise ValueError(f"the owners of table {table!r:.40} are {owners!r:.80}")
        tables = [table_file(table["name"], rank, manifest.world) for table in manifest.tables for rank in ranks]
        needed = {DENSE, *tables, *(state_file(rank, manifest.world) for rank in ranks)}
        for name in sorted(needed ^ set(manifest.files)):
            if name not in (OPTIMIZER, OPTIMIZER_SETTINGS):  # a model without parameters has none
                raise ValueError(f"the file {name} {'is not named' if name in needed else 'belongs to nothing'}")
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise Damaged(f"{path / MANIFEST} is not what nestpipe writes ({error!r:.200}); {KIND.remedy}") from None
    return manifest


def _base(value: Any, path: Path, kind: int) -> Base | None:
    if value is None:
        return None
    name = value if kind == BEFORE else value["name"]
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise Damaged(f"{path / MANIFEST} names {name!r:.60} as its base, which is no name of a checkpoint")
    if kind == BEFORE:
        raise Damaged(
            f"{path} is an incremental checkpoint of an earlier version of nestpipe, which does not say what bytes its base has: "
            f"take the full one, {name}, or go on with the version that wrote it and let it save a full one"
        )
    return Base(name, int(value["crc32"], 16))


def _table(value: Any) -> dict[str, Any]:
    kinds = {"name": str, "dim": int, "dtype": str, "optimizer": str, "updates": int}
    for entry, kind in kinds.items():
        if type(value[entry]) is not kind:
            raise ValueError(f"{entry} of a table is {value[entry]!r:.40}")
    return value


def chain(path: Path) -> list[Manifest]:
    """The manifest, and that of the full checkpoint that it builds on, if it does not hold everything itself."""
    manifest = read(path)
    if manifest.base is None:
        return [manifest]
    name = manifest.base.name
    try:
        base = read(path.parent / name)
    except Damaged as error:
        raise Damaged(f"{path} holds only what changed since {name}, and that is not sound: {error}") from None
    if base.base is not None:
        raise Damaged(f"{path} builds on {name}, which is not a full checkpoint itself")
    if base.crc != manifest.base.crc:
        raise Damaged(
            f"{path} holds only what changed since {name}, and the {name} beside it is another one, saved by another run or "
            f"later: put the right one back, or take a full checkpoint"
        )
    return [manifest, base]


def problems(path: Path) -> Iterator[str]:
    """Every file that is missing, of another size or damaged, and every key without a row, one line each; reads all bytes."""
    try:
        manifests = chain(path)
    except Damaged as error:
        yield str(error)
        return
    sound = True
    for manifest, name in to_check(manifests):
        problem = problem_of(manifest, name)
        if problem is not None:
            sound = False
            yield problem
    if sound:
        yield from (problem for part in parts(manifests) if (problem := lost_row(manifests, *part)) is not None)


def to_check(chain: Sequence[Manifest]) -> list[tuple[Manifest, str]]:
    """All files of a checkpoint, for `problem_of`."""
    return [(manifest, name) for manifest in chain for name in sorted(manifest.files)]


def parts(chain: Sequence[Manifest]) -> list[tuple[str, int]]:
    """(table, worker) of an incremental checkpoint, for `lost_row`; none of a full one."""
    newest = chain[0]
    return [(table["name"], worker) for table in newest.tables for worker in range(newest.world) if len(chain) > 1]


def lost_row(chain: Sequence[Manifest], table: str, worker: int) -> str | None:
    """Whether a worker's key has its row neither among those that changed nor in the full checkpoint, which the same workers have
    written. Only for files that `problem_of` has found to be sound."""
    newest, base = chain
    name = table_file(table, worker, newest.world)
    try:
        with TensorReader(newest.path / name) as file, TensorReader(base.path / name) as older:
            keys, changed = (file.read(what, 0, file.shape(what)[0]) for what in ("keys", "changed"))
            unchanged = np.setdiff1d(keys, changed)
            lost = np.setdiff1d(unchanged, older.read("keys", 0, older.shape("keys")[0]))
    except (OSError, ValueError, KeyError) as error:
        return f"{newest.path / name} cannot be put together with {base.path / name}: {error}"
    if not len(lost):
        return None
    return f"{newest.path / name} has no row for {len(lost):,} of its keys (the first is {lost[0]}), and neither has {base.path}"


def problem_of(manifest: Manifest, name: str) -> str | None:
    """What is wrong with a file; reads all of it."""
    return sealed.problem_of(manifest.path, name, *manifest.files[name])


def require_sound(path: Path) -> list[Manifest]:
    """`chain`, with every byte checked; raises Damaged with the first problem."""
    manifests = chain(path)
    for problem in problems(path):
        raise Damaged(f"{problem}. Nothing was loaded; take an earlier checkpoint")
    return manifests


# -- a folder of checkpoints -------------------------------------------------------------------------------------------


def complete(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the newest first; none that is still being written, and none looked into."""
    if not folder.is_dir():
        return []
    by_step = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(by_step, reverse=True)]


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep`, and those that these build on. A half-removed one has no manifest any more."""
    paths = complete(folder)
    kept = set(paths[:keep])
    for path in paths[:keep]:
        try:
            base = read(path).base
        except Damaged:
            continue
        if base is not None:
            kept.add(folder / base.name)
    for path in paths:
        if path not in kept:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)

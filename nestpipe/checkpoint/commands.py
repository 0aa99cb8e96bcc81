"""`nestpipe checkpoint inspect | verify`: what is in it, is it sound."""

from __future__ import annotations

import json
from pathlib import Path

from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import Manifest, table_file
from nestpipe.tensorfile import TensorReader


def inspect(path: Path) -> str:
    """The manifest in words; nothing but headers is read."""
    if not (path / manifests.MANIFEST).exists() and manifests.complete(path):
        return "\n".join(_line(checkpoint) for checkpoint in manifests.complete(path))
    newest = manifests.chain(path)[0]
    kind = "all rows" if newest.base is None else f"rows changed since {newest.base.name}, which it needs"
    lines = [
        f"{path}: step {newest.step}, saved by {newest.world} worker(s), {newest.num_bytes / 1e6:,.1f} MB, {kind}",
    ]
    for table in newest.tables:
        keys, records = _counts(newest, table["name"])
        held = f"{keys:,} keys" + ("" if records == keys else f", {records:,} records in it")
        lines.append(
            f"table {table['name']}: {held}, dim {table['dim']}, {table['dtype'].removeprefix('torch.')}, "
            f"{table['optimizer']}, {table['updates']:,} updates"
        )
    for section, entries in (newest.settings.config or {}).items():
        lines.append(
            f"config [{section}]: " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in entries.items())
        )
    lines.append(
        f"files: {len(newest.files)}, each with a checksum; `nestpipe checkpoint verify {path}` reads them all"
    )
    return "\n".join(lines)


def _line(path: Path) -> str:
    try:
        manifest = manifests.read(path)
    except manifests.Damaged as error:
        return f"{path.name}: {error}"
    kind = "full" if manifest.base is None else f"changes since {manifest.base.name}"
    return f"{path.name}: {manifest.num_bytes / 1e6:,.1f} MB, {kind}"


def _counts(manifest: Manifest, name: str) -> tuple[int, int]:
    keys = records = 0
    for worker in range(manifest.world):
        with TensorReader(manifest.path / table_file(name, worker, manifest.world)) as file:
            keys += file.shape("keys")[0]
            records += file.shape("records")[0]
    return keys, records


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, or with those in a folder; nothing: all is sound."""
    paths = [path] if (path / manifests.MANIFEST).exists() or not manifests.complete(path) else manifests.complete(path)
    return [problem for checkpoint in paths for problem in manifests.problems(checkpoint)]

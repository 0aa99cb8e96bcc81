"""What a bundle holds: a folder of its own, one file per table, no code in any of them.

    manifest.json, manifest.sum    what is in it and a checksum of every file; written last
    dense.safetensors              the model's weights
    table-NAME.safetensors         a table's rows, and an index from key to row that is used where it lies, in the file

A bundle is full, or holds what changed since another one, its base: a delta. The tensors of a table's file:

    slots      [S, 2]     index of keys: (key, position), open addressing; position EMPTY: no key, GONE: the base's row is gone
    rows       [N, dim]   values at each position: own rows of keys first, then those that rare keys share
    keys       [M]        the keys of the first M positions
    shared     [R]        shards that have a row which rare keys share, sorted
    shared_at  [R]        the position of each, or GONE
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from nestpipe import sealed
from nestpipe.sealed import Damaged, whole
from nestpipe.tables import Feature, Table, check_declarations, init_entry, init_of

FORMAT = 1
DENSE = "dense.safetensors"
KIND = sealed.Kind("bundle", (FORMAT,), cut_off="the export that wrote it was cut off", remedy="export it again")
CHUNK_BITS = 40  # a position is a row of one file: below 2^40
GONE = (1 << CHUNK_BITS) - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """table: as far as it was declared for reading. seed: of the run. dtype: of the rows in the file.
    keys: that have a row of their own, those of the bases included."""

    table: Table
    seed: int
    dtype: torch.dtype
    keys: int

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def file(self) -> str:
        return f"table-{quote(self.name, safe='')}.safetensors"

    def to_json(self) -> dict[str, Any]:
        table = self.table
        return {
            "name": table.name,
            "dim": table.dim,
            "dtype": _name_of(table.dtype),
            "init": init_entry(table.init),
            "admit_after": table.admit_after,
            "seed": self.seed,
            "stored": _name_of(self.dtype),
            "keys": self.keys,
        }

    @classmethod
    def from_json(cls, values: Any) -> StoredTable:
        table = Table(
            values["name"],
            values["dim"],
            dtype=DTYPES[values["dtype"]],
            init=init_of(values["init"]),
            admit_after=values["admit_after"],
        )
        if type(table.name) is not str or type(values["seed"]) is not int:
            raise ValueError(f"a table is {values!r:.80}")
        return cls(table, values["seed"], DTYPES[values["stored"]], whole(values["keys"], 0))


@dataclasses.dataclass(frozen=True)
class Base:
    """The bundle that a delta builds on: its name, looked for beside the delta; the CRC-32 of its manifest; its version."""

    name: str
    crc: int
    version: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """path: the bundle's folder. crc: of the manifest itself, where it was read.
    step, run: of the training, and its config, where it has one. recipe: the model's kind and arguments, if they are known.
    """

    path: Path
    step: int
    run: str | None
    config: Mapping[str, Any] | None
    recipe: Mapping[str, Any] | None
    tables: Sequence[StoredTable]
    features: Sequence[Feature]
    files: sealed.Files
    base: Base | None = None
    crc: int = 0

    @property
    def version(self) -> str:
        """Of weights and rows together: the step, and a hash of what is in all files, those of the bases included."""
        content = [self.run, self.base and self.base.version, sorted((n, *sums) for n, sums in self.files.items())]
        return f"{self.step}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}"

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def table(self, name: str) -> StoredTable:
        return next(stored for stored in self.tables if stored.name == name)


def write(manifest: Manifest) -> None:
    """Makes a folder, all of whose other files are there, a bundle."""
    base = manifest.base
    values = {
        "kind": KIND.name,
        "format": FORMAT,
        "version": manifest.version,
        "step": manifest.step,
        "run": manifest.run,
        "base": None if base is None else {"name": base.name, "crc32": f"{base.crc:08x}", "version": base.version},
        "recipe": manifest.recipe,
        "config": manifest.config,
        "tables": [stored.to_json() for stored in manifest.tables],
        "features": [dataclasses.asdict(feature) for feature in manifest.features],
    }
    sealed.write(manifest.path, values, manifest.files)


def read(path: Path) -> Manifest:
    """Checks the manifest itself, and the sizes of the files that it names."""
    values, crc = sealed.read(path, KIND)
    try:
        base = values["base"]
        manifest = Manifest(
            path=path,
            step=whole(values["step"], 0),
            run=values["run"],
            config=values["config"],
            recipe=values["recipe"],
            tables=[StoredTable.from_json(table) for table in values["tables"]],
            features=[Feature(**feature) for feature in values["features"]],
            files=sealed.files_of(values),
            base=None if base is None else Base(base["name"], int(base["crc32"], 16), base["version"]),
            crc=crc,
        )
        check_declarations([stored.table for stored in manifest.tables], manifest.features)
        if manifest.base is not None and (
            manifest.base.name in ("", "..") or Path(manifest.base.name).name != manifest.base.name
        ):
            raise ValueError(f"its base is {manifest.base.name!r:.60}, which is no name of a folder")
        if set(manifest.files) != {DENSE, *(stored.file for stored in manifest.tables)}:
            raise ValueError(f"it names the files {sorted(manifest.files)!r:.200}")
        if values["version"] != manifest.version:
            raise ValueError(f"its version is {values['version']!r:.60} instead of {manifest.version}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / sealed.MANIFEST} is not what nestpipe writes ({error!r:.200}); {KIND.remedy}") from None
    for name, (size, _) in manifest.files.items():
        _refuse(sealed.problem_of(path, name, size, None))
    return manifest


def chain(path: Path) -> list[Manifest]:
    """The manifest, that of its base, if it is a delta, and so on: the last one is full. Bases lie beside the delta."""
    manifests = [read(path)]
    while (base := manifests[-1].base) is not None:
        delta, beside = manifests[-1].path, manifests[-1].path.absolute().parent / base.name
        try:
            found = read(beside)
        except Damaged as error:
            raise Damaged(
                f"{delta} holds only what changed since the bundle {base.name}, and beside it: {error}"
            ) from None
        if found.crc != base.crc:
            raise Damaged(
                f"{delta} holds only what changed since {base.name} of version {base.version}, and the {base.name} beside it has "
                f"version {found.version}: put the right one there, or export a full bundle (without --since)"
            )
        if any(found.path.samefile(known.path) for known in manifests):
            raise Damaged(f"{path} is based on itself, by way of {base.name}; {KIND.remedy}")
        manifests.append(found)
    return manifests


def problems(path: Path) -> list[str]:
    """Every file of a bundle and its bases that is missing, of another size or damaged, one line each; reads all bytes."""
    try:
        manifests = chain(path)
    except Damaged as error:
        return [str(error)]
    found = (
        sealed.problem_of(manifest.path, name, *sums) for manifest in manifests for name, sums in manifest.files.items()
    )
    return [problem for problem in found if problem is not None]


def in_words(path: Path) -> str:
    """What is in a bundle; its files are not read."""
    newest, *bases = chain(path)
    what = "all rows" if newest.base is None else f"changes since {newest.base.name}, on {len(bases)} bundle(s) in all"
    lines = [f"{path}: version {newest.version}, step {newest.step}, {newest.num_bytes / 1e6:,.1f} MB, {what}"]
    for stored in newest.tables:
        features = [
            f"{feature.name} ({feature.pooling or 'sequence'})"
            for feature in newest.features
            if feature.table == stored.name
        ]
        lines.append(
            f"table {stored.name}: {stored.keys:,} keys, dim {stored.table.dim}, {_name_of(stored.dtype)}; "
            f"features {', '.join(features)}"
        )
    recipe = newest.recipe
    lines.append("model: give it to load_bundle" if recipe is None else f"model: {recipe['kind']}")
    return "\n".join(lines)


def check(manifest: Manifest, names: Sequence[str]) -> None:
    """Raises Damaged for the first of these files whose bytes are not as they were written."""
    for name in names:
        _refuse(sealed.problem_of(manifest.path, name, *manifest.files[name]))


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise Damaged(f"{problem}. Nothing was loaded; {KIND.remedy}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""No damaged bundle is ever loaded, and what is wrong with it is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe import load_bundle
from nestpipe.sealed import MANIFEST, SUM, Damaged
from nestpipe.serve import manifest
from nestpipe.serve.manifest import DENSE, problems
from nestpipe.serve.rows import Layer
from nestpipe.tensorfile import TensorReader
from tests.serve.trained import KEYS, NAMES, Exported, Ranker
from tests.test_cli import run

TABLE = "table-half%2Fodd%20name.safetensors"


@pytest.fixture
def copy(exported: Exported, tmp_path: Path) -> list[Path]:
    """The bundle and its deltas."""
    return [Path(shutil.copytree(path, tmp_path / path.name)) for path in exported.bundles]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest whose checksum is right."""
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    text = json.dumps(values).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / SUM).write_bytes(f"{zlib.crc32(text):08x}\n".encode())


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", [MANIFEST, SUM, DENSE, TABLE])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_file_cut_short_or_missing_is_refused_when_it_is_loaded(
    copy: list[Path], name: str, harm: Callable[[Path], None], number: int
) -> None:
    harm(copy[number] / name)
    with pytest.raises(Damaged) as caught:
        load_bundle(copy[2], model=Ranker())
    assert copy[number].name in str(caught.value)
    assert problems(copy[2])


@pytest.mark.parametrize("name", [MANIFEST, SUM, DENSE])
def test_a_changed_byte_of_manifest_or_weights_is_refused_when_it_is_loaded(copy: list[Path], name: str) -> None:
    flip(copy[0] / name)
    with pytest.raises(Damaged, match="export it again"):
        load_bundle(copy[0], model=Ranker())


def test_a_changed_byte_of_a_table_is_refused_with_verify_and_told_by_the_command(
    copy: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy[1] / TABLE, -20)
    with pytest.raises(Damaged, match=r"odd%20name.safetensors is damaged: its checksum is"):
        load_bundle(copy[2], model=Ranker(), verify=True)
    with pytest.raises(Damaged, match="is damaged"):
        load_bundle(copy[0], model=Ranker(), verify=True).updated(copy[1], verify=True)
    assert run("bundle", "verify", copy[0]) == 0
    assert capsys.readouterr().out == f"{copy[0]}: sound\n"
    assert run("bundle", "verify", copy[2]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert str(copy[1] / TABLE) in line


def test_a_damaged_index_reads_no_other_memory(copy: list[Path]) -> None:
    with TensorReader(copy[0] / TABLE) as file:
        slots, data = file.read("slots", 0, 1 << 20), file._data
    for bad in (10**9, -2, 2**62):
        changed = np.where(slots[:, 1:] >= 0, [0, bad], [0, 0]) + slots
        content = bytearray((copy[0] / TABLE).read_bytes())
        content[data : data + slots.nbytes] = changed.tobytes()
        (copy[0] / TABLE).write_bytes(content)
        bundle = load_bundle(copy[0], model=Ranker())
        with pytest.raises(Damaged, match="is damaged: its index gives position"):
            bundle.rows("half/odd name", KEYS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda values: values.update(format=2),
            "has format 2, this version of nestpipe reads 1: use the version that",
        ),
        (lambda values: values.update(kind="checkpoint"), "is a checkpoint; give the folder of a bundle"),
        (lambda values: values.update(step=-1), "is not what nestpipe writes"),
        (lambda values: values.update(version="6-000000000000"), "its version is"),
        (lambda values: values["files"].pop(TABLE), "is not what nestpipe writes"),
        (lambda values: values["files"].update({"../x": values["files"][TABLE]}), "is not what nestpipe writes"),
        (lambda values: values["tables"][0].update(dim=0), "dim must be a whole number"),
        (lambda values: values["tables"][0].update(stored="float16"), "is not what nestpipe writes"),
        (lambda values: values.update(features=[{"name": "x", "table": "y"}]), "is not what nestpipe writes"),
        *(
            (
                lambda values, name=name: values.update(base={"name": name, "crc32": "0", "version": ""}),
                "no name of a folder",
            )
            for name in ("../x", "..", ".", "")
        ),
    ],
)
def test_a_manifest_that_nestpipe_did_not_write_is_refused(
    copy: list[Path], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(copy[0], change)
    with pytest.raises(Damaged, match=message):
        load_bundle(copy[0], model=Ranker())


def test_a_delta_that_is_its_own_base_is_refused(copy: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # No manifest holds its own checksum but a forged one: here the comparison of checksums is what is forged.
    read = manifest.read

    def forged(path: Path) -> manifest.Manifest:
        found = read(path)
        base = manifest.Base(copy[1].name, found.crc, "") if found.base else None
        return dataclasses.replace(found, base=base)

    monkeypatch.setattr(manifest, "read", forged)
    with pytest.raises(Damaged, match="is based on itself"):
        manifest.chain(copy[1])


def test_tensors_of_other_shapes_than_the_manifest_says_are_refused(copy: list[Path]) -> None:
    def wider(values: dict[str, Any]) -> None:
        values["tables"][0]["dim"] += 1

    rewrite(copy[0], wider)
    with pytest.raises(
        Damaged, match=r"table-plain.safetensors is not what nestpipe writes \(its tensors are of other"
    ):
        load_bundle(copy[0], model=Ranker())


def test_what_is_no_bundle_is_told_apart(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="does not exist; give the folder of a bundle"):
        load_bundle(tmp_path / "nowhere")
    with pytest.raises(
        Damaged, match=r"is not a bundle: it has no manifest.json; the export that wrote it was cut off"
    ):
        load_bundle(tmp_path)
    with pytest.raises(Damaged, match="is a checkpoint; give the folder of a bundle"):
        load_bundle(exported.checkpoints[0])


def test_a_delta_whose_base_is_missing_or_another_is_refused(copy: list[Path], tmp_path: Path) -> None:
    shutil.rmtree(copy[0])
    with pytest.raises(Damaged, match=r"bundle-1 holds only what changed since the bundle bundle-0.*does not exist"):
        load_bundle(copy[2], model=Ranker())
    shutil.copytree(copy[1], copy[0])
    with pytest.raises(Damaged, match=r"the bundle-0 beside it has version 8-\w+: put the right one there"):
        load_bundle(copy[2], model=Ranker())


def test_inspect_says_what_is_in_it(exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bundle", "inspect", exported.bundles[2]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "step 11" in said[0] and said[0].endswith("changes since bundle-1, on 2 bundle(s) in all")
    keys = exported.said[2]["num_keys"]
    assert f"table plain: {keys['plain']} keys, dim 4, float32; features sum (sum), mean (mean)" in said
    assert f"table disk: {keys['disk']} keys, dim 6, float32; features sequence (sequence)" in said
    assert said[-1] == "model: give it to load_bundle" and len(said) == 2 + len(NAMES)


def test_tables_of_a_bundle_are_read_where_they_lie(exported: Exported) -> None:
    """Not copied into memory of the process: several share the pages of the file."""
    rows = load_bundle(exported.bundles[0], model=Ranker())._of("plain")
    (layer,) = rows.layers
    assert isinstance(layer, Layer)
    start = layer.rows.ctypes.data
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "table-plain" in line]
    inside = [
        parts[1] for parts in ranges if int(parts[0].split("-")[0], 16) <= start < int(parts[0].split("-")[1], 16)
    ]
    assert inside == ["r--s"]
    assert start % 4 == 0 and layer.slots.ctypes.data % 64 == 0

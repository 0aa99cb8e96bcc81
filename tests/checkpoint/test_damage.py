"""Nothing damaged is ever loaded: whatever happens to a file of a checkpoint is found, named and leaves the trainer as it was."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

import nestpipe.checkpoint
from nestpipe import Trainer
from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import Damaged
from nestpipe.export import export_rows
from nestpipe.sealed import checksum
from tests.checkpoint.test_saving import contents, make_trainer, train
from tests.cluster import Cluster

FULL, CHANGES = manifests.folder_of(3), manifests.folder_of(4)
NUM_DAMAGES, NUM_LOADED = 200, 30


def save_both(folder: Path) -> str:
    """A full checkpoint and one with what changed since; the digest of a trainer that loads the second."""
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(folder, full_every=2)
    train(trainer, 0, 3)
    trainer.checkpoint(checkpoints)
    train(trainer, 3, 4)
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    other = make_trainer()
    other.load(folder / CHANGES)
    return other.digest()


class Saved(NamedTuple):
    folder: Path
    digest: str


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("damage")
    digests = cluster.run(2, save_both, folder)
    assert {path.name for path in folder.iterdir()} == {FULL, CHANGES}
    assert manifests.read(folder / CHANGES).base.name == FULL
    return Saved(folder, digests[0])


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    """One's own to damage for good."""
    return Path(shutil.copytree(saved.folder, tmp_path / "copy"))


class Damage(NamedTuple):
    file: Path
    kind: str
    content: bytes | None  # what stands there afterwards; None: nothing


@contextlib.contextmanager
def done(damage: Damage) -> Iterator[None]:
    before = damage.file.read_bytes()
    try:
        if damage.content is None:
            damage.file.unlink()
        else:
            damage.file.write_bytes(damage.content)
        yield
    finally:
        damage.file.write_bytes(before)


def draw_damages(folder: Path) -> list[Damage]:
    """Every file at least once."""
    rng = random.Random(5)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) < NUM_DAMAGES
    chosen = files + rng.choices(files, k=NUM_DAMAGES - len(files))
    rng.shuffle(chosen)
    return [damage_of(rng, file, rng.choice(["byte", "byte", "cut", "gone", "swapped"])) for file in chosen]


def damage_of(rng: random.Random, file: Path, kind: str) -> Damage:
    before = file.read_bytes()
    others = [other for other in sorted(file.parent.iterdir()) if other.read_bytes() != before]
    match kind:
        case "byte":
            at = rng.randrange(len(before))
            after = before[:at] + bytes([before[at] ^ rng.randrange(1, 256)]) + before[at + 1 :]
        case "cut":
            after = before[: rng.randrange(len(before))]
        case "gone":
            return Damage(file, kind, None)
        case _:
            after = rng.choice(others).read_bytes()
    assert after != before
    return Damage(file, kind, after)


@pytest.fixture(scope="module")
def damages(saved: Saved) -> list[Damage]:
    return draw_damages(saved.folder)


def test_the_sample_has_every_file_and_every_kind(saved: Saved, damages: list[Damage]) -> None:
    assert {damage.file for damage in damages} == {path for path in saved.folder.rglob("*") if path.is_file()}
    assert {damage.kind for damage in damages} == {"byte", "cut", "gone", "swapped"}
    names = {damage.file.name for damage in damages}
    assert {"manifest.json", "manifest.sum", "state.1-of-2.json", "dense-optimizer.json"} <= names


def test_every_damage_is_found_and_named(saved: Saved, damages: list[Damage]) -> None:
    for damage in damages:
        with done(damage):
            for path in {damage.file.parent, saved.folder / CHANGES}:  # which needs the files of both
                problems = list(manifests.problems(path))
                assert problems, damage[:2]
                assert any(
                    damage.file.name in problem and damage.file.parent.name in problem for problem in problems
                ), damage[:2]
    assert not list(manifests.problems(saved.folder / CHANGES)) + list(manifests.problems(saved.folder / FULL))


def test_every_damage_is_refused_and_the_trainer_stays_as_it_was(saved: Saved, damages: list[Damage]) -> None:
    trainer = make_trainer()
    before = trainer.digest(), trainer.steps, trainer.position, contents(trainer)
    random_state = torch.get_rng_state()
    for damage in damages[:NUM_LOADED]:
        with done(damage), pytest.raises(Damaged, match=re.escape(damage.file.name)):
            trainer.load(saved.folder / CHANGES)
        assert (trainer.digest(), trainer.steps, trainer.position, contents(trainer)) == before, damage[:2]
        assert torch.equal(torch.get_rng_state(), random_state)
    trainer.load(saved.folder / CHANGES)
    assert (trainer.digest(), trainer.steps) == (saved.digest, 4)


def try_to_load(path: Path, again: Path) -> tuple[str, str, str]:
    trainer = make_trainer()
    before = trainer.digest()
    try:
        trainer.load(path)
        outcome = "loaded", ""
    except ValueError as error:
        outcome = type(error).__name__, str(error)
    assert (trainer.digest(), trainer.steps) == (before, 0)
    trainer.load(again)
    return *outcome, trainer.digest()


@pytest.mark.parametrize("name", ["table-plain.0-of-2.safetensors", "table-plain.1-of-2.safetensors", "manifest.sum"])
@pytest.mark.parametrize("step", [FULL, CHANGES])
def test_all_workers_refuse_alike_whoever_reads_the_damaged_file(
    cluster: Cluster, saved: Saved, copy: Path, step: str, name: str
) -> None:
    file = copy / step / name
    file.write_bytes(file.read_bytes()[:-1])
    results = cluster.run(2, try_to_load, copy / CHANGES, saved.folder / CHANGES)
    assert [kind for kind, _, _ in results] == ["Damaged", "Damaged"], results
    assert all(name in message and digest == saved.digest for _, message, digest in results)


# -- a manifest that fits its checksum and says anything ---------------------------------------------------------------


def rewrite(path: Path, text: bytes) -> None:
    (path / manifests.MANIFEST).write_bytes(text)
    (path / manifests.SUM).write_bytes(f"{zlib.crc32(text):08x}\n".encode())


@pytest.fixture(scope="module")
def scratch(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that the examples of hypothesis overwrite, each after the other."""
    return Path(shutil.copytree(saved.folder, tmp_path_factory.mktemp("scratch") / "copy"))


@pytest.fixture(scope="module")
def idle() -> Trainer:
    return make_trainer()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(text=st.binary() | ANYTHING.map(lambda value: json.dumps(value).encode()))
@example(text=b"[" * 100_000)
@example(text=b"9" * 10_000)
@example(text=b'{"format": 2}')
@example(text=b'{"format": 2, "step": Infinity, "world": 2, "base": null, "tables": [], "settings": {}, "files": {}}')
def test_any_bytes_as_manifest_are_refused(scratch: Path, idle: Trainer, text: bytes) -> None:
    rewrite(scratch / FULL, text)
    assert list(manifests.problems(scratch / FULL))
    with pytest.raises(Damaged):
        idle.load(scratch / FULL)
    assert idle.steps == 0


@pytest.mark.parametrize("entry", ["step", "world", "base", "tables", "settings", "files"])
def test_a_manifest_with_any_value_in_an_entry_is_refused(saved: Saved, scratch: Path, entry: str) -> None:
    values = json.loads((saved.folder / FULL / manifests.MANIFEST).read_text())
    fine = {"step": int, "base": type(None)}.get(entry, type)  # what may be another without being wrong

    @settings(max_examples=40)
    @given(value=ANYTHING)
    @example(value=float("inf"))
    @example(value=[])
    @example(value={})
    @example(value=0)
    @example(value=10**12)
    def check(value: Any) -> None:
        if type(value) is fine and (entry != "step" or value >= 0):
            return
        rewrite(scratch / FULL, json.dumps({**values, entry: value}).encode())
        for problem in manifests.problems(scratch / FULL):
            assert isinstance(problem, str)
        with pytest.raises(Damaged):
            make_trainer().load(scratch / FULL)

    check()


@pytest.mark.parametrize("owners", [[], [2], [-1], [0, "1"], [[0]], [True], "01", 7, {}])
def test_owners_that_are_no_workers_are_refused(saved: Saved, scratch: Path, owners: Any) -> None:
    values = json.loads((saved.folder / FULL / manifests.MANIFEST).read_text())
    table = next(iter(values["settings"]["owners"]))
    values["settings"]["owners"][table] = owners
    rewrite(scratch / FULL, json.dumps(values).encode())
    with pytest.raises(Damaged, match=r"the owners of table|is not iterable"):
        make_trainer().load(scratch / FULL)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", f"../{FULL}/dense.safetensors", "..", "", "a\0b", "\ud800"])
def test_a_file_outside_its_folder_is_refused(copy: Path, name: str) -> None:
    (copy / "x").write_bytes(b"x")
    path = copy / FULL
    values = json.loads((path / manifests.MANIFEST).read_text())
    values["files"][name] = {"bytes": 1, "crc32": f"{zlib.crc32(b'x'):08x}"}
    rewrite(path, json.dumps(values).encode())
    assert any(manifests.MANIFEST in problem or path.name in problem for problem in manifests.problems(path))
    with pytest.raises(Damaged):
        make_trainer().load(path)


@pytest.mark.parametrize("base", ["../x", f"../copy/{FULL}", f"{FULL}/", ".", "", 3, [FULL], CHANGES, "step-000000001"])
def test_a_base_that_is_no_full_checkpoint_beside_it_is_refused(copy: Path, base: Any) -> None:
    path = copy / CHANGES
    values = json.loads((path / manifests.MANIFEST).read_text())
    rewrite(path, json.dumps({**values, "base": {**values["base"], "name": base}}).encode())
    assert list(manifests.problems(path))
    with pytest.raises(Damaged):
        make_trainer().load(path)


@pytest.mark.parametrize("name", ["state.1-of-2.json", "table-rare.0-of-2.safetensors", "dense.safetensors"])
def test_a_manifest_that_leaves_a_file_out_is_refused(copy: Path, name: str) -> None:
    """What it does not name nobody would check."""
    path = copy / FULL
    values = json.loads((path / manifests.MANIFEST).read_text())
    del values["files"][name]
    rewrite(path, json.dumps(values).encode())
    assert any(name in problem for problem in manifests.problems(path))
    with pytest.raises(Damaged, match=re.escape(name)):
        make_trainer().load(path)


# -- no code in it -----------------------------------------------------------------------------------------------------


def test_no_file_of_a_checkpoint_is_a_pickle(saved: Saved) -> None:
    files = [path for path in saved.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".sum", ".safetensors"}
    for path in files:
        head = path.read_bytes()[:2]
        assert not any(head == pickle.dumps(0, protocol)[:2] for protocol in range(2, 6)), path
        assert head != b"PK", f"{path} is an archive, as torch.save writes"


def test_nothing_that_could_run_code_is_used_to_read_one() -> None:
    sources = list(Path(nestpipe.checkpoint.__file__).parent.glob("*.py"))
    assert len(sources) > 3
    forbidden = re.compile(
        r"\b(pickle|torch\.load|torch\.save|marshal|shelve|joblib|eval|exec|allow_pickle|np\.load)\b"
    )
    for source in sources:
        assert forbidden.search(source.read_text()) is None, source


# -- incremental ones --------------------------------------------------------------------------------------------------


def save_another(folder: Path) -> None:
    """Another run's checkpoint of the same step, under the same name."""
    trainer = make_trainer()
    train(trainer, 5, 8)
    trainer.save(folder / FULL)


def test_a_base_of_another_run_under_the_right_name_is_refused(cluster: Cluster, copy: Path, tmp_path: Path) -> None:
    cluster.run(2, save_another, tmp_path / "another")
    assert not list(manifests.problems(tmp_path / "another" / FULL))
    shutil.rmtree(copy / FULL)
    shutil.copytree(tmp_path / "another" / FULL, copy / FULL)
    (problem,) = manifests.problems(copy / CHANGES)
    assert f"holds only what changed since {FULL}, and the {FULL} beside it is another one" in problem
    with pytest.raises(Damaged, match="beside it is another one"):
        make_trainer().load(copy / CHANGES)
    with pytest.raises(Damaged, match="beside it is another one"):
        export_rows(copy / CHANGES, tmp_path / "rows.parquet", table="plain")
    assert not (tmp_path / "rows.parquet").exists()


def test_a_key_whose_row_is_nowhere_is_found_though_every_checksum_is_right(copy: Path, tmp_path: Path) -> None:
    """As a bug in what counts as changed would leave it."""
    path, name = copy / CHANGES, "table-plain.1-of-2.safetensors"
    arrays = load_arrays(path / name)
    assert len(arrays["changed"]) < len(arrays["keys"])
    save_arrays({**arrays, "keys": np.append(arrays["keys"], [10**6, 10**6 + 1])}, path / name)
    values = json.loads((path / manifests.MANIFEST).read_text())
    size, crc = checksum(path / name)
    values["files"][name] = {"bytes": size, "crc32": f"{crc:08x}"}
    rewrite(path, json.dumps(values).encode())
    (problem,) = manifests.problems(path)
    assert f"{name} has no row for 2 of its keys (the first is 1000000), and neither has {copy / FULL}" in problem
    trainer = make_trainer()
    with pytest.raises(Damaged, match="has no row for 2 of its keys"):
        trainer.load(path)
    assert all(len(store) == 0 for store in trainer.stores), "nothing is loaded of it"
    with pytest.raises(Damaged, match="has no row for 2 of its keys"):
        export_rows(path, tmp_path / "rows.parquet", table="plain")


def test_full_checkpoints_of_the_format_before_are_read_and_incremental_ones_told_apart(
    saved: Saved, copy: Path
) -> None:
    for name in (FULL, CHANGES):
        values = json.loads((copy / name / manifests.MANIFEST).read_text())
        base = values["base"] and values["base"]["name"]
        rewrite(copy / name, json.dumps({**values, "format": 2, "base": base}).encode())
    trainer = make_trainer()
    trainer.load(copy / FULL)
    assert trainer.steps == 3
    with pytest.raises(Damaged, match=f"of an earlier version of nestpipe.*: take the full one, {FULL}"):
        make_trainer().load(copy / CHANGES)

"""Writing bundles: complete or nothing, from any checkpoint, of any number of workers, in little memory."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Table, Trainer, load_bundle, sealed
from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint import rows as saved_rows
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.export import bundle as exporting
from nestpipe.export import export_bundle
from nestpipe.sealed import Damaged, partial_of
from tests.checkpoint.test_full_disk import mounted
from tests.cluster import Cluster
from tests.serve.trained import KEYS, TABLES, Exported, Ranker, assert_says, make_batch, make_trainer
from tests.test_cli import run
from tests.waiting import until


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return self.out(rows["item"])[:, 0].square()


def small_trainer(**settings: Any) -> Trainer:
    torch.manual_seed(1)
    return Trainer(
        Model(), [Table("item", 4, **settings)], [Feature("item", "item", "sum")],
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip


def step(trainer: Trainer, keys: range) -> None:
    mine = list(keys)[trainer.rank :: trainer.world]
    trainer.step(Batch({"item": Jagged.from_lists([[key] for key in mine])}))


def save_with_workers(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = small_trainer(**settings)
    saving = trainer.checkpoints(folder, full_every=2)
    said = {}
    for number, keys in enumerate((range(60), range(40, 80))):
        step(trainer, keys)
        step(trainer, keys)
        trainer.checkpoint(saving)
        saving.wait()
        said[number] = trainer.rows("item", KEYS).clone()
    return {"rows": said, "keys": trainer.table_stats()["item"].rows}


@pytest.mark.parametrize(
    "settings", [{}, {"hot": 8}, {"replicas": "all"}, {"admit_after": 2}], ids=["sharded", "hot", "replicas", "rare"]
)
def test_checkpoints_of_several_workers_give_each_key_once(
    cluster: Cluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    said = cluster.run(2, save_with_workers, tmp_path / "saved", settings)[0]
    for number, since in ((0, None), (1, tmp_path / "bundle-0")):
        path = tmp_path / f"bundle-{number}"
        export_bundle(tmp_path / "saved" / folder_of(2 * number + 2), path, since=since)
        bundle = load_bundle(path, model=Model(), verify=True)
        assert torch.equal(bundle.rows("item", KEYS), said["rows"][number])
    assert bundle.num_keys("item") == said["keys"] == sum(len(keys) for keys, _ in bundle._of("item").blocks())


def test_the_bundle_is_the_same_whatever_the_blocks(
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_rows, "ROWS", 7)
    for number, since in ((0, None), (1, exported.bundles[0]), (2, exported.bundles[1])):
        made = export_bundle(exported.checkpoints[number], tmp_path / str(number), since=since)
        assert made.version == load_bundle(exported.bundles[number], model=Ranker()).version


def test_a_delta_holds_rows_that_changed_and_no_others(tmp_path: Path) -> None:
    trainer = small_trainer()
    step(trainer, range(3000))
    trainer.save(tmp_path / "first")
    full = export_bundle(tmp_path / "first", tmp_path / "full")
    step(trainer, range(2990, 3020))
    trainer.save(tmp_path / "second")
    delta = export_bundle(tmp_path / "second", tmp_path / "delta", since=tmp_path / "full")
    (layer,) = load_bundle(tmp_path / "delta", model=Model())._of("item").layers[1:]
    assert sorted(layer.keys.tolist()) == list(range(2990, 3020))
    assert delta.num_bytes < full.num_bytes / 20
    same = export_bundle(tmp_path / "second", tmp_path / "same", since=tmp_path / "delta")
    assert [len(layer.keys) for layer in load_bundle(tmp_path / "same", model=Model())._of("item").layers[2:]] == [0]
    assert same.version != delta.version


def test_a_row_that_changed_back_and_a_key_that_came_back_are_right(tmp_path: Path) -> None:
    """A run may go on from a checkpoint before the one that was exported; so a delta may also lead back."""
    trainer = small_trainer()
    step(trainer, range(50))
    trainer.save(tmp_path / "first")
    before = trainer.rows("item", KEYS).clone()
    step(trainer, range(25, 75))
    trainer.save(tmp_path / "second")
    export_bundle(tmp_path / "first", tmp_path / "full")
    export_bundle(tmp_path / "second", tmp_path / "forth", since=tmp_path / "full")
    export_bundle(tmp_path / "first", tmp_path / "back", since=tmp_path / "forth")
    export_bundle(tmp_path / "second", tmp_path / "again", since=tmp_path / "back")
    bundle = load_bundle(tmp_path / "again", model=Model())
    assert torch.equal(bundle.rows("item", KEYS), trainer.rows("item", KEYS)) and bundle.num_keys("item") == 75
    bundle = load_bundle(tmp_path / "back", model=Model())
    assert torch.equal(bundle.rows("item", KEYS), before) and bundle.num_keys("item") == 50


def test_a_base_of_another_run_or_with_other_tables_is_refused(
    exported: Exported,
    tmp_path: Path,
) -> None:
    with make_trainer(tmp_path / "storage") as other:
        other.step(make_batch(0))
        other.save(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"bundle-0 cannot be what a delta builds on: it is of run \w+, .*other of run"
    ):
        export_bundle(tmp_path / "other", tmp_path / "delta", since=exported.bundles[0])
    with pytest.raises(ValueError, match="its table 'plain' was declared, or is stored, otherwise"):
        export_bundle(exported.checkpoints[1], tmp_path / "delta", since=exported.bundles[0], dtype="bfloat16")
    manifest = exporting.manifests.read(exported.bundles[0])
    newest = manifests.read(exported.checkpoints[1])
    for change, message in (
        ({"tables": manifest.tables[1:]}, "it has the tables half/odd name, rare"),
        ({"features": manifest.features[1:]}, "the features are others"),
    ):
        earlier = dataclasses.replace(manifest, **change)
        with pytest.raises(ValueError, match=message):
            exporting._check_same(earlier, newest, manifest.tables, manifest.features)
    assert not (tmp_path / "delta").exists()


def test_nothing_is_overwritten(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="mine exists already; choose another name"):
        export_bundle(exported.checkpoints[0], tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["table-plain.0-of-1.safetensors", "dense.safetensors"])
def test_nothing_is_made_of_a_damaged_checkpoint(exported: Exported, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(exported.checkpoints[0].parent, tmp_path / "copy"))
    file = folder / exported.checkpoints[0].name / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for checkpoint in exported.checkpoints[: 2 if name.startswith("table") else 1]:
        with pytest.raises(Damaged, match=f"{name} is damaged"):
            export_bundle(folder / checkpoint.name, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_checkpoint_that_is_removed_meanwhile_is_named(
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(exported.checkpoints[0].parent, tmp_path / "copy"))
    counts = exporting.SavedTable.counts

    def remove_and_count(self: Any) -> Any:
        shutil.rmtree(folder / exported.checkpoints[0].name, ignore_errors=True)
        return counts(self)

    monkeypatch.setattr(exporting.SavedTable, "counts", remove_and_count)
    with pytest.raises(ValueError, match=r"was removed while it was exported.*train.keep_checkpoints"):
        export_bundle(folder / exported.checkpoints[0].name, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_checkpoint_that_does_not_know_its_features_says_what_to_do(
    exported: Exported,
    tmp_path: Path,
) -> None:
    from tests.serve.test_manifest import rewrite

    path = Path(shutil.copytree(exported.checkpoints[0], tmp_path / "copy"))
    rewrite(path, lambda values: values["settings"].pop("features"))
    with pytest.raises(ValueError, match="saved by an earlier version of nestpipe, which did not note features"):
        export_bundle(path, tmp_path / "bundle")


def test_an_export_that_is_killed_leaves_nothing_that_loads_and_the_next_one_works(
    exported: Exported,
    tmp_path: Path,
) -> None:
    out = tmp_path / "bundle"

    def export_and_stop_half_way() -> None:
        def stop(*_: object, **__: object) -> None:
            (tmp_path / "half way").touch()
            signal.pause()

        exporting.manifests.write = stop  # type: ignore[assignment]
        export_bundle(exported.checkpoints[0], out)

    child = multiprocessing.get_context("fork").Process(target=export_and_stop_half_way, daemon=True)
    child.start()
    try:
        until((tmp_path / "half way").exists, "the export is half way")
        with pytest.raises(ValueError, match="bundle is being written by another process"):
            export_bundle(exported.checkpoints[0], out)
    finally:
        child.kill()
        child.join()
    assert not out.exists() and (partial_of(out) / "table-plain.safetensors").exists()
    for path in (out, partial_of(out)):
        with pytest.raises(Damaged, match=r"does not exist|has no manifest"):
            load_bundle(path, model=Ranker())
    export_bundle(exported.checkpoints[0], out)
    assert_says(load_bundle(out, model=Ranker(), verify=True), exported.said[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "half way"]


@pytest.mark.parametrize("size", [4096, 4 * 4096, 9 * 4096])
def test_a_full_disk_is_told_and_leaves_nothing(
    exported: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    with mounted(tmp_path / "small", size) as place:
        assert run("export", exported.checkpoints[0], place / "bundle") == 1
        assert "No space left on device; nothing was written" in capsys.readouterr().err
        assert list(place.iterdir()) == []


def test_memory_does_not_grow_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "ROWS", 1 << 10)
    monkeypatch.setattr(sealed, "BLOCK", 1 << 14)
    trainer = small_trainer()
    peaks = []
    for number, keys in enumerate((range(8_000), range(64_000))):
        step(trainer, keys)
        trainer.save(tmp_path / f"saved-{number}")
        tracemalloc.start()
        export_bundle(tmp_path / f"saved-{number}", tmp_path / f"bundle-{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100_000  # the keys alone are 448,000 bytes more


def test_the_command_exports_the_newest_of_a_run_while_it_goes_on(
    exported: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(exported.checkpoints[0].parent, folder / "checkpoints")
    (folder / "checkpoints" / f".{folder_of(12)}.partial").mkdir()  # that is being written
    (folder / "config.json").write_text(json.dumps({}))
    assert run("export", folder, tmp_path / "full") == 0
    said = capsys.readouterr().out
    assert "step 11, all rows" in said and "nestpipe.load_bundle(" in said
    assert_says(load_bundle(tmp_path / "full", model=Ranker()), exported.said[2])
    assert run("export", folder, tmp_path / "delta", "--since", tmp_path / "full") == 0
    assert "changes since full (version 11-" in capsys.readouterr().out


def test_mistakes_of_the_command_line_are_told(
    exported: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = exported.checkpoints[0], tmp_path / "out"
    for arguments, message in (
        ([tmp_path, out], "is neither a run folder nor a checkpoint"),
        ([source, out, "--table", "plain"], "--table is for --format parquet or npy"),
        ([source, out, "--format", "npy"], "say which one with --table"),
        ([source, out, "--format", "npy", "--table", "plain"], "choose a name that ends in .npy"),
        ([source, out, "--format", "parquet", "--dtype", "bfloat16"], "--dtype is for --format bundle"),
        ([source, out, "--format", "parquet", "--since", source], "--since is for --format bundle"),
        ([source, out, "--since", source], "is a checkpoint; give the folder of a bundle"),
    ):
        assert run("export", *arguments) == 1
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_the_trainer_that_is_exported_has_something_of_every_kind(exported: Exported) -> None:
    first, last = exported.said[0]["rows"], exported.said[2]["rows"]
    assert all(not torch.equal(first[table.name], last[table.name]) for table in TABLES)
    shared = load_bundle(exported.bundles[2], model=Ranker())._of("rare").shared_ids()
    assert len(shared) > 10 and np.all(np.diff(shared) > 0)

"""Which checkpoint of a run is exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nestpipe.export.source import checkpoint_of
from tests.serve.trained import Exported


def test_a_checkpoint_is_itself_and_a_folder_its_newest(exported: Exported) -> None:
    assert checkpoint_of(exported.checkpoints[0]) == exported.checkpoints[0]
    assert checkpoint_of(exported.checkpoints[0].parent) == exported.checkpoints[2]


def test_of_a_run_the_one_with_most_steps_is_taken(exported: Exported, tmp_path: Path) -> None:
    shutil.copytree(exported.checkpoints[0], tmp_path / "final")
    assert checkpoint_of(tmp_path) == tmp_path / "final"
    shutil.copytree(exported.checkpoints[0].parent, tmp_path / "checkpoints")
    assert checkpoint_of(tmp_path) == tmp_path / "checkpoints" / exported.checkpoints[2].name
    shutil.rmtree(tmp_path / "final")
    shutil.copytree(exported.checkpoints[2], tmp_path / "final")
    assert checkpoint_of(tmp_path) == tmp_path / "final"


def test_a_run_without_any_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no complete checkpoint yet; set train.checkpoint_every"):
        checkpoint_of(tmp_path)
    with pytest.raises(ValueError, match="does not exist; give the folder of a checkpoint, or of a run"):
        checkpoint_of(tmp_path / "nowhere")

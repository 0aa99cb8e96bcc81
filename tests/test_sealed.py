"""Folders that are there whole or not at all. (Damage: tests/checkpoint/test_damage.py, tests/serve/test_manifest.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.sealed import new_folder, partial_of


def test_a_folder_has_its_name_when_it_is_complete_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "made" / "one"
    with new_folder(path) as partial:
        (partial / "file").write_text("text")
        assert not path.exists()
    assert (path / "file").read_text() == "text" and list(path.parent.iterdir()) == [path]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk is full"):
        fail_half_way(tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def fail_half_way(path: Path) -> None:
    with new_folder(path) as partial:
        (partial / "file").write_text("text")
        raise OSError("disk is full")


def test_what_a_killed_process_left_goes_first(tmp_path: Path) -> None:
    partial_of(tmp_path / "one").mkdir()
    (partial_of(tmp_path / "one") / "old").write_text("text")
    with new_folder(tmp_path / "one") as partial:
        assert list(partial.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_two_cannot_write_the_same_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    with new_folder(tmp_path / "one") as partial:
        (partial / "file").write_text("text")
        with (
            pytest.raises(ValueError, match="one is being written by another process"),
            new_folder(tmp_path / "one"),
        ):
            pass
    assert (tmp_path / "one" / "file").read_text() == "text"
    with pytest.raises(ValueError, match="one exists already"), new_folder(tmp_path / "one"):
        pass

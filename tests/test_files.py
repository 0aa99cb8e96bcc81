"""A file is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestpipe.files import check_local, check_writable, whole, write_json, write_text


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "result.txt"
    write_text(path, "old")
    with pytest.raises(OSError, match="disk is full"):
        _fail_half_way(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_not_seen_under_its_name_before_it_is_whole(tmp_path):
    path = tmp_path / "made" / "result.txt"
    with whole(path) as partial:
        partial.write_text("text")
        assert not path.exists()
    assert path.read_text() == "text"
    assert list(path.parent.iterdir()) == [path]


def test_json_has_null_for_what_is_not_defined(tmp_path):
    write_json(tmp_path / "a.json", {"AUC": float("nan"), "list": [1.5, float("inf")], "count": 3})
    assert json.loads((tmp_path / "a.json").read_text()) == {"AUC": None, "list": [1.5, None], "count": 3}


@pytest.mark.parametrize("url", ["s3://logs/run", "gs://b/x", "hdfs://host:9000/run"])
def test_a_url_is_no_place_to_write_to(url):
    with pytest.raises(ValueError, match="it is a URL, and what is written stays on file systems"):
        check_writable(folder=Path(url))
    check_local(Path("runs/C:/odd"))


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.touch()
    check_writable(None, tmp_path / "new" / "a.json", folder=tmp_path)
    for wrong in ({"folder": file}, {"folder": file / "below"}):
        with pytest.raises(ValueError, match="is a file; choose another path"):
            check_writable(**wrong)
    with pytest.raises(ValueError, match="is a folder; choose another path"):
        check_writable(tmp_path)


def _fail_half_way(path):
    with whole(path) as partial:
        partial.write_text("half of the new")
        raise OSError("disk is full")

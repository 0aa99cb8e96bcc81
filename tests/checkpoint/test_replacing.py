"""A checkpoint in the place of another: whenever a program ends, what is complete is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.checkpoint import manifest, next_of, problems, settle
from tests.checkpoint.test_saving import make_trainer, train


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"best": "old"}, "old"),
        ({"best-next": "new"}, "new"),
        ({"best": "old", "best-next": "new"}, "new"),
        ({".best.old": "old", "best-next": "new"}, "new"),
        ({"best": "new", ".best.old": "old"}, "new"),
        ({"best": "old", "best-next": "new", ".best.old": "older"}, "new"),
        ({}, None),
    ],
)
def test_what_is_complete_takes_its_place(tmp_path: Path, there: dict[str, str], found: str | None) -> None:
    for name, text in there.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(text)
    settle(tmp_path / "best")
    assert {path.name: (path / "text").read_text() for path in tmp_path.iterdir()} == ({"best": found} if found else {})


def test_one_that_is_saved_in_the_place_of_another_is_sound(tmp_path: Path) -> None:
    with make_trainer() as trainer:
        for step in (1, 2, 3):
            train(trainer, step - 1, step)
            trainer.save(tmp_path / "best", replace=True)
            assert manifest.read(tmp_path / "best").step == step and not list(problems(tmp_path / "best"))
            assert [path.name for path in tmp_path.iterdir()] == ["best"]
        with pytest.raises(ValueError, match="exists already"):
            trainer.save(tmp_path / "best")
    assert not next_of(tmp_path / "best").exists()

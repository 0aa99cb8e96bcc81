"""Which line an error names: the user's own, wherever it was raised below that."""

from __future__ import annotations

import json
import os
import sysconfig
import traceback
from pathlib import Path
from types import FunctionType

import pytest
import torch

from nestpipe.errors import describe, from_the_users_line


def raised(work: FunctionType) -> BaseException:
    try:
        work()
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        return error
    raise AssertionError


def defined_in(path: Path, line: str) -> FunctionType:
    """A function `forward` whose code seems to be in that file."""
    names: dict[str, FunctionType] = {}
    exec(compile(f"import json, torch\ndef forward():\n    {line}", str(path), "exec"), names)
    return names["forward"]


def first_file(error: BaseException) -> str:
    return traceback.extract_tb(from_the_users_line(error).__traceback__)[0].filename


@pytest.mark.parametrize("line", ["json.loads('{')", "torch.nn.Linear(2, 2)(torch.ones(3))", "1 / 0"])
@pytest.mark.parametrize("folder", ["home/someone", "lib/python3.11/site-packages/theirs", "lib/python3/dist-packages"])
def test_the_line_is_the_users_also_of_an_installed_package(tmp_path: Path, line: str, folder: str) -> None:
    path = tmp_path / folder / "model.py"
    error = raised(defined_in(path, line))
    assert describe(error).endswith(f" (at {path}:3, in forward)")
    assert first_file(error) == str(path)


def test_the_users_own_line_goes_before_that_of_a_package() -> None:
    package = defined_in(Path("/usr/lib/python3/dist-packages/pandas/parser.py"), "json.loads('{')")

    def forward() -> None:
        package()

    error = raised(forward)  # type: ignore[arg-type]
    assert f"(at {__file__}:" in describe(error) and describe(error).endswith("in forward)")
    assert first_file(error) == __file__


def test_without_a_line_of_the_users_there_is_no_place() -> None:
    error = raised(lambda: json.loads("{"))  # type: ignore[arg-type]
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert first_file(error).startswith(sysconfig.get_path("stdlib") + os.sep)
    assert describe(error) == str(error)
    error = raised(lambda: torch.nn.Linear(2, 2)(torch.ones(3)))  # type: ignore[arg-type]
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert " (at " not in describe(error)

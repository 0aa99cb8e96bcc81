"""`import nestpipe` costs nothing: what it offers is imported when it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nestpipe

HEAVY = ("torch", "numba", "numpy", "matplotlib", "pyarrow", "tensorboard")


def loaded_by(code: str, *heavy: str) -> list[str]:
    """Which of the modules `code` leaves imported, in a Python of its own."""
    told = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    told += f"print(';'.join(name for name in {heavy!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return [name for name in result.stdout.splitlines()[-1].split(";") if name]


@pytest.mark.parametrize(
    "code",
    [
        "import nestpipe; dir(nestpipe); nestpipe.__version__",
        "from nestpipe import cli; cli.main(['--help'])",
        "from nestpipe import cli; cli.main(['train', '--help'])",
        "from nestpipe import cli; cli.main(['--version'])",
        "from nestpipe import cli; cli.main(['train', 'x.toml', '--workers', 'many'])",
        "from nestpipe import cli; cli.main(['tarin'])",
    ],
)
def test_help_and_mistakes_on_the_command_line_import_nothing_that_takes_long(code: str) -> None:
    assert loaded_by(code, *HEAVY) == []


def test_a_worker_imports_nothing_that_only_other_commands_use() -> None:
    others = ("nestpipe.bench", "nestpipe.report", "nestpipe.simulate", "matplotlib", "tensorboard", "torch._dynamo")
    assert loaded_by("import nestpipe.run, nestpipe.config", *others) == []


def test_every_public_name_is_there_listed_and_declared_for_type_checkers() -> None:
    tree = ast.parse(Path(nestpipe.__file__).read_text())
    (declared,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in declared.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(nestpipe.__all__) <= set(dir(nestpipe))
    for name in nestpipe.__all__:
        assert getattr(nestpipe, name).__name__ == name
    from nestpipe import Trainer, trainer

    assert Trainer is trainer.Trainer


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nestpipe' has no attribute 'Trianer'"):
        nestpipe.Trianer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Trianer'"):
        from nestpipe import Trianer  # noqa: F401

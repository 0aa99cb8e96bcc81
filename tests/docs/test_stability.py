"""docs/stability.md and docs/api.md list what the package exports, no more and no less."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MODULES = (
    "nestpipe",
    "nestpipe.data",
    "nestpipe.metrics",
    "nestpipe.migration",
    "nestpipe.models",
    "nestpipe.ops",
    "nestpipe.tracking",
)


def listed() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(nestpipe[\w.]*)` \| (.*) \|$", (DOCS / "stability.md").read_text(), re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def test_the_page_lists_every_public_module_once() -> None:
    assert tuple(listed()) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_page_lists_what_the_module_exports_and_all_of_it_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(listed()[name]) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_every_public_class_stands_on_the_api_page() -> None:
    on_page = set(re.findall(r"^::: nestpipe\.[\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    classes = {
        name
        for names in listed().values()
        for name in names
        if not name.isupper() or name in ("SGD", "AUC", "NDCG", "DCN", "DIN", "DLRM", "HSTU")
    }
    assert classes <= on_page, f"not on the page: {sorted(classes - on_page)}"

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from tests.cluster import Cluster

if TYPE_CHECKING:
    from tests.serve.trained import Exported

torch.set_num_threads(1)

# A run that decides whether a change lands tries the same examples every time; everywhere else new ones are tried. How long
# one takes says nothing on a machine that others use as well.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# Files of tests that take tens of seconds each: processes that import torch, environments that are made.
LONG = (
    "packaging/test_wheel.py",
    "config/test_kinds.py",
    "behaviour/test_killed.py",
    "docs/test_pages.py",
    "docs/test_readme.py",
    "behaviour/test_replicas.py",
    "bench/test_storage.py",
    "bench/test_overlap.py",
    "test_cli.py",
    "behaviour/test_resume.py",
    "test_run.py",
    "behaviour/test_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones begin first, dealt to the processes, each of which gets a run of consecutive tests: else one of them would end
    minutes after all others."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    piles: list[list[pytest.Item]] = [[] for _ in range(count)]
    long = {name: [item for item in items if item.path.as_posix().endswith(f"tests/{name}")] for name in LONG}
    for number, tests in enumerate(long.values()):
        piles[number % count] += tests
    dealt = {item for pile in piles for item in pile}
    others = [item for item in items if item not in dealt]
    size = len(items) / count
    for number, pile in enumerate(piles):
        room = max(0, round(size * (number + 1)) - sum(map(len, piles[: number + 1])))
        pile += others[:room]
        others = others[room:]
    items[:] = [item for pile in piles for item in pile] + others


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Checkpoints of a trainer with tables of every kind, bundles of them, and what the trainer said."""
    from tests.serve.trained import export_all

    return export_all(tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()

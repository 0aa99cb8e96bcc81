from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.cluster import Cluster

torch.set_num_threads(1)

# A run that decides whether a change lands tries the same examples every time; everywhere else new ones are tried. How long
# one takes says nothing on a machine that others use as well.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()

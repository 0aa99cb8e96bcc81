from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()

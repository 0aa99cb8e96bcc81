"""Workloads that several tests share: counting the large one takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.config import read
from nestpipe.simulate.workload import Workload, of_config
from tests.simulate.tiny import sequences

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def hstu_1536() -> Workload:
    return of_config(read(EXAMPLES / "hstu_1536.toml"))


@pytest.fixture(scope="session")
def histories() -> Workload:
    """Of a small config, whose batches can be cut."""
    return of_config(sequences(), batches=4)

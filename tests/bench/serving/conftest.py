"""A lab with a small ranker, and one server that the tests of this folder share; without a trigger, so that short histories are
relayed too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from nestpipe.bench.serving.lab import UNTRIGGERED, Lab, lab
from nestpipe.bench.serving.service import Service
from nestpipe.bench.serving.suite import QUICK


@pytest.fixture(scope="package")
def small_lab() -> Iterator[Lab]:
    with lab(dataclasses.replace(QUICK.conditions, slack=100.0)) as made:
        yield made


@pytest.fixture(scope="package")
def service(small_lab: Lab) -> Iterator[Service]:
    with small_lab.serving(UNTRIGGERED) as running:
        yield running

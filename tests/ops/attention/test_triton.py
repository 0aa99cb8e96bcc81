"""The Triton implementation in Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.attention.interpreted import CASES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux only")


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.attention.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_the_reference(case, differences):
    found = differences[str(case)]
    assert len(found) == 1 + (1 if case.kind == "weights" else 3) + case.position + case.times
    assert max(found.values()) <= 1e-5, found

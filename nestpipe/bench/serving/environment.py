"""Of the processes that a measurement starts."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """For processes of ours: one thread, and this nestpipe whatever else is installed."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

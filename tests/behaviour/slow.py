"""A model for runs that are to be met in the middle of their steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from nestpipe.models import DLRM

FILE = "NESTPIPE_TEST_SLOW"


class Slow(DLRM):
    """While the file exists that the environment names, a step takes half a second from the 25th on: time enough to be noticed
    and killed on any machine. It computes what DLRM does."""

    steps = 0

    def forward(self, *args: Any) -> Any:
        if self.training:
            self.steps += 1
            if self.steps > 25 and Path(os.environ.get(FILE, "")).is_file():
                time.sleep(0.5)
        return super().forward(*args)

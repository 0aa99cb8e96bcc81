"""A long bench says what it is at, so that it does not look hung."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist


def tell(text: str) -> None:
    """A line on stderr, with the time of day; of several workers only the first says it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

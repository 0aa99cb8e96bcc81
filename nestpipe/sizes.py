"""How much at once, and how far ahead: what the engine works with and the simulator counts with, so that they cannot drift; and
sizes in bytes as users write them."""

from __future__ import annotations

import re

BUCKET_BYTES = 4 << 20  # of dense gradients that one collective sums (engine/reducer.py)
NUM_TOTALS = 12  # float64 that AGREE sums over workers (engine/context.py names them)
READ_AHEAD = 2  # batches that are read before training asks for them (engine/loader.py)
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def num_bytes(size: int | str, *, least: int = 1) -> int:
    """A number of bytes as it is, or from text such as "2GB" (10^9) or "1.5 GiB" (2^30)."""
    problem = f"must be a number of bytes of at least {least}, or text such as '2GB' or '512MiB', got {size!r}"
    value: float
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].upper() not in UNITS:
            raise ValueError(problem)
        value = round(float(match[1]) * UNITS[match[2].upper()])
    else:
        value = size
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != int(value) or value < least:
        raise ValueError(problem)
    return int(value)

"""Prints, as JSON, how far the Triton implementation is from the reference; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import sys

import torch

from tests.ops.attention.cases import TAILS, Case, differences

CASES = [
    Case("silu", position=True, times=True),
    Case("silu", position=False, times=False),
    Case("softmax", position=True, times=True),
    Case("weights", position=True, times=False),
    Case("weights", position=False, times=True),
    *TAILS,
    Case("silu", position=True, times=False, lengths=(1000, 0, 1), num_heads=1, width=3),
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({str(case): differences(case, "triton") for case in CASES}, sys.stdout)

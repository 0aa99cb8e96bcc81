"""Dropout with fewer random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout(x: Tensor, *, p: float, training: bool) -> Tensor:
    """torch.nn.functional.dropout with p rounded to 1/65536: one 64-bit draw serves four values."""
    if not training or p == 0:
        return x
    cut = min(65535, round(p * 65536))
    draws = (
        torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None).view(torch.int16)
    )
    keep = (draws[: x.numel()] >= cut - 32768).view(x.shape)
    return x * (keep * (65536 / (65536 - cut)))

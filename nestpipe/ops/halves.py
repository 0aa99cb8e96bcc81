"""Rows in half the bytes: float16 with a scale of its own for every row, or bfloat16.

Shape legend: N rows, D row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
_ROOM = 15  # the largest value of a scaled row lies below 2^15; float16 ends at 65,504


def to_half(rows_ND: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rounded rows, and the power of two that each was multiplied by: small rows keep their digits, which float16 alone would
    round to zero. bfloat16 reaches as far as float32 and needs none."""
    assert dtype in HALVES
    if dtype is torch.bfloat16:
        return rows_ND.to(dtype), None
    largest_N1 = rows_ND.abs().amax(-1, keepdim=True) if rows_ND.shape[1] else rows_ND.new_zeros(len(rows_ND), 1)
    exponent_N1 = torch.frexp(largest_N1).exponent.clamp(-100, 127)
    scale_N1 = torch.ldexp(torch.ones_like(largest_N1), _ROOM - exponent_N1)
    return (rows_ND * scale_N1).to(dtype), scale_N1


def from_half(half_ND: Tensor, scale_N1: Tensor | None) -> Tensor:
    """float32 again; exact."""
    return half_ND.float() if scale_N1 is None else half_ND.float() / scale_N1


def rounded(rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows as they are after a way in half precision; float32 (float64 in tests) stays as it is."""
    return from_half(*to_half(rows_ND, dtype)).to(rows_ND.dtype) if dtype in HALVES else rows_ND

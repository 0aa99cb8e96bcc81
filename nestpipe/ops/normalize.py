"""Vectors of length 1, in fewer passes than autograd takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.precision import in_float32


@in_float32
def normalize(vectors: Tensor, *, eps: float = 1e-6) -> Tensor:
    """vectors / max(|vectors|, eps) along the last dimension: torch.nn.functional.normalize."""
    return _Normalize.apply(vectors, eps)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        scale = norm.clamp(min=eps).reciprocal_()
        unit = vectors * scale
        # Below eps the divisor is a constant, so nothing is projected out of the gradient.
        ctx.save_for_backward(unit, scale, norm > eps)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        unit, scale, projected = ctx.saved_tensors
        along = torch.linalg.vecdot(grad, unit).unsqueeze(-1) * projected
        return torch.addcmul(grad, unit, along, value=-1).mul_(scale), None

"""Samples of clicks for models of pooled features, and what all such models are asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe.batch import Batch

FEATURES = ["user", "item", "shop"]
DIM, NUM_DENSE = 6, 4


def make_batch(
    size: int, *, num_dense: int = NUM_DENSE, dtype: torch.dtype = torch.float32
) -> tuple[Batch, dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    dense = {"dense": torch.randn(size, num_dense, generator=draw, dtype=dtype)} if num_dense else {}
    labels = torch.randint(2, (size,), generator=draw).float()
    rows = {name: torch.randn(size, DIM, generator=draw, dtype=dtype).requires_grad_() for name in FEATURES}
    return Batch({}, dense, labels), rows


def make_model(kind: type[Any], **changes: Any) -> Any:
    """With larger parameters than a new model has, so that every term shows."""
    torch.manual_seed(1)
    model = kind(**({"num_dense": NUM_DENSE, "features": FEATURES, "dim": DIM} | changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def fields_of(batch: Batch, rows: dict[str, Tensor], b: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of sample b: its dense numbers and its rows, one by one."""
    return list(batch.dense["dense"][b]) if batch.dense else [], [rows[name][b] for name in FEATURES]


def perceptron(mlp: torch.nn.Sequential, x: Tensor) -> Tensor:
    """An MLP of one sample, layer by layer."""
    layers = [module for module in mlp if isinstance(module, torch.nn.Linear)]
    activations = [module for module in mlp if not isinstance(module, torch.nn.Linear)]
    for place, layer in enumerate(layers):
        x = layer.weight @ x + layer.bias
        if place < len(activations):
            slope = getattr(activations[place], "weight", torch.zeros(1, dtype=x.dtype))  # of a PReLU
            x = torch.where(x > 0, x, slope * x)
    return x


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    p = 1 / (1 + torch.exp(-logits))
    return -(labels * p.log() + (1 - labels) * (1 - p).log())


def assert_same_gradients(model: torch.nn.Module, leaves: list[Tensor], losses: Tensor, expected: Tensor) -> None:
    """Each sample with a weight of its own, so that a mix of them would show."""
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    weights = torch.arange(1, len(losses) + 1)
    leaves = [*model.parameters(), *leaves]
    for got, wanted in zip(
        torch.autograd.grad((losses * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)

"""HSTU against a plain padded implementation, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.models import HSTU
from tests.models.histories import buckets, check_against, distances, heads, make_model


def layer(module: torch.nn.Module, x: Tensor, times: Tensor, valid: Tensor) -> Tensor:
    normed = functional.layer_norm(x, x.shape[-1:])
    u = functional.silu(module.gate(normed))
    q, k, v = (heads(part, module.num_heads) for part in functional.silu(module.qkv(normed)).chunk(3, -1))
    apart, visible = distances(valid)
    scores = q @ k.transpose(2, 3) + module.position_bias[apart]
    if module.time_bias is not None:
        scores = scores + module.time_bias[buckets(times, len(module.time_bias))][:, None]
    weights = functional.silu(scores) * visible[:, None] / torch.arange(1, x.shape[1] + 1)[:, None]
    attended = (weights @ v).transpose(1, 2).flatten(2)
    return x + module.out(u * functional.layer_norm(attended, attended.shape[-1:]))


@pytest.mark.parametrize("normalize_", [True, False])
@pytest.mark.parametrize("num_time_buckets", [0, 64])
def test_equals_a_padded_reference_forward_and_backward(normalize_, num_time_buckets):
    check_against(layer, make_model(HSTU, normalize=normalize_, num_time_buckets=num_time_buckets))

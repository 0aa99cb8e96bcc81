"""FuXi against a plain padded implementation, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.models import FuXi
from tests.models.histories import buckets, check_against, distances, heads, make_model


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def layer(module: torch.nn.Module, x: Tensor, times: Tensor, valid: Tensor) -> Tensor:
    normed = rms(x)
    u = functional.silu(module.gate(normed))
    q, k, v = (heads(part, module.num_heads) for part in functional.silu(module.qkv(normed)).chunk(3, -1))
    apart, visible = distances(valid)
    seen = torch.arange(1, x.shape[1] + 1)[:, None]
    channels = [functional.silu(q @ k.transpose(2, 3)) * visible[:, None] / seen @ v]
    channels.append((module.position_weight[apart] * visible)[:, None] @ v)
    if module.time_weight is not None:
        channels.append((module.time_weight[buckets(times, len(module.time_weight))] * visible)[:, None] @ v)
    attended = rms(torch.cat(channels, dim=-1)).transpose(1, 2).flatten(2)
    z = x + module.out(u * attended)
    left, right = module.ffn_in(rms(z)).chunk(2, -1)
    return z + module.ffn_out(functional.silu(left) * right)


@pytest.mark.parametrize("normalize_", [True, False])
@pytest.mark.parametrize("num_time_buckets", [0, 64])
def test_equals_a_padded_reference_forward_and_backward(normalize_, num_time_buckets):
    check_against(layer, make_model(FuXi, normalize=normalize_, num_time_buckets=num_time_buckets))


def test_the_time_channel_is_left_out_without_buckets():
    without, with_times = make_model(FuXi), make_model(FuXi, num_time_buckets=64)
    assert with_times.layers[0].gate.out_features == 3 * without.dim
    assert without.layers[0].gate.out_features == 2 * without.dim
    assert without.layers[0].time_weight is None

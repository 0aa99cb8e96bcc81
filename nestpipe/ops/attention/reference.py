"""What jagged attention computes, in plain torch, one sample after the other: the definition that the others are tested with.

Any dtype and device; autograd does the gradients. Memory grows with the square of the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from nestpipe.ops.attention.buckets import time_buckets


def attention(
    q_TE: Tensor | None,
    k_SE: Tensor | None,
    v_SE: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    *,
    num_heads: int,
    kind: str,
    position_bias: Tensor | None,
    times_S: Tensor | None,
    time_bias: Tensor | None,
) -> Tensor:
    queries, keys = offsets.tolist(), key_offsets.tolist()
    outs = [v_SE[:0]]
    for a, b, c, e in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        place_K = torch.arange(e - c, device=v_SE.device)
        distance_QK = place_K[e - c - (b - a) :, None] - place_K
        bias_QK = v_SE.new_zeros(distance_QK.shape)
        if position_bias is not None:
            bias_QK = bias_QK + position_bias[distance_QK.clamp(min=0)]
        if time_bias is not None and times_S is not None:
            times_K = times_S[c:e]
            apart_QK = times_K[e - c - (b - a) :, None] - times_K
            bias_QK = bias_QK + time_bias[time_buckets(apart_QK, len(time_bias))]
        v_HKD = _heads(v_SE[c:e], num_heads)
        if q_TE is None or k_SE is None:
            weights = bias_QK * (distance_QK >= 0)
        else:
            scores_HQK = _heads(q_TE[a:b], num_heads) @ _heads(k_SE[c:e], num_heads).transpose(1, 2) + bias_QK
            if kind == "silu":
                weights = silu(scores_HQK) * (distance_QK >= 0)
            else:
                weights = scores_HQK.masked_fill(distance_QK < 0, -torch.inf).softmax(-1)
        outs.append((weights @ v_HKD).transpose(0, 1).flatten(1))
    return torch.cat(outs)


def _heads(x_TE: Tensor, num_heads: int) -> Tensor:
    return x_TE.unflatten(1, (num_heads, x_TE.shape[1] // num_heads)).transpose(0, 1)

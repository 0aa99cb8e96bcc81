"""What candidate attention computes, in plain torch, one sample after the other: the definition that the fast way is tested with.

Any dtype and device; autograd does the gradients. A candidate is put behind the keys of its sample as one more, for itself only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from nestpipe.ops.attention.buckets import time_buckets


def attention(
    q_CE: Tensor | None,
    k_CE: Tensor | None,
    v_CE: Tensor,
    offsets: Tensor,
    k_SE: Tensor | None,
    v_SE: Tensor,
    history_offsets: Tensor,
    *,
    num_heads: int,
    kind: str,
    position_bias: Tensor | None,
    times_S: Tensor | None,
    now_B: Tensor | None,
    time_bias: Tensor | None,
) -> Tensor:
    candidates, items = offsets.tolist(), history_offsets.tolist()
    outs = [v_CE[:0]]
    for b in range(len(candidates) - 1):
        mine, seen = slice(candidates[b], candidates[b + 1]), slice(items[b], items[b + 1])
        num_candidates, num_items = candidates[b + 1] - candidates[b], items[b + 1] - items[b]
        # Of the items, then of the candidate itself.
        bias_K = v_CE.new_zeros(num_items + 1)
        if position_bias is not None:
            bias_K = bias_K + position_bias[torch.arange(num_items, -1, -1, device=v_CE.device)]
        if time_bias is not None and times_S is not None and now_B is not None:
            apart_K = torch.cat([now_B[b] - times_S[seen], times_S.new_zeros(1)])
            bias_K = bias_K + time_bias[time_buckets(apart_K, len(time_bias))]
        scores_HCK = bias_K.expand(num_heads, num_candidates, num_items + 1)
        if q_CE is not None and k_CE is not None and k_SE is not None:
            q_HCD, own_HCD = _heads(q_CE[mine], num_heads), _heads(k_CE[mine], num_heads)
            of_items = q_HCD @ _heads(k_SE[seen], num_heads).transpose(1, 2)
            scores_HCK = silu(scores_HCK + torch.cat([of_items, (q_HCD * own_HCD).sum(-1, keepdim=True)], dim=-1))
        from_items = scores_HCK[..., :-1] @ _heads(v_SE[seen], num_heads)
        from_itself = scores_HCK[..., -1:] * _heads(v_CE[mine], num_heads)
        outs.append((from_items + from_itself).transpose(0, 1).flatten(1))
    return torch.cat(outs)


def _heads(x_TE: Tensor, num_heads: int) -> Tensor:
    return x_TE.unflatten(1, (num_heads, x_TE.shape[1] // num_heads)).transpose(0, 1)

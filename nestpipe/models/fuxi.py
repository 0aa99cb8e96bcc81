"""FuXi-alpha (arXiv 2502.03036): three channels of attention, and a feed-forward stage in every layer.

Layer: X' = RMSNorm(X); U, V, Q, K = SiLU(X' W). Three channels share V: semantic SiLU(Q K^T) / n without a bias, position (a
learned weight per distance) and time (one per logarithmic bucket), the last two not normalised and shared by the heads.
Z = W_0(U * RMSNorm(the three side by side, per head)) + X; Y = Z + W_2(SiLU(W_1 Z') * W_3 Z'), Z' = RMSNorm(Z). No RMSNorm has
weights of its own.

Choices: `n` is the number of keys a position sees, as in our HSTU. The time of row i is that of item i; the authors' code takes
the time of item i + 1, which makes the last row of a prefix depend on what follows it. Without `num_time_buckets` there is no
time channel, and U is twice as wide as V, not three times. The feed-forward stage is `WIDER` times as wide as the states.

Shape legend: T tokens of all histories, D row width, E = heads x head width, C channels, H heads, W = C x head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.models.layer import Attend, Layer, Projected
from nestpipe.models.sequence import SequenceModel
from nestpipe.ops import dropout

WIDER = 4
EPS = 1e-6


class FuXiLayer(Layer):
    def __init__(
        self, *, dim: int, num_heads: int, head_dim: int, max_length: int, num_time_buckets: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads, self.inner = num_heads, num_heads * head_dim
        num_channels = 3 if num_time_buckets else 2
        self.gate = nn.Linear(dim, num_channels * self.inner)
        self.qkv = nn.Linear(dim, 3 * self.inner)
        self.out = nn.Linear(num_channels * self.inner, dim)
        self.position_weight = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.time_weight = nn.Parameter(torch.empty(num_time_buckets).normal_(std=0.02)) if num_time_buckets else None
        self.ffn_in = nn.Linear(dim, 2 * WIDER * dim, bias=False)
        self.ffn_out = nn.Linear(WIDER * dim, dim, bias=False)
        self.dropout = dropout

    def norm(self, x_TD: Tensor) -> Tensor:
        return _rms_norm(x_TD)

    def finish(self, x_TD: Tensor, projected: Projected, attend: Attend, seen_T1: Tensor) -> Tensor:
        channels_THW = self._channels(projected.q_TE, attend, seen_T1)
        gated_TW = projected.gate * _rms_norm(channels_THW).flatten(1)
        z_TD = x_TD + self.out(dropout(gated_TW, p=self.dropout, training=self.training))
        left, right = self.ffn_in(_rms_norm(z_TD)).chunk(2, dim=-1)
        return z_TD + self.ffn_out(dropout(functional.silu(left) * right, p=self.dropout, training=self.training))

    def _channels(self, q_TE: Tensor, attend: Attend, seen_T1: Tensor) -> Tensor:
        """[T, H, W]: what each head gets through its channels, side by side."""
        channels = [
            attend(q_TE, num_heads=self.num_heads) / seen_T1,
            attend(None, kind="weights", position_bias=self.position_weight),
        ]
        if self.time_weight is not None:
            channels.append(attend(None, kind="weights", time_bias=self.time_weight))
        return torch.cat([x_TE.unflatten(1, (self.num_heads, -1)) for x_TE in channels], dim=-1)


def _rms_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=EPS)


class FuXi(SequenceModel):
    """Next-item model of FuXi layers; inputs, arguments and outputs as `SequenceModel` has them."""

    layer_class = FuXiLayer

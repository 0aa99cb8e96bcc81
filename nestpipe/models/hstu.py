"""HSTU, the sequential transducer of arXiv 2402.17152, trained to predict the next item of a history.

Layer: U, V, Q, K = split(SiLU(LN(X) W)); A = causal * SiLU(Q K^T + rab) / n, no softmax; Y = X + W_o(U * LN(A V)).

Choices: `n` is the number of keys a position sees (its index + 1), not a padded length, so that a sample's result
depends on nothing but the sample. `rab` is a learned bias per distance in positions plus, if `num_time_buckets` > 0,
one per logarithmic bucket of the time between the two items; both are shared by the heads.

Shape legend: T tokens of all histories, D row width, E = heads x head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.models.layer import Attend, Layer, Projected
from nestpipe.models.sequence import SequenceModel
from nestpipe.ops import dropout


class HSTULayer(Layer):
    def __init__(
        self, *, dim: int, num_heads: int, head_dim: int, max_length: int, num_time_buckets: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads, self.inner = num_heads, num_heads * head_dim
        self.gate = nn.Linear(dim, self.inner)
        self.qkv = nn.Linear(dim, 3 * self.inner)
        self.out = nn.Linear(self.inner, dim)
        self.position_bias = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets).normal_(std=0.02)) if num_time_buckets else None
        self.dropout = dropout

    def norm(self, x_TD: Tensor) -> Tensor:
        return functional.layer_norm(x_TD, x_TD.shape[-1:])

    def finish(self, x_TD: Tensor, projected: Projected, attend: Attend, seen_T1: Tensor) -> Tensor:
        attended_TE = attend(
            projected.q_TE, num_heads=self.num_heads, position_bias=self.position_bias, time_bias=self.time_bias
        )
        gated_TE = projected.gate * functional.layer_norm(attended_TE / seen_T1, (self.inner,))
        return x_TD + self.out(dropout(gated_TE, p=self.dropout, training=self.training))


class HSTU(SequenceModel):
    """Next-item model of HSTU layers; inputs, arguments and outputs as `SequenceModel` has them."""

    layer_class = HSTULayer

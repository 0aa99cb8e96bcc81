"""What jagged attention and HSTU are measured against: the same formulas in plain torch, on samples that are padded.

`padded_attention` pads all samples to the longest, `grouped_attention` sorts them and pads groups of similar length; both keep a
score for every pair of tokens. `PaddedHSTU` is the whole model on padded tensors.

Shape legend: T tokens, B samples, L the longest, E = heads x D, K negatives per sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.hstu import HSTU
from nestpipe.ops.attention import time_buckets

ALIKE = 0.8  # samples of at least so much of the longest length form a group
WHOLE = 4  # samples of a group, at least: fewer do not fill a product


def padded_attention(
    q_TE: Tensor,
    k_TE: Tensor,
    v_TE: Tensor,
    offsets: Tensor,
    *,
    num_heads: int,
    position_bias: Tensor,
    times: Tensor | None = None,
    time_bias: Tensor | None = None,
) -> Tensor:
    q, k, v = (Jagged(x, offsets).to_padded() for x in (q_TE, k_TE, v_TE))
    seconds = None if times is None else Jagged(times, offsets).to_padded()
    out_BLE = attend(q, k, v, num_heads=num_heads, position_bias=position_bias, times_BL=seconds, time_bias=time_bias)
    lengths = offsets.diff()
    return out_BLE[torch.arange(out_BLE.shape[1]) < lengths[:, None]]


def grouped_attention(
    q_TE: Tensor,
    k_TE: Tensor,
    v_TE: Tensor,
    offsets: Tensor,
    *,
    num_heads: int,
    position_bias: Tensor,
    times: Tensor | None = None,
    time_bias: Tensor | None = None,
) -> Tensor:
    order = offsets.diff().argsort(descending=True, stable=True)
    lengths = offsets.diff()[order]
    where, sorted_offsets = Jagged(q_TE, offsets).positions(order)
    q, k, v = (x.index_select(0, where) for x in (q_TE, k_TE, v_TE))
    seconds = None if times is None else times[where]
    outs, first = [], 0
    while first < len(order):
        last = max(first + WHOLE, int((lengths >= ALIKE * lengths[first]).sum()))
        last = min(last, len(order))
        a, z = int(sorted_offsets[first]), int(sorted_offsets[last])
        outs.append(
            padded_attention(
                q[a:z], k[a:z], v[a:z], sorted_offsets[first : last + 1] - a, num_heads=num_heads,
                position_bias=position_bias, times=None if seconds is None else seconds[a:z], time_bias=time_bias,
            )
        )  # fmt: skip
        first = last
    return torch.zeros_like(q).index_copy(0, where, torch.cat(outs))


def attend(
    q_BLE: Tensor,
    k_BLE: Tensor,
    v_BLE: Tensor,
    *,
    num_heads: int,
    position_bias: Tensor,
    times_BL: Tensor | None,
    time_bias: Tensor | None,
) -> Tensor:
    """SiLU(q k^T + bias) v, causal, head by head. Padding lies behind the last token, where the mask hides it."""
    length = q_BLE.shape[1]
    place = torch.arange(length)
    apart_LL = place[:, None] - place
    bias = position_bias[apart_LL.clamp(min=0)]
    if times_BL is not None and time_bias is not None:
        buckets_BLL = time_buckets(times_BL[:, :, None] - times_BL[:, None, :], len(time_bias))
        bias = (bias + time_bias[buckets_BLL])[:, None]
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q_BLE, k_BLE, v_BLE))
    weights_BHLL = functional.silu(q @ k.transpose(-1, -2) + bias).masked_fill(apart_LL < 0, 0.0)
    return (weights_BHLL @ v).transpose(1, 2).flatten(2)


class PaddedHSTU(HSTU):
    """HSTU as one would first write it: everything on [B, L, ...], with padding. Weights, losses and gradients are the same."""

    def forward(self, batch: Batch, rows: dict[str, Jagged]) -> Output:
        keys, history = batch.keys[self.history], rows[self.history]
        lengths, items_BLD, keys_BL = keys.lengths, history.to_padded(), keys.to_padded()
        length = items_BLD.shape[1]
        negatives_BKD = rows[self.negatives.feature].values.unflatten(0, (len(keys), -1))
        negative_keys_BK = batch.keys[self.negatives.feature].values.unflatten(0, (len(keys), -1))
        times = batch.dense[self.timestamps].to_padded() if self.num_time_buckets else None  # type: ignore[union-attr]
        seen_L1 = torch.arange(1.0, length + 1)[:, None]

        x_BLD = items_BLD * math.sqrt(self.dim) + self.position_embedding[:length]
        x_BLD = functional.dropout(x_BLD, self.input_dropout, self.training)
        for layer in self.layers:
            normed = functional.layer_norm(x_BLD, (self.dim,))
            gate, qkv = functional.silu(layer.gate(normed)), functional.silu(layer.qkv(normed))  # type: ignore[operator]
            attended = attend(
                *qkv.chunk(3, dim=-1), num_heads=layer.num_heads, position_bias=layer.position_bias,  # type: ignore[arg-type]
                times_BL=times, time_bias=layer.time_bias,  # type: ignore[arg-type]
            )  # fmt: skip
            gated = gate * functional.layer_norm(attended / seen_L1, (layer.inner,))  # type: ignore[arg-type]
            x_BLD = x_BLD + layer.out(functional.dropout(gated, layer.dropout, self.training))  # type: ignore[arg-type,operator]

        states = functional.normalize(x_BLD[:, :-1], dim=-1) / self.temperature
        true = (states * functional.normalize(items_BLD[:, 1:], dim=-1)).sum(-1, keepdim=True)
        logits = states @ functional.normalize(negatives_BKD, dim=-1).transpose(1, 2)
        logits = logits.masked_fill(keys_BL[:, 1:, None] == negative_keys_BK[:, None, :], -torch.inf)
        losses_BL = torch.cat([true, logits], -1).logsumexp(-1) - true[..., 0]
        counts = torch.arange(1, length) < lengths[:, None]
        return Output((losses_BL * counts).sum(1), (lengths - 1).clamp(min=0).float())

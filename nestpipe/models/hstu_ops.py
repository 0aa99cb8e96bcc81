"""What HSTU computes with besides torch: groups of samples padded together, and a few operations in few passes.

On a CPU these elementwise operations cost as much as the matrix products, because autograd keeps or allocates a large
tensor for every step of a formula. Each function here has its formula in the docstring; the tests compare with it.

Shape legend: B samples, T tokens of all histories, L longest history of a group, D row width, K negatives per sample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from nestpipe.batch import Jagged

# SiLU of this is exactly 0 and so is its slope: a mask that is added to the scores with the bias, in one pass.
MASKED = -1e4


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


def attend(qkv_BLE: Tensor, bias: Tensor, *, num_heads: int) -> Tensor:
    """[B, L, E]: SiLU(q k^T + bias) v for each head; `qkv_BLE` is q, k, v side by side, `bias` [L, L] or [B, L, L].

    Where the bias is `MASKED`, the weight of the key is exactly 0 and so is its gradient.
    """
    return _Attend.apply(qkv_BLE, bias, num_heads)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BLE: Tensor, bias: Tensor, num_heads: int) -> Tensor:
        scores, outs = [], []
        for q, k, v in _heads(qkv_BLE, num_heads):
            score_BLL = torch.baddbmm(bias, q, k.transpose(1, 2))
            outs.append(torch.bmm(silu(score_BLL), v))
            scores.append(score_BLL)
        ctx.save_for_backward(qkv_BLE, *scores)
        ctx.bias_is_shared = bias.ndim == 2
        return outs[0] if num_heads == 1 else torch.cat(outs, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BLE: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_BLE, *scores = ctx.saved_tensors
        grads_q, grads_k, grads_v, grads_bias = [], [], [], []
        grad_outs = grad_out_BLE.chunk(len(scores), dim=-1)
        for score_BLL, grad_out, (q, k, v) in zip(scores, grad_outs, _heads(qkv_BLE, len(scores)), strict=True):
            grads_v.append(torch.bmm(silu(score_BLL).transpose(1, 2), grad_out))
            grad_score_BLL = torch.ops.aten.silu_backward(torch.bmm(grad_out, v.transpose(1, 2)), score_BLL)
            grads_q.append(torch.bmm(grad_score_BLL, k))
            grads_k.append(torch.bmm(grad_score_BLL.transpose(1, 2), q))
            grads_bias.append(grad_score_BLL.sum(0) if ctx.bias_is_shared else grad_score_BLL)
        return torch.cat([*grads_q, *grads_k, *grads_v], dim=-1), functools.reduce(torch.add, grads_bias), None


def _heads(qkv_BLE: Tensor, num_heads: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of q, k and v, one head at a time: nothing is copied to bring a head's values together."""
    q, k, v = (part.chunk(num_heads, dim=-1) for part in qkv_BLE.chunk(3, dim=-1))
    return zip(q, k, v, strict=True)


def pick(table_N: Tensor, index: Tensor) -> Tensor:
    """table_N[index], for a short table and a large index: the gradient is one weighted count."""
    return _Pick.apply(table_N, index)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_N: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_entries = len(table_N)
        return table_N.take(index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        counted = torch.bincount(index.flatten(), weights=grad.double().flatten(), minlength=ctx.num_entries)
        return counted.to(grad.dtype), None


def sampled_softmax(states_BLD: Tensor, targets_BLD: Tensor, negatives_BKD: Tensor, hits_BLK: Tensor) -> Tensor:
    """[B, L]: -log(e^true / (e^true + sum of e^negative)), logits being dot products with the state.

    Negatives where `hits_BLK` do not count.
    """
    return _SampledSoftmax.apply(states_BLD, targets_BLD, negatives_BKD, hits_BLK)


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_BLD: Tensor, targets_BLD: Tensor, negatives_BKD: Tensor, hits_BLK: Tensor) -> Tensor:
        true_BL = torch.linalg.vecdot(states_BLD, targets_BLD)
        logits_BLK = torch.bmm(states_BLD, negatives_BKD.transpose(1, 2)).masked_fill_(hits_BLK, -torch.inf)
        top_BL = torch.maximum(logits_BLK.amax(-1), true_BL)
        exp_BLK = logits_BLK.sub_(top_BL.unsqueeze(-1)).exp_()
        exp_true_BL = (true_BL - top_BL).exp_()
        total_BL = exp_BLK.sum(-1).add_(exp_true_BL)
        ctx.save_for_backward(states_BLD, targets_BLD, negatives_BKD, exp_BLK, exp_true_BL, total_BL)
        return total_BL.log() + top_BL - true_BL

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BL: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        states_BLD, targets_BLD, negatives_BKD, exp_BLK, exp_true_BL, total_BL = ctx.saved_tensors
        # The softmax is exp / total; dividing the [B, L, D] sides of the products spares a pass over [B, L, K].
        share_BL1 = (grad_BL / total_BL).unsqueeze(-1)
        grad_true_BL1 = share_BL1 * exp_true_BL.unsqueeze(-1) - grad_BL.unsqueeze(-1)
        grad_states_BLD = torch.bmm(exp_BLK, negatives_BKD).mul_(share_BL1).addcmul_(targets_BLD, grad_true_BL1)
        grad_negatives_BKD = torch.bmm(exp_BLK.transpose(1, 2), states_BLD * share_BL1)
        return grad_states_BLD, states_BLD * grad_true_BL1, grad_negatives_BKD, None


def dropout(x: Tensor, *, p: float, training: bool) -> Tensor:
    """torch.nn.functional.dropout with p rounded to 1/65536: one 64-bit draw serves four values."""
    if not training or p == 0:
        return x
    cut = round(p * 65536)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    keep = (draws[: x.numel()] >= cut - 32768).view(x.shape)
    return x * (keep * (65536 / (65536 - cut)))


@dataclasses.dataclass(eq=False)
class Group:
    """Neighbouring samples of similar length, which are padded together to the longest of them."""

    lengths: Tensor
    length: int
    where: Tensor | None  # the place of each token in the padded tokens; None if nothing is padded

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def pad(self, tokens: Tensor) -> Tensor:
        """[t, ...] -> [B, L, ...], zeros behind each sample's tokens."""
        shape = (self.num_samples, self.length, *tokens.shape[1:])
        if self.where is None:
            return tokens.view(shape)
        padded = tokens.new_zeros(self.num_samples * self.length, *tokens.shape[1:])
        return padded.index_copy_(0, self.where, tokens).view(shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, L, ...] -> [t, ...]"""
        tokens = padded.flatten(0, 1)
        return tokens if self.where is None else tokens.index_select(0, self.where)


class Packing:
    """Sorts the samples of a batch by length, so that groups of similar length can be padded with little waste.

    Lengths up to 4, 5 to 8, 9 to 16, ... form one group each. A batch of one group is left as it is: nothing is copied.
    """

    def __init__(self, offsets: Tensor) -> None:
        lengths = offsets[1:] - offsets[:-1]
        size_class = torch.log2(lengths.clamp(min=4).double()).ceil().long()
        counts = [count for count in torch.bincount(size_class).tolist() if count] or [
            0
        ]  # an empty batch is one empty group
        self.offsets, self.lengths = offsets, lengths
        self.sample_order: Tensor | None = None
        if len(counts) > 1:
            self.sample_order = size_class.argsort(stable=True)
            self.token_order, self.offsets = Jagged(offsets, offsets).positions(self.sample_order)
            self.lengths = lengths[self.sample_order]
        self.samples_per_group = counts
        self.groups = [_group(part) for part in self.lengths.split(counts)]
        self.tokens_per_group = [int(group.lengths.sum()) for group in self.groups]

    def sort_tokens(self, values: Tensor) -> Tensor:
        return values if self.sample_order is None else values.index_select(0, self.token_order)

    def sort_samples(self, values: Tensor) -> Tensor:
        return values if self.sample_order is None else values.index_select(0, self.sample_order)

    def unsort_samples(self, values: Tensor) -> Tensor:
        return values if self.sample_order is None else values.index_select(0, self.sample_order.argsort())

    def split_tokens(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return _split(tokens, self.tokens_per_group)

    def split_samples(self, samples: Tensor) -> tuple[Tensor, ...]:
        return _split(samples, self.samples_per_group)

    def place_in_sample(self) -> Tensor:
        """For each token, its index within its history."""
        starts = torch.repeat_interleave(self.offsets[:-1], self.lengths)
        return torch.arange(len(starts)) - starts


def _group(lengths: Tensor) -> Group:
    longest = int(lengths.max()) if len(lengths) else 0
    if not len(lengths) or int(lengths.min()) == longest:
        return Group(lengths, longest, None)
    return Group(lengths, longest, (torch.arange(longest) < lengths[:, None]).flatten().nonzero().squeeze(1))


def _split(values: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    # The gradient of a split is a copy of everything; one part needs none.
    return (values,) if len(sizes) == 1 else values.split(sizes)

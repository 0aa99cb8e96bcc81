"""The loss of next-item models: the true item against negatives, which all positions of a sample share.

Shape legend: P positions of all samples, B samples, K negatives per sample, D row width, L positions of each of N samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.groups import groups_of
from nestpipe.ops.precision import in_float32


@in_float32
def sampled_softmax(
    states_PD: Tensor,
    targets_PD: Tensor,
    negatives_BKD: Tensor,
    target_keys_P: Tensor,
    negative_keys_BK: Tensor,
    offsets: Tensor,
) -> Tensor:
    """[P]: -log(e^true / (e^true + sum of e^negative)), logits being dot products with the state.

    `offsets` says which positions are a sample's; negatives whose key is the position's target do not count there.
    """
    return _SampledSoftmax.apply(states_PD, targets_PD, negatives_BKD, target_keys_P, negative_keys_BK, offsets)


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_PD: Tensor,
        targets_PD: Tensor,
        negatives_BKD: Tensor,
        target_keys_P: Tensor,
        negative_keys_BK: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        true_P = torch.linalg.vecdot(states_PD, targets_PD)
        # One entry more: where the padding of groups is written.
        top_P, total_P = (true_P.new_empty(len(true_P) + 1) for _ in range(2))
        ctx.groups, exps = groups_of(offsets, width=math.gcd(*negatives_BKD.shape[1:])), []
        for group in ctx.groups:
            states_NLD, true_NL, keys_NL = (group.take(x, 0, len(group)) for x in (states_PD, true_P, target_keys_P))
            hits_NLK = keys_NL.unsqueeze(-1) == negative_keys_BK[group.samples, None, :]
            negatives_NKD = negatives_BKD.index_select(0, group.samples)
            logits_NLK = torch.bmm(states_NLD, negatives_NKD.transpose(1, 2)).masked_fill_(hits_NLK, -torch.inf)
            top_NL = torch.maximum(logits_NLK.amax(-1), true_NL)
            exp_NLK = logits_NLK.sub_(top_NL.unsqueeze(-1)).exp_()
            exps.append(exp_NLK)
            group.put(top_P, 0, len(group), top_NL)
            group.put(total_P, 0, len(group), exp_NLK.sum(-1))
        top_P, total_P = top_P[:-1], total_P[:-1]
        exp_true_P = (true_P - top_P).exp_()
        total_P = total_P + exp_true_P
        ctx.save_for_backward(states_PD, targets_PD, negatives_BKD, exp_true_P, total_P, *exps)
        return total_P.log() + top_P - true_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        states_PD, targets_PD, negatives_BKD, exp_true_P, total_P, *exps = ctx.saved_tensors
        # The softmax is exp / total; dividing the [P, D] sides of the products spares a pass over [P, K].
        share_P = grad_P / total_P
        grad_true_P1 = (share_P * exp_true_P - grad_P).unsqueeze(-1)
        shared_PD = states_PD * share_P.unsqueeze(-1)
        grad_states_PD = states_PD.new_empty(len(states_PD) + 1, states_PD.shape[1])
        grad_negatives_BKD = torch.zeros_like(negatives_BKD)
        for group, exp_NLK in zip(ctx.groups, exps, strict=True):
            negatives_NKD = negatives_BKD.index_select(0, group.samples)
            group.put(grad_states_PD, 0, len(group), torch.bmm(exp_NLK, negatives_NKD))
            shared_NLD = group.take_or_zero(shared_PD, 0, len(group))
            grad_negatives_BKD.index_copy_(0, group.samples, torch.bmm(exp_NLK.transpose(1, 2), shared_NLD))
        grad_states_PD = grad_states_PD[:-1].mul_(share_P.unsqueeze(-1)).addcmul_(targets_PD, grad_true_P1)
        return grad_states_PD, states_PD * grad_true_P1, grad_negatives_BKD, None, None, None

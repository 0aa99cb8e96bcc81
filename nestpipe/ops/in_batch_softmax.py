"""The loss of two-tower models: each query against the items of all others, corrected for how often an item is met.

Shape legend: B queries, each with the item that it should find, D width; n queries of a segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SEGMENT = 1 << 20  # logits at a time: 4 MB


def in_batch_softmax(
    queries_BD: Tensor,
    items_BD: Tensor,
    keys_B: Tensor,
    log_q_B: Tensor | None = None,
    *,
    users_B: Tensor | None = None,
    segment: int = SEGMENT,
) -> Tensor:
    """[B]: -log of the softmax of query b over all items, at item b; logits are dot products less `log_q_B`.

    Popular items are met as negatives more often than others. Less the logarithm of an item's share of all draws, `log_q_B`, what
    is learned is the logit of a softmax over the whole catalogue (Bengio and Senecal 2008; Yi et al. 2019); a constant
    that is added to all of them changes nothing. Without it popular items are pushed down.

    keys_B: of the items. Entries with the key of a query's own item are that item, not negatives: they count on its side. (Only
    masked, as elsewhere, an item that is there c times would have 1/c of the weight that it has among negatives.)
    users_B: whose each query is, where some are of the same user: items that this user has chosen elsewhere are left out, neither
    positive nor negative.

    It mixes samples: a model that uses it says `mixes_samples = "micro-batch"` (or True). Logits are made a segment at a time and
    again in the backward: memory grows with B, not with its square.
    """
    shift_B = torch.zeros_like(queries_BD[:, 0]) if log_q_B is None else log_q_B.to(queries_BD)
    return _InBatchSoftmax.apply(queries_BD, items_BD, keys_B, shift_B, users_B, segment)


def log_frequencies(keys_B: Tensor) -> Tensor:
    """[B]: the logarithm of each key's share of them: `log_q_B` where nothing better is known. Each distinct item then counts
    once, however often it is there."""
    _, inverse_B, counts = keys_B.unique(return_inverse=True, return_counts=True)
    return (counts[inverse_B].double() / max(len(keys_B), 1)).log().float()


class _InBatchSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries_BD: Tensor,
        items_BD: Tensor,
        keys_B: Tensor,
        shift_B: Tensor,
        users_B: Tensor | None,
        segment: int,
    ) -> Tensor:
        ctx.together = max(1, segment // max(len(keys_B), 1))
        total_B, own_B = (queries_BD.new_empty(len(keys_B)) for _ in range(2))
        for first in range(0, len(keys_B), ctx.together):
            last = first + ctx.together
            logits_nB, own_nB = _logits(queries_BD, items_BD, keys_B, shift_B, users_B, first, last)
            total_B[first:last] = logits_nB.logsumexp(-1)
            own_B[first:last] = logits_nB.masked_fill_(~own_nB, -torch.inf).logsumexp(-1)
        ctx.save_for_backward(queries_BD, items_BD, keys_B, shift_B, users_B, total_B, own_B)
        return total_B - own_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        queries_BD, items_BD, keys_B, shift_B, users_B, total_B, own_B = ctx.saved_tensors
        grad_queries_BD, grad_items_BD = torch.zeros_like(queries_BD), torch.zeros_like(items_BD)
        for first in range(0, len(keys_B), ctx.together):
            last = first + ctx.together
            logits_nB, own_nB = _logits(queries_BD, items_BD, keys_B, shift_B, users_B, first, last)
            share_nB = (logits_nB - total_B[first:last, None]).exp_()
            share_nB -= logits_nB.masked_fill_(~own_nB, -torch.inf).sub_(own_B[first:last, None]).exp_()
            share_nB *= grad_B[first:last, None]
            grad_queries_BD[first:last].addmm_(share_nB, items_BD)
            grad_items_BD.addmm_(share_nB.T, queries_BD[first:last])
        return grad_queries_BD, grad_items_BD, None, None, None, None


def _logits(
    queries_BD: Tensor,
    items_BD: Tensor,
    keys_B: Tensor,
    shift_B: Tensor,
    users_B: Tensor | None,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Of queries first to last - 1 [n, B], and which of them are of their own item."""
    logits_nB, own_nB = (queries_BD[first:last] @ items_BD.T).sub_(shift_B), keys_B[first:last, None] == keys_B
    if users_B is not None:
        logits_nB.masked_fill_((users_B[first:last, None] == users_B) & ~own_nB, -torch.inf)
    return logits_nB, own_nB

"""The loss of two-tower models: each query against the items of all others, corrected for how often an item is met.

Shape legend: B queries, N items, among them that of each query, D width; n queries of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.precision import in_float32

SEGMENT = 1 << 20  # logits at a time: 4 MB


@in_float32
def in_batch_softmax(
    queries_BD: Tensor,
    items_ND: Tensor,
    keys_N: Tensor,
    log_q_N: Tensor | None = None,
    *,
    users_N: Tensor | None = None,
    first: int = 0,
    segment: int = SEGMENT,
) -> Tensor:
    """[B]: -log of the softmax of query b over all items, at item first + b; logits are dot products less `log_q_N`.

    Popular items are met as negatives more often than others. Less the logarithm of an item's share of all draws, `log_q_N`, what
    is learned is the logit of a softmax over the whole catalogue (Bengio and Senecal 2008; Yi et al. 2019); a constant
    that is added to all of them changes nothing. Without it popular items are pushed down.

    keys_N: of the items. Entries with the key of a query's own item are that item, not negatives: they count on its side. (Only
    masked, as elsewhere, an item that is there c times would have 1/c of the weight that it has among negatives.)
    users_N: who has chosen each item, where some are of the same user: items that a query's user has chosen elsewhere are left
    out, neither positive nor negative.
    first: where the items of these queries begin, if there are others before and behind: those of other workers, say.

    It mixes samples: a model that uses it says `mixes_samples = "micro-batch"`, True or, if items are those of all workers,
    "global". Logits are made a segment at a time and again in the backward: memory grows with N, not with its square.
    """
    if not 0 <= first <= len(items_ND) - len(queries_BD):
        raise ValueError(
            f"in_batch_softmax: {len(queries_BD)} queries whose items begin at {first} of {len(items_ND)}; each query needs its "
            f"item among them"
        )
    shift_N = items_ND.new_zeros(len(items_ND)) if log_q_N is None else log_q_N.to(items_ND)
    return _InBatchSoftmax.apply(queries_BD, items_ND, keys_N, shift_N, users_N, first, segment)


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
        items_ND: Tensor,
        keys_N: Tensor,
        shift_N: Tensor,
        users_N: Tensor | None,
        first: int,
        segment: int,
    ) -> Tensor:
        num = len(queries_BD)
        ctx.first, ctx.together = first, max(1, segment // max(len(keys_N), 1))
        total_B, own_B = (queries_BD.new_empty(num) for _ in range(2))
        for some in _segments(num, ctx.together):
            logits_nN, own_nN = _logits(queries_BD[some], items_ND, keys_N, shift_N, users_N, first + some.start)
            total_B[some] = logits_nN.logsumexp(-1)
            own_B[some] = logits_nN.masked_fill_(~own_nN, -torch.inf).logsumexp(-1)
        ctx.save_for_backward(queries_BD, items_ND, keys_N, shift_N, users_N, total_B, own_B)
        return total_B - own_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        queries_BD, items_ND, keys_N, shift_N, users_N, total_B, own_B = ctx.saved_tensors
        grad_queries_BD, grad_items_ND = torch.zeros_like(queries_BD), torch.zeros_like(items_ND)
        for some in _segments(len(queries_BD), ctx.together):
            logits_nN, own_nN = _logits(queries_BD[some], items_ND, keys_N, shift_N, users_N, ctx.first + some.start)
            share_nN = (logits_nN - total_B[some, None]).exp_()
            share_nN -= logits_nN.masked_fill_(~own_nN, -torch.inf).sub_(own_B[some, None]).exp_()
            share_nN *= grad_B[some, None]
            grad_queries_BD[some].addmm_(share_nN, items_ND)
            grad_items_ND.addmm_(share_nN.T, queries_BD[some])
        return grad_queries_BD, grad_items_ND, None, None, None, None, None


def _segments(num: int, together: int) -> Iterator[slice]:
    return (slice(begin, min(begin + together, num)) for begin in range(0, num, together))


def _logits(
    queries_nD: Tensor, items_ND: Tensor, keys_N: Tensor, shift_N: Tensor, users_N: Tensor | None, first: int
) -> tuple[Tensor, Tensor]:
    """Of some queries [n, N], whose items begin at `first`, and which of them are of their own item."""
    mine = slice(first, first + len(queries_nD))
    logits_nN, own_nN = (queries_nD @ items_ND.T).sub_(shift_N), keys_N[mine, None] == keys_N
    if users_N is not None:
        logits_nN.masked_fill_((users_N[mine, None] == users_N) & ~own_nN, -torch.inf)
    return logits_nN, own_nN

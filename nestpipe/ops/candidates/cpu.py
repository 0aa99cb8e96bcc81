"""Candidate attention on CPUs: matrix products on tiles of candidates and items, nothing of the size candidates x items.

What items weigh by their place and time is one vector for all candidates of a sample: it is added to a tile by the product
itself. Without queries, all candidates of a sample get the same from its items, which is computed once. What a candidate gets
from itself is a dot product, without a tile. The backward computes the scores again. Temporaries are a few times `TILE` floats,
or of the size of the inputs.

What the shape of a tile depends on is the number of candidates and of items of its sample, so that neighbours change no bit.

Shape legend: B samples, C candidates of all samples, S items of all histories, E = H heads x head width, K items of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu

from nestpipe.ops.attention.buckets import time_buckets
from nestpipe.ops.attention.tiles import aligned, even, heads_of, room_for, scores_of, unweigh, weigh

BLOCK = 128  # candidates of a tile
TILE = BLOCK * 1024  # floats: 512 KB, which is half of a core's second-level cache
VECTOR = 32  # floats that torch's loops take at a time, at most


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
    """See `candidate_attention`; float32 and float64."""
    bias_S = _bias(v_SE.dtype, history_offsets, position_bias, times_S, now_B, time_bias)
    to_itself = [bias[0] for bias in (position_bias, time_bias) if bias is not None]
    if q_CE is None or k_CE is None or k_SE is None:
        assert bias_S is not None
        from_items_BE = _weighted_sums(bias_S, v_SE, history_offsets)
        return from_items_BE.repeat_interleave(offsets.diff(), dim=0) + sum(to_itself) * v_CE
    from_items_CE = _FromItems.apply(q_CE, k_SE, v_SE, bias_S, _Call(offsets, history_offsets, num_heads, kind))
    scores_CH = (q_CE * k_CE).unflatten(1, (num_heads, -1)).sum(-1)
    for bias in to_itself:
        scores_CH = scores_CH + bias
    from_itself_CHD = _silu(scores_CH)[..., None] * v_CE.unflatten(1, (num_heads, -1))
    return from_items_CE + from_itself_CHD.flatten(1)


def _bias(
    dtype: torch.dtype,
    history_offsets: Tensor,
    position_bias: Tensor | None,
    times_S: Tensor | None,
    now_B: Tensor | None,
    time_bias: Tensor | None,
) -> Tensor | None:
    """[S]: of each item. Picked in float64, so that gradients are added up in it."""
    lengths = history_offsets.diff()
    parts = []
    if position_bias is not None:
        ends_S = history_offsets[1:].repeat_interleave(lengths)
        distance_S = ends_S - torch.arange(len(ends_S))
        parts.append(position_bias.double().index_select(0, distance_S))
    if time_bias is not None and times_S is not None and now_B is not None:
        found_S = time_buckets(now_B.repeat_interleave(lengths) - times_S, len(time_bias))
        parts.append(time_bias.double().index_select(0, found_S))
    return sum(parts[1:], parts[0]).to(dtype) if parts else None


def _silu(scores_CH: Tensor) -> Tensor:
    """SiLU with rows filled up to whole vectors: the last few values of a tensor go through another routine, which rounds
    otherwise, and which they are depends on the other samples."""
    num_heads = scores_CH.shape[1]
    return silu(pad(scores_CH, (0, -num_heads % VECTOR)))[:, :num_heads]


def _weighted_sums(bias_S: Tensor, v_SE: Tensor, history_offsets: Tensor) -> Tensor:
    """[B, E]: of each sample the sum of bias_j v_j."""
    bounds = history_offsets.tolist()
    v_SE = aligned(v_SE)
    # A copy of the weights begins with a cache line, wherever the sample's do: see `ops/groups.py`.
    sums = [bias_S[a:z].clone() @ v_SE[a:z] for a, z in zip(bounds[:-1], bounds[1:], strict=True)]
    return torch.stack(sums) if sums else v_SE[:0]


class _Call(NamedTuple):
    """What has no gradient."""

    offsets: Tensor
    history_offsets: Tensor
    num_heads: int
    kind: str


class _FromItems(torch.autograd.Function):
    """[C, E]: what candidates get from the items of their histories."""

    @staticmethod
    def forward(ctx: Any, q_CE: Tensor, k_SE: Tensor, v_SE: Tensor, bias_S: Tensor | None, call: _Call) -> Tensor:
        q_CE, k_SE, v_SE = (aligned(x) for x in (q_CE, k_SE, v_SE))
        ctx.save_for_backward(q_CE, k_SE, v_SE, bias_S)
        ctx.call = call
        num_candidates = int(call.offsets[-1])
        out_CE = room_for(v_SE, num_candidates, zeros=True)
        for mine, seen in _tiles(call):
            bias_K = None if bias_S is None else bias_S[seen]
            for q, k, v, out in heads_of(call.num_heads, q_CE[mine], k_SE[seen], v_SE[seen], out_CE[mine]):
                torch.addmm(out, weigh(scores_of(q, k, bias_K), call.kind, inplace=True), v, out=out)
        return out_CE[:num_candidates]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CE: Tensor) -> tuple[Tensor | None, ...]:
        q_CE, k_SE, v_SE, bias_S = ctx.saved_tensors
        call: _Call = ctx.call
        grad_CE = aligned(grad_CE)
        grad_q, grad_k, grad_v = (
            room_for(x, int(bounds[-1]), zeros=True)
            for x, bounds in ((q_CE, call.offsets), (k_SE, call.history_offsets), (v_SE, call.history_offsets))
        )
        grad_bias_S = None if bias_S is None else torch.zeros(len(bias_S), dtype=torch.float64)
        for mine, seen in _tiles(call):
            bias_K = None if bias_S is None else bias_S[seen]
            of_candidates, of_items = (q_CE, grad_CE, grad_q), (k_SE, v_SE, grad_k, grad_v)
            views = (*(x[mine] for x in of_candidates), *(x[seen] for x in of_items))
            for q, grad, grad_of_q, k, v, grad_of_k, grad_of_v in heads_of(call.num_heads, *views):
                weights, grad_scores = unweigh(scores_of(q, k, bias_K), torch.mm(grad, v.T), call.kind, 0)
                torch.addmm(grad_of_v, weights.T, grad, out=grad_of_v)
                torch.addmm(grad_of_q, grad_scores, k, out=grad_of_q)
                torch.addmm(grad_of_k, grad_scores.T, q, out=grad_of_k)
                if grad_bias_S is not None:
                    grad_bias_S[seen] += grad_scores.sum(0)
        return (
            *(x[:-1] for x in (grad_q, grad_k, grad_v)),
            None if grad_bias_S is None else grad_bias_S.to(v_SE.dtype),
            None,
        )


def _tiles(call: _Call) -> Iterator[tuple[slice, slice]]:
    """Candidates and items of each tile, sample by sample."""
    candidates, items = call.offsets.tolist(), call.history_offsets.tolist()
    for a, z, first, end in zip(candidates[:-1], candidates[1:], items[:-1], items[1:], strict=True):
        if a == z or first == end:
            continue
        block = even(z - a, BLOCK)
        width = even(end - first, TILE // BLOCK)
        for i in range(a, z, block):
            for j in range(first, end, width):
                yield slice(i, min(i + block, z)), slice(j, min(j + width, end))

"""Candidate attention on CPUs: matrix products on tiles of candidates and items, nothing of the size candidates x items.

Short samples of nearly equal shape go through one batched product (`ops/groups.py`); others are cut into tiles.
What items weigh by their place and time is one vector for all candidates of a sample: it is added to a tile by the product
itself. Without queries, all candidates of a sample get the same from its items, which is computed once. What a candidate gets
from itself is a dot product, without a tile. The backward computes the scores again. Temporaries are a few times `TILE` floats,
or of the size of the inputs.

What the shape of a product depends on is the number of candidates and of items of its sample, so that neighbours change no bit.

Shape legend: B samples, C candidates of all samples, S items of all histories, E = H heads x head width, K items of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu
from torch.utils.weak import WeakTensorKeyDictionary

from nestpipe.ops.attention.buckets import time_buckets
from nestpipe.ops.attention.tiles import (
    MASKED,
    aligned,
    even,
    heads_of,
    room_for,
    scores_of,
    side_by_side,
    unweigh,
    weigh,
)
from nestpipe.ops.groups import VECTOR, Group, group_of, rounded

SHORT = 128  # candidates and items of a sample that goes through batched products
BLOCK = 128  # candidates of a tile
TILE = BLOCK * 1024  # floats: 512 KB, which is half of a core's second-level cache


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
        # Groups need a bias in any case: it is their mask.
        masked_S = v_SE.new_zeros(len(v_SE)) if bias_S is None else bias_S
        ctx.save_for_backward(q_CE, k_SE, v_SE, bias_S, masked_S)
        ctx.groups, ctx.tiles = _shares(call, v_SE.shape[1] // call.num_heads)
        ctx.call = call
        num_candidates = int(call.offsets[-1])
        out_CE = room_for(v_SE, num_candidates, zeros=True)
        for of_candidates, of_items, first, last in ctx.groups:
            q, k, v = of_candidates.take(q_CE, first, last), *(of_items.take(x, first, last) for x in (k_SE, v_SE))
            bias = of_items.take_or_fill(masked_S, first, last, behind=MASKED)[:, None]
            outs = [
                torch.bmm(weigh(scores_of(q_h, k_h, bias), call.kind, inplace=True), v_h)
                for q_h, k_h, v_h in heads_of(call.num_heads, q, k, v)
            ]
            of_candidates.put(out_CE, first, last, side_by_side(outs))
        for mine, seen in ctx.tiles:
            bias_K = None if bias_S is None else bias_S[seen]
            for q_h, k_h, v_h, out_h in heads_of(call.num_heads, q_CE[mine], k_SE[seen], v_SE[seen], out_CE[mine]):
                weights = weigh(scores_of(q_h, k_h, bias_K), call.kind, inplace=True)
                torch.addmm(out_h, weights, v_h, out=out_h)
        return out_CE[:num_candidates]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CE: Tensor) -> tuple[Tensor | None, ...]:
        q_CE, k_SE, v_SE, bias_S, masked_S = ctx.saved_tensors
        call: _Call = ctx.call
        grad_CE = aligned(grad_CE)
        # Candidates without items, and items without candidates, have gradients that nobody writes.
        grad_q, grad_k, grad_v = (room_for(x, len(x), zeros=True) for x in (q_CE, k_SE, v_SE))
        grad_bias_S = torch.zeros(len(v_SE) + 1, dtype=torch.float64)
        for of_candidates, of_items, first, last in ctx.groups:
            q, k, v = of_candidates.take(q_CE, first, last), *(of_items.take(x, first, last) for x in (k_SE, v_SE))
            grad = of_candidates.take_or_zero(grad_CE, first, last)
            bias = of_items.take_or_fill(masked_S, first, last, behind=MASKED)[:, None]
            grads, grad_bias = [], torch.zeros(1)
            for q_h, k_h, v_h, grad_h in heads_of(call.num_heads, q, k, v, grad):
                of_weights = torch.bmm(grad_h, v_h.transpose(1, 2))
                weights, of_scores = unweigh(scores_of(q_h, k_h, bias), of_weights, call.kind, 0)
                turned = of_scores.transpose(1, 2)
                grads.append(
                    (torch.bmm(of_scores, k_h), torch.bmm(turned, q_h), torch.bmm(weights.transpose(1, 2), grad_h))
                )
                grad_bias = grad_bias + of_scores.sum(1)
            parts_q, parts_k, parts_v = zip(*grads, strict=True)
            of_candidates.put(grad_q, first, last, side_by_side(parts_q))
            of_items.put(grad_k, first, last, side_by_side(parts_k))
            of_items.put(grad_v, first, last, side_by_side(parts_v))
            of_items.put(grad_bias_S, first, last, grad_bias.double())
        for mine, seen in ctx.tiles:
            bias_K = None if bias_S is None else bias_S[seen]
            views = (*(x[mine] for x in (q_CE, grad_CE, grad_q)), *(x[seen] for x in (k_SE, v_SE, grad_k, grad_v)))
            for q_h, grad_h, grad_q_h, k_h, v_h, grad_k_h, grad_v_h in heads_of(call.num_heads, *views):
                weights, of_scores = unweigh(scores_of(q_h, k_h, bias_K), torch.mm(grad_h, v_h.T), call.kind, 0)
                torch.addmm(grad_v_h, weights.T, grad_h, out=grad_v_h)
                torch.addmm(grad_q_h, of_scores, k_h, out=grad_q_h)
                torch.addmm(grad_k_h, of_scores.T, q_h, out=grad_k_h)
                grad_bias_S[seen] += of_scores.sum(0)
        of_bias = None if bias_S is None else grad_bias_S[:-1].to(v_SE.dtype)
        return *(x[:-1] for x in (grad_q, grad_k, grad_v)), of_bias, None


# -- groups and tiles --------------------------------------------------------------------------------------------------

_GroupOfBoth = tuple[Group, Group, int, int]  # of candidates and of items, and which of their samples at a time


_Shares = tuple[list[_GroupOfBoth], list[tuple[slice, slice]]]
# All layers of a model ask for the shares of the same offsets: they are kept as long as those of the candidates live.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shares(call: _Call, width: int) -> _Shares:
    """Groups of short samples, and the tiles of the others."""
    both = call.offsets, call.history_offsets
    if any(offsets.is_inference() for offsets in both):
        return _make_shares(call, width)
    asked = [*(offsets._version for offsets in both), width % 4, SHORT, BLOCK, TILE]
    history_offsets, made_for, shares = _kept.get(call.offsets, (None, None, None))
    if history_offsets is not call.history_offsets or made_for != asked:
        shares = _make_shares(call, width)
        _kept[call.offsets] = (call.history_offsets, asked, shares)
    return shares


def _make_shares(call: _Call, width: int) -> _Shares:
    counts, lengths = (offsets.diff().tolist() for offsets in (call.offsets, call.history_offsets))
    members: dict[tuple[int, int], list[int]] = {}
    others = []
    for sample, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if 0 < count <= SHORT and 0 < length <= SHORT:
            # A multiple of 8: then scores of a sample, [count, length], fill whole vectors; `_silu` says why.
            shape = -(-rounded(count, width) // 8) * 8, rounded(length, width)
            members.setdefault(shape, []).append(sample)
        elif count and length:
            others.append(sample)
    groups = []
    for (count, length), samples in sorted(members.items()):
        both = group_of(call.offsets, samples, count), group_of(call.history_offsets, samples, length)
        step = max(1, TILE // (count * length))
        groups += [(*both, first, min(first + step, len(samples))) for first in range(0, len(samples), step)]
    return groups, list(_tiles(call, others))


def _tiles(call: _Call, samples: list[int]) -> Iterator[tuple[slice, slice]]:
    """Candidates and items of each tile, sample by sample."""
    candidates, items = call.offsets.tolist(), call.history_offsets.tolist()
    for b in samples:
        a, z, first, end = candidates[b], candidates[b + 1], items[b], items[b + 1]
        block, width = even(z - a, BLOCK), even(end - first, TILE // BLOCK)
        for i in range(a, z, block):
            for j in range(first, end, width):
                yield slice(i, min(i + block, z)), slice(j, min(j + width, end))

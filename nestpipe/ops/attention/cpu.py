"""Jagged attention on CPUs: matrix products on tiles of scores that stay in the cache, nothing of the size L x L.

A sample of up to `SHORT` tokens is one tile; samples of one rounded length go through one batched product (`ops/groups.py`).
A longer one is cut into blocks of queries, and each block's keys into tiles; products read and write the tokens where they
are. The backward computes the scores again; of samples of up to `KEPT` tokens it has kept them, and their tokens as taken. All
other temporaries together are a few times `TILE` floats, besides the biases by distance, which are spread out once so that the
bias of any tile is a view: a block's rows x the longest sample.

What the shape of a tile depends on is the length of its sample, so that neighbours change no bit of a sample's output and
gradients. The gradients of the two biases are sums over all samples of the call, in a fixed order and in float64.

Shape legend: T tokens of the queries, S of the keys, E = heads x D, N samples of a group, L their length, Q queries and K keys
of a tile, R distances of the position bias, M columns of it spread out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention import add_time_bias, sum_buckets, sum_diagonals
from nestpipe.ops.attention.buckets import bucket_cells
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
from nestpipe.ops.groups import Group, groups_of, rounded

SHORT = 128
KEPT = 64  # so many floats per token and head are as much as q, k and v of a head, and a step takes less time
BLOCK = 128
TILE = BLOCK * 1024  # floats: 512 KB, which is half of a core's second-level cache


def attention(
    q_TE: Tensor | None,
    k_SE: Tensor | None,
    v_SE: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    *,
    num_heads: int,
    kind: str,
    position_bias: Tensor | None,
    times_S: Tensor | None,
    time_bias: Tensor | None,
) -> Tensor:
    """See `jagged_attention`; float32 and float64."""
    if kind == "weights":
        num_heads = 1  # heads share the weights: one product serves them all
    call = _Call(offsets, key_offsets, num_heads, v_SE.shape[1] // num_heads, kind, times_S)
    return _Attention.apply(q_TE, k_SE, v_SE, position_bias, time_bias, call)


class _Call(NamedTuple):
    """What has no gradient."""

    offsets: Tensor
    key_offsets: Tensor
    num_heads: int
    width: int  # of a head
    kind: str
    times_S: Tensor | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TE: Tensor | None,
        k_SE: Tensor | None,
        v_SE: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        q_TE, k_SE = (None if x is None else aligned(x) for x in (q_TE, k_SE))
        v_SE = aligned(v_SE)
        ctx.save_for_backward(q_TE, k_SE, v_SE, position_bias, time_bias)
        ctx.call, ctx.kept = call, []
        num_tokens = int(call.offsets[-1])
        out_TE = room_for(v_SE, num_tokens)
        bias = _Bias(call, v_SE, position_bias, time_bias)
        for group, first, last in _short(call):
            bias_QK, _ = bias.of_group(group, first, last)
            q, k, v = (None if x is None else group.take(x, first, last) for x in (q_TE, k_SE, v_SE))
            outs, keep = [], any(ctx.needs_input_grad) and group.length <= KEPT
            if keep:
                ctx.kept.append((q, k, v))
            for q_h, k_h, v_h in heads_of(call.num_heads, q, k, v):
                scores = scores_of(q_h, k_h, bias_QK)
                if keep:
                    ctx.kept.append(scores)
                outs.append(torch.bmm(weigh(scores, call.kind, inplace=not keep), v_h))
            group.put(out_TE, first, last, side_by_side(outs))
        for tile in _long(call):
            tile_bias, _ = bias.of_tile(tile)
            views = tile.of_queries(q_TE), tile.of_keys(k_SE), tile.of_keys(v_SE), tile.of_queries(out_TE)
            for q_h, k_h, v_h, out_h in heads_of(call.num_heads, *views):
                weights_QK = weigh(scores_of(q_h, k_h, tile_bias), call.kind, inplace=True)
                torch.addmm(out_h, weights_QK, v_h, beta=0 if tile.first_key == 0 else 1, out=out_h)
        return out_TE[:num_tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        q_TE, k_SE, v_SE, position_bias, time_bias = ctx.saved_tensors
        call: _Call = ctx.call
        grad_TE, kept = aligned(grad_TE), iter(ctx.kept)
        # What is added to, or may be written by nobody (keys of samples without a query), begins with zeros.
        zeros = _any_long(call) or call.key_offsets is not call.offsets
        grad_q, grad_k, grad_v = (None if x is None else room_for(x, len(x), zeros=zeros) for x in (q_TE, k_SE, v_SE))
        bias = _Bias(call, v_SE, position_bias, time_bias, gradients=any(ctx.needs_input_grad[3:5]))
        for group, first, last in _short(call):
            bias_QK, found = bias.of_group(group, first, last)
            if group.length <= KEPT:
                q, k, v = next(kept)
            else:
                q, k, v = (None if x is None else group.take(x, first, last) for x in (q_TE, k_SE, v_SE))
            grad = group.take_or_zero(grad_TE, first, last)
            grads: list[tuple[Tensor | None, ...]] = []
            total = None
            for q_h, k_h, v_h, grad_h in heads_of(call.num_heads, q, k, v, grad):
                scores = next(kept) if group.length <= KEPT else scores_of(q_h, k_h, bias_QK)
                weights, grad_scores = unweigh(scores, torch.bmm(grad_h, v_h.transpose(1, 2)), call.kind, 0)
                grad_v_h = torch.bmm(weights.transpose(-1, -2), grad_h)
                if q_h is None:
                    grads.append((None, None, grad_v_h))
                else:
                    grad_q_h = torch.bmm(grad_scores, k_h)
                    grads.append((grad_q_h, torch.bmm(grad_scores.transpose(1, 2), q_h), grad_v_h))
                total = grad_scores if total is None else total.add_(grad_scores)
            for out, parts in zip((grad_q, grad_k, grad_v), zip(*grads, strict=True), strict=True):
                if out is not None:
                    group.put(out, first, last, side_by_side(parts))
            bias.add_gradient(total, found, 0)
        for tile in _long(call):
            tile_bias, found = bias.of_tile(tile)
            of_queries = (tile.of_queries(x) for x in (q_TE, grad_TE, grad_q))
            of_keys = (tile.of_keys(x) for x in (k_SE, v_SE, grad_k, grad_v))
            total = None
            for q_h, grad_h, grad_q_h, k_h, v_h, grad_k_h, grad_v_h in heads_of(call.num_heads, *of_queries, *of_keys):
                scores = scores_of(q_h, k_h, tile_bias)
                weights, grad_scores = unweigh(scores, torch.mm(grad_h, v_h.T), call.kind, tile.diagonal)
                torch.addmm(grad_v_h, weights.T, grad_h, out=grad_v_h)
                if q_h is not None:
                    torch.addmm(grad_q_h, grad_scores, k_h, out=grad_q_h)
                    torch.addmm(grad_k_h, grad_scores.T, q_h, out=grad_k_h)
                total = grad_scores if total is None else total.add_(grad_scores)
            bias.add_gradient(total, found, tile.diagonal)
        grads_x = (None if x is None else x[:-1] for x in (grad_q, grad_k, grad_v))
        return *grads_x, *bias.gradients(), None


# -- tiles -------------------------------------------------------------------------------------------------------------


def _short(call: _Call) -> Iterator[tuple[Group, int, int]]:
    """Groups, and as many of their samples at a time as fit a tile."""
    if call.key_offsets is not call.offsets:
        return  # queries that are a tail: each sample is cut into tiles of its own
    for group in groups_of(call.offsets, width=call.width, longest=SHORT):
        step = max(1, TILE // group.length**2)
        for first in range(0, len(group), step):
            yield group, first, min(first + step, len(group))


class _Tile(NamedTuple):
    queries: slice  # tokens
    keys: slice
    first_key: int  # place in the sample
    diagonal: int  # distance of the first query from the first key

    def of_queries(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.queries]

    def of_keys(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.keys]


def _long(call: _Call) -> Iterator[_Tile]:
    """The tiles of samples that are too long for a group, those of a block of queries from its first key on."""
    queries, keys = call.offsets.tolist(), call.key_offsets.tolist()
    tail = call.key_offsets is not call.offsets
    for a, b, c, e in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        num_queries, num_keys = b - a, e - c
        if num_queries == 0 or (num_queries <= SHORT and not tail):
            continue
        # Softmax needs all keys of a query at once: as many fewer queries.
        size = BLOCK if call.kind != "softmax" else max(1, min(BLOCK, TILE // num_keys))
        size = even(num_queries, size)
        for i in range(0, num_queries, size):
            j = min(i + size, num_queries)
            seen = num_keys - num_queries + j
            width = seen if call.kind == "softmax" else even(seen, TILE // BLOCK)
            for first_key in range(0, seen, width):
                last_key = min(first_key + width, seen)
                yield _Tile(
                    slice(a + i, a + j), slice(c + first_key, c + last_key), first_key, seen - (j - i) - first_key
                )


def _any_long(call: _Call) -> bool:
    """Whether there are tiles that add to the gradients; groups write them."""
    return next(_long(call), None) is not None


# -- biases ------------------------------------------------------------------------------------------------------------


class _Bias:
    """The biases of tiles, and the sums of their gradients."""

    def __init__(
        self,
        call: _Call,
        v_SE: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        *,
        gradients: bool = False,
    ) -> None:
        self.call, self.position_bias, self.time_bias, self.wanted = call, position_bias, time_bias, gradients
        self.dtype = v_SE.dtype
        lengths = call.key_offsets[1:] - call.key_offsets[:-1]
        self.longest = (
            rounded(int(lengths.max()), call.width) if len(lengths) else 0
        )  # rows of groups reach beyond the longest sample
        self.spread_QM = self._spread(v_SE)
        self.grad_position_R = torch.zeros(self.longest, dtype=torch.float64)
        self.grad_time = torch.zeros(0 if time_bias is None else len(time_bias), dtype=torch.float64)

    def _spread(self, v_SE: Tensor) -> Tensor:
        """[i, m] = the bias at distance i + longest - m: every tile is a range of its columns."""
        masked = v_SE.new_full((BLOCK,), 0.0 if self.call.kind == "weights" else MASKED)
        near = v_SE.new_zeros(self.longest)
        if self.position_bias is not None:
            given = self.position_bias[: self.longest]
            near[: len(given)] = given
        # From far to near; the rows of `spread` are this one, moved on by one each.
        line = torch.cat([masked, near, masked]).flip(0)
        # As many rows as a tile may have: of short tails before long prefixes that is much less than a block.
        queries = self.call.offsets[1:] - self.call.offsets[:-1]
        most = min(BLOCK, rounded(int(queries.max()), self.call.width)) if len(queries) else 0
        return line[BLOCK - most :].as_strided((most, self.longest + BLOCK), (1, 1)).flip(0)

    def _columns(self, diagonal: int, num_queries: int, num_keys: int) -> Tensor:
        first = self.longest - diagonal
        return self.spread_QM[:num_queries, first : first + num_keys]

    def of_group(self, group: Group, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """[L, L], or [N, L, L] if times count; and the buckets of the latter."""
        length = group.length
        bias_QK = self._columns(0, length, length)
        times_S = self.call.times_S
        if times_S is None or self.time_bias is None:
            return bias_QK.expand(last - first, length, length), None
        times_NL = group.take(times_S, first, last)
        return self._with_times(bias_QK, times_NL, times_NL, 0)

    def of_tile(self, tile: _Tile) -> tuple[Tensor | None, Tensor | None]:
        num_queries, num_keys = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        sees_all = tile.diagonal >= num_keys - 1
        times_S = self.call.times_S
        if times_S is None or self.time_bias is None:
            if self.position_bias is None and sees_all:
                return None, None
            return self._columns(tile.diagonal, num_queries, num_keys), None
        bias_QK = self._columns(tile.diagonal, num_queries, num_keys)
        first_key = tile.keys.start
        times_K = times_S[tile.keys]
        times_Q = times_S[first_key + tile.diagonal : first_key + tile.diagonal + num_queries]
        bias_1QK, found = self._with_times(bias_QK, times_Q[None], times_K[None], tile.diagonal)
        return bias_1QK[0], found

    def _with_times(self, bias_QK: Tensor, times_NQ: Tensor, times_NK: Tensor, diagonal: int) -> tuple[Tensor, Tensor]:
        assert self.time_bias is not None
        out_NQK = torch.empty(len(times_NQ), *bias_QK.shape, dtype=self.dtype)
        found_NQK = torch.empty(out_NQK.shape, dtype=torch.int16)
        cells = bucket_cells(len(self.time_bias))
        arrays = (x.detach().numpy() for x in (bias_QK, times_NQ, times_NK, self.time_bias))
        add_time_bias(*arrays, *cells, out_NQK.numpy(), found_NQK.numpy())
        return (out_NQK.tril_(diagonal) if self.call.kind == "weights" else out_NQK), found_NQK

    def add_gradient(self, grad: Tensor | None, found: Tensor | None, diagonal: int) -> None:
        if not self.wanted or grad is None:
            return
        grad_NQK = (grad if grad.ndim == 3 else grad[None]).numpy()
        if self.position_bias is not None:
            sum_diagonals(grad_NQK, diagonal, self.grad_position_R.numpy())
        if found is not None:
            sum_buckets(grad_NQK, found.numpy(), self.grad_time.numpy())

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        grad_position = grad_time = None
        if self.wanted and self.position_bias is not None:
            grad_position = torch.zeros_like(self.position_bias)
            grad_position[: self.longest] = self.grad_position_R.flip(0)[: len(grad_position)]
        if self.wanted and self.time_bias is not None:
            grad_time = self.grad_time.to(self.dtype)
        return grad_position, grad_time

"""What attentions on CPUs share: rows that begin with a cache line, heads as views, and the weights of a tile of scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe.ops.groups import LINE

# SiLU of this is exactly 0 and so is its slope, and so is its share in a softmax, whatever score it is added to: a mask that is
# added with the bias.
MASKED = -1e30


def even(length: int, most: int) -> int:
    """The size of pieces of at most `most`, the last of which is about as large as the others."""
    return -(-length // -(-length // most))


def aligned(x_TE: Tensor) -> Tensor:
    """Rows that begin with a cache line, whichever they are: see `ops/groups.py`. Copied only if they do not."""
    if x_TE.stride(1) == 1 and x_TE.stride(0) % LINE == 0 and x_TE.data_ptr() % (LINE * 4) == 0:
        return x_TE
    return room_for(x_TE, len(x_TE) - 1).copy_(x_TE)


def room_for(x: Tensor, num_rows: int, *, zeros: bool = False) -> Tensor:
    """One row more, where padding of groups is written. Rows begin with a cache line."""
    room = x.new_empty(num_rows + 1, -(-x.shape[1] // LINE) * LINE)[:, : x.shape[1]]
    return room.zero_() if zeros else room


def side_by_side(heads: Sequence[Tensor]) -> Tensor:
    return heads[0] if len(heads) == 1 else torch.cat(tuple(heads), dim=-1)


def heads_of(num_heads: int, *parts: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Views, one head at a time: nothing is copied to bring a head's values together."""
    columns = ([None] * num_heads if x is None else x.chunk(num_heads, dim=-1) for x in parts)
    return zip(*columns, strict=True)


def scores_of(q: Tensor | None, k: Tensor | None, bias: Tensor | None) -> Tensor:
    """q k^T + bias; the bias alone if there are no queries."""
    if q is None or k is None:
        assert bias is not None
        return bias
    if q.ndim == 2:
        return torch.mm(q, k.T) if bias is None else torch.addmm(bias, q, k.T)
    return torch.bmm(q, k.transpose(1, 2)) if bias is None else torch.baddbmm(bias, q, k.transpose(1, 2))


def weigh(scores: Tensor, kind: str, *, inplace: bool) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(scores, inplace=inplace)
    return scores.softmax(-1) if kind == "softmax" else scores


def unweigh(scores: Tensor, grad_weights: Tensor, kind: str, diagonal: int) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of the scores: 0 where a query does not see the key."""
    if kind == "silu":
        weights = torch.nn.functional.silu(scores)
        return weights, torch.ops.aten.silu_backward.grad_input(grad_weights, scores, grad_input=grad_weights)
    if kind == "softmax":
        weights = scores.softmax(-1)
        return weights, torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    return scores, grad_weights.tril_(diagonal)

"""Jagged attention on accelerators, in Triton. Tested in Triton's interpreter only: it has never run on an accelerator.

A program has one block of queries of one sample and head and walks over its keys (forward, gradients of q and of the biases),
or one block of keys and walks over the queries that see them (gradients of k and v). Scores are computed again in the
backward. Nothing is added atomically: a program writes partial sums of the biases' gradients to a row of its own, and rows are
added up in their order, `PARTIAL` floats at a time, so that memory does not grow with the square of a length.

The time between two items finds its bucket through the table that the CPU uses, so that both agree on every bound.

Shape legend: T tokens of the queries, S of the keys, H heads, E = heads x head width, P programs, R distances, G buckets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.attention.buckets import bucket_cells
from nestpipe.ops.attention.triton_kernels import backward_keys, backward_queries, forward

BLOCK = 64
PARTIAL = 1 << 24
KINDS = {"silu": 0, "softmax": 1, "weights": 2}


class _Call(NamedTuple):
    """What has no gradient."""

    offsets: Tensor
    key_offsets: Tensor
    num_heads: int
    kind: str
    times_S: Tensor | None


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
    """See `jagged_attention`; sums are float32."""
    call = _Call(offsets, key_offsets, num_heads, kind, times_S)
    return _Attention.apply(q_TE, k_SE, v_SE, position_bias, time_bias, call)


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
        q, k, v = (None if x is None else _rows_in_one_piece(x) for x in (q_TE, k_SE, v_SE))
        assert v is not None
        num_tokens = int(call.offsets[-1])
        out_TE = v.new_empty(num_tokens, v.shape[1])
        lse_HT = v.new_empty(call.num_heads, num_tokens, dtype=torch.float32)
        launch = _Launch(call, q, k, v, position_bias, time_bias)
        samples, starts = _blocks(call.offsets)
        if len(samples):
            grid = (len(samples), call.num_heads)
            forward[grid](
                launch.q,
                launch.k,
                v,
                out_TE,
                lse_HT,
                *launch.biases,
                samples,
                starts,
                *launch.shape,
                **launch.constants,
            )
        ctx.save_for_backward(q, k, v, position_bias, time_bias, out_TE, lse_HT)
        ctx.call = call
        return out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias, out_TE, lse_HT = ctx.saved_tensors
        call: _Call = ctx.call
        grad_TE = grad_TE.contiguous()
        launch = _Launch(call, q, k, v, position_bias, time_bias)
        # Of a softmax: what the sum of all weights being 1 takes off the gradient.
        products = (grad_TE * out_TE).float().unflatten(1, (call.num_heads, -1))
        given = launch.q, launch.k, v, grad_TE, lse_HT, products.sum(-1).T.contiguous()
        grad_q, grad_k, grad_v = (
            None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
        )

        samples, starts = _blocks(call.key_offsets)
        if len(samples):
            backward_keys[(len(samples), call.num_heads)](
                *given, v if grad_k is None else grad_k, grad_v, *launch.biases, samples, starts, *launch.shape,
                **launch.constants,
            )  # fmt: skip
        samples, starts = _blocks(call.offsets)
        num_distances = 0 if position_bias is None else len(position_bias)
        num_buckets = 1 if time_bias is None else triton.next_power_of_2(len(time_bias))
        at_once = max(1, PARTIAL // (call.num_heads * (num_distances + num_buckets)))
        sum_position, sum_time = (v.new_zeros(n, dtype=torch.float64) for n in (num_distances, num_buckets))
        for first in range(0, len(samples), at_once):
            num_blocks = min(at_once, len(samples) - first)
            part_PR = v.new_zeros(num_blocks * call.num_heads, max(num_distances, 1), dtype=torch.float32)
            part_PG = v.new_zeros(num_blocks * call.num_heads, num_buckets, dtype=torch.float32)
            backward_queries[(num_blocks, call.num_heads)](
                *given, v if grad_q is None else grad_q, part_PR, part_PG, *launch.biases, samples, starts, *launch.shape,
                num_distances, first, G=num_buckets, **launch.constants,
            )  # fmt: skip
            if position_bias is not None:
                sum_position += part_PR.sum(0, dtype=torch.float64)
            sum_time += part_PG.sum(0, dtype=torch.float64)
        grad_position = None if position_bias is None else sum_position.to(position_bias.dtype)
        grad_time = None if time_bias is None else sum_time[: len(time_bias)].to(time_bias.dtype)
        return grad_q, grad_k, grad_v, grad_position, grad_time, None


class _Launch:
    """The arguments that all kernels take; where something is not there, a tensor that is not read stands for it."""

    def __init__(
        self,
        call: _Call,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
    ) -> None:
        self.q, self.k = v if q is None else q, v if k is None else k
        if time_bias is None or call.times_S is None:
            times = time_table = cells = bounds = v
        else:
            times, time_table = call.times_S.contiguous(), time_bias.contiguous()
            cells, bounds = (torch.from_numpy(table).to(v.device) for table in bucket_cells(len(time_bias)))
        position = v if position_bias is None else position_bias.contiguous()
        self.biases = position, times, time_table, cells, bounds
        strides = self.q.stride(0), self.k.stride(0), v.stride(0)
        self.shape = call.offsets, call.key_offsets, *strides, int(call.offsets[-1])
        width = v.shape[1] // call.num_heads
        self.constants = {
            "KIND": KINDS[call.kind],
            "HAS_POSITION": position_bias is not None,
            "HAS_TIME": time_bias is not None,
            "WIDTH": width,
            "D": max(16, triton.next_power_of_2(width)),
            "HEADS": call.num_heads,
            "B": BLOCK,
        }


def _rows_in_one_piece(x_TE: Tensor) -> Tensor:
    return x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()


def _blocks(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The sample of each block, and the place in it where the block begins."""
    lengths = offsets[1:] - offsets[:-1]
    counts = (lengths + BLOCK - 1) // BLOCK
    samples = torch.repeat_interleave(torch.arange(len(counts), device=offsets.device), counts)
    firsts = torch.cumsum(counts, 0) - counts
    starts = (torch.arange(len(samples), device=offsets.device) - firsts[samples]) * BLOCK
    return samples, starts

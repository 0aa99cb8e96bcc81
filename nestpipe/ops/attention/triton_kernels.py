"""The kernels of jagged attention for accelerators; `triton.py` says how they share the work.

KIND: 0 SiLU, 1 softmax, 2 the biases alone. `and` and `or` of blocks are written & and |: Triton's interpreter would take the
words for Python's own, silently.

Shape legend: M queries and N keys of a tile (both B), D the head width (WIDTH) rounded up to a power of two, G buckets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.kernels.attention import CELL_SHIFT

SHIFT = tl.constexpr(CELL_SHIFT)


@triton.jit
def _scores(
    q, k, row_M, col_N, num_keys, position, t_M, t_N, time_bias, cells, bounds, KIND: tl.constexpr, HAS_POSITION:
    tl.constexpr, HAS_TIME: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, which of them count, and their buckets of time."""
    distance = row_M[:, None] - col_N[None, :]
    seen = (distance >= 0) & (col_N[None, :] < num_keys) & (row_M[:, None] < num_keys)
    s = tl.zeros(distance.shape, tl.float32)
    bucket = tl.zeros(distance.shape, tl.int32)
    if KIND < 2:
        s += tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_POSITION:
        s += tl.load(position + distance, mask=seen, other=0.0).to(tl.float32)
    if HAS_TIME:
        seconds = tl.maximum((t_M[:, None] - t_N[None, :]).to(tl.float32), 1.0)
        cell = seconds.to(tl.int32, bitcast=True) >> SHIFT
        bucket = tl.load(cells + cell, mask=seen, other=0).to(tl.int32)
        bucket += (seconds >= tl.load(bounds + cell, mask=seen, other=float("inf"))).to(tl.int32)
        s += tl.load(time_bias + bucket, mask=seen, other=0.0).to(tl.float32)
    return s, seen, bucket


@triton.jit
def _weights(s, seen, lse_M, KIND: tl.constexpr):
    """Weights of a tile, and their slope by the score (of a softmax: what it is multiplied with)."""
    if KIND == 0:
        sigmoid = 1.0 / (1.0 + tl.exp(-s))
        w = s * sigmoid
        slope = sigmoid * (1.0 + s * (1.0 - sigmoid))
    elif KIND == 1:
        w = tl.exp(s - lse_M[:, None])
        slope = w
    else:
        w = s
        slope = tl.full(s.shape, 1.0, tl.float32)
    return tl.where(seen, w, 0.0), tl.where(seen, slope, 0.0)


@triton.jit
def _rows(x, stride, first, place, num, head, WIDTH: tl.constexpr, D: tl.constexpr):
    """Pointers to rows of one head, and which of them exist."""
    d = tl.arange(0, D)
    where = (first + place)[:, None].to(tl.int64) * stride + head * WIDTH + d[None, :]
    exists = ((place >= 0) & (place < num))[:, None] & (d < WIDTH)[None, :]
    return x + where, exists


@triton.jit
def forward(
    q, k, v, out, lse, position, times, time_bias, cells, bounds, samples, starts, offsets, key_offsets, q_stride,
    k_stride, v_stride, num_tokens, KIND: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, WIDTH:
    tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    sample = tl.load(samples + block)
    start = tl.load(starts + block)
    first_q, first_k = tl.load(offsets + sample), tl.load(key_offsets + sample)
    num_q = tl.load(offsets + sample + 1) - first_q
    num_k = tl.load(key_offsets + sample + 1) - first_k
    shift = num_k - num_q
    m = start + tl.arange(0, B)
    row_M = shift + m
    q_M = tl.zeros((B, D), tl.float32)
    t_M = tl.zeros((B,), tl.float32)
    if KIND < 2:
        at, exists = _rows(q, q_stride, first_q, m, num_q, head, WIDTH, D)
        q_M = tl.load(at, mask=exists, other=0.0)
    if HAS_TIME:
        t_M = tl.load(times + first_k + row_M, mask=m < num_q, other=0)
    acc = tl.zeros((B, D), tl.float32)
    top = tl.full((B,), -1e30, tl.float32)
    total = tl.zeros((B,), tl.float32)
    last = tl.minimum(num_k, shift + start + B)
    for begin in range(0, last, B):
        n = begin + tl.arange(0, B)
        k_N = tl.zeros((B, D), tl.float32)
        t_N = tl.zeros((B,), tl.float32)
        if KIND < 2:
            at, exists = _rows(k, k_stride, first_k, n, num_k, head, WIDTH, D)
            k_N = tl.load(at, mask=exists, other=0.0)
        if HAS_TIME:
            t_N = tl.load(times + first_k + n, mask=n < num_k, other=0)
        at, exists = _rows(v, v_stride, first_k, n, num_k, head, WIDTH, D)
        v_N = tl.load(at, mask=exists, other=0.0)
        s, seen, _bucket = _scores(
            q_M, k_N, row_M, n, num_k, position, t_M, t_N, time_bias, cells, bounds, KIND, HAS_POSITION, HAS_TIME,
        )  # fmt: skip
        if KIND == 1:  # the largest score so far is taken off, and what was added up before is brought down to it
            higher = tl.maximum(top, tl.max(tl.where(seen, s, -1e30), 1))
            scale = tl.exp(top - higher)
            w = tl.where(seen, tl.exp(s - higher[:, None]), 0.0)
            acc = acc * scale[:, None]
            total = total * scale + tl.sum(w, 1)
            top = higher
        else:
            w, _slope = _weights(s, seen, total, KIND)
        acc += tl.dot(w.to(v_N.dtype), v_N, input_precision="ieee")
    if KIND == 1:
        safe = tl.where(total > 0, total, 1.0)
        acc = acc / safe[:, None]
        tl.store(lse + head * num_tokens + first_q + m, top + tl.log(safe), mask=m < num_q)
    at, exists = _rows(out, HEADS * WIDTH, first_q, m, num_q, head, WIDTH, D)
    tl.store(at, acc.to(out.dtype.element_ty), mask=exists)


@triton.jit
def backward_queries(
    q, k, v, grad, lse, delta, grad_q, part_position, part_time, position, times, time_bias, cells, bounds,
    samples, starts, offsets, key_offsets, q_stride, k_stride, v_stride, num_tokens, num_distances, first_block,
    KIND: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block, head = first_block + tl.program_id(0), tl.program_id(1)
    row_of_partials = tl.program_id(0) * HEADS + head
    sample = tl.load(samples + block)
    start = tl.load(starts + block)
    first_q, first_k = tl.load(offsets + sample), tl.load(key_offsets + sample)
    num_q = tl.load(offsets + sample + 1) - first_q
    num_k = tl.load(key_offsets + sample + 1) - first_k
    shift = num_k - num_q
    m = start + tl.arange(0, B)
    row_M = shift + m
    q_M = tl.zeros((B, D), tl.float32)
    t_M = tl.zeros((B,), tl.float32)
    lse_M = tl.zeros((B,), tl.float32)
    delta_M = tl.zeros((B,), tl.float32)
    if KIND < 2:
        at, exists = _rows(q, q_stride, first_q, m, num_q, head, WIDTH, D)
        q_M = tl.load(at, mask=exists, other=0.0)
    if KIND == 1:
        lse_M = tl.load(lse + head * num_tokens + first_q + m, mask=m < num_q, other=0.0)
        delta_M = tl.load(delta + head * num_tokens + first_q + m, mask=m < num_q, other=0.0)
    if HAS_TIME:
        t_M = tl.load(times + first_k + row_M, mask=m < num_q, other=0)
    at, exists = _rows(grad, HEADS * WIDTH, first_q, m, num_q, head, WIDTH, D)
    grad_M = tl.load(at, mask=exists, other=0.0)
    acc = tl.zeros((B, D), tl.float32)
    of_buckets = tl.zeros((G,), tl.float32)
    carried = tl.zeros((B,), tl.float32)
    lane = tl.arange(0, B)
    last = tl.minimum(num_k, shift + start + B)
    for begin in range(0, last, B):
        n = begin + tl.arange(0, B)
        k_N = tl.zeros((B, D), tl.float32)
        t_N = tl.zeros((B,), tl.float32)
        if KIND < 2:
            at, exists = _rows(k, k_stride, first_k, n, num_k, head, WIDTH, D)
            k_N = tl.load(at, mask=exists, other=0.0)
        if HAS_TIME:
            t_N = tl.load(times + first_k + n, mask=n < num_k, other=0)
        at, exists = _rows(v, v_stride, first_k, n, num_k, head, WIDTH, D)
        v_N = tl.load(at, mask=exists, other=0.0)
        s, seen, bucket = _scores(
            q_M, k_N, row_M, n, num_k, position, t_M, t_N, time_bias, cells, bounds, KIND, HAS_POSITION, HAS_TIME,
        )  # fmt: skip
        _w, slope = _weights(s, seen, lse_M, KIND)
        grad_s = slope * (tl.dot(grad_M, tl.trans(v_N), input_precision="ieee") - delta_M[:, None])
        if KIND < 2:
            acc += tl.dot(grad_s.to(k_N.dtype), k_N, input_precision="ieee")
        if HAS_POSITION:
            # Diagonal c of the tile, below its corner, and diagonal c - B, beyond it, meet the same distances as those of the
            # next tile: what is beyond is carried on, so that each distance is written once.
            turned = tl.gather(grad_s, (lane[:, None] - lane[None, :] + B) % B, 1)
            below = tl.sum(tl.where(lane[:, None] >= lane[None, :], turned, 0.0), 0)
            distance = shift + start - begin + lane
            inside = (distance >= 0) & (distance < num_distances)
            tl.store(
                part_position + row_of_partials.to(tl.int64) * num_distances + distance, below + carried, mask=inside
            )
            carried = tl.sum(tl.where(lane[:, None] < lane[None, :], turned, 0.0), 0)
        if HAS_TIME:
            # Tiles of items far apart lie in few buckets: only those are summed.
            high = tl.max(tl.max(tl.where(seen, bucket, 0), 1), 0)
            low = tl.min(tl.min(tl.where(seen, bucket, G), 1), 0)
            for one in range(low, high + 1):
                found = tl.sum(tl.sum(tl.where(bucket == one, grad_s, 0.0), 1), 0)
                of_buckets += tl.where(tl.arange(0, G) == one, found, 0.0)
    if HAS_POSITION:
        distance = shift + start - (last + B - 1) // B * B + lane
        inside = (distance >= 0) & (distance < num_distances)
        tl.store(part_position + row_of_partials.to(tl.int64) * num_distances + distance, carried, mask=inside)
    if HAS_TIME:
        tl.store(part_time + row_of_partials * G + tl.arange(0, G), of_buckets)
    if KIND < 2:
        at, exists = _rows(grad_q, HEADS * WIDTH, first_q, m, num_q, head, WIDTH, D)
        tl.store(at, acc.to(grad_q.dtype.element_ty), mask=exists)


@triton.jit
def backward_keys(
    q, k, v, grad, lse, delta, grad_k, grad_v, position, times, time_bias, cells, bounds, samples, starts,
    offsets, key_offsets, q_stride, k_stride, v_stride, num_tokens, KIND: tl.constexpr, HAS_POSITION:
    tl.constexpr, HAS_TIME: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, B:
    tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    sample = tl.load(samples + block)
    start = tl.load(starts + block)
    first_q, first_k = tl.load(offsets + sample), tl.load(key_offsets + sample)
    num_q = tl.load(offsets + sample + 1) - first_q
    num_k = tl.load(key_offsets + sample + 1) - first_k
    shift = num_k - num_q
    n = start + tl.arange(0, B)
    k_N = tl.zeros((B, D), tl.float32)
    t_N = tl.zeros((B,), tl.float32)
    if KIND < 2:
        at, exists = _rows(k, k_stride, first_k, n, num_k, head, WIDTH, D)
        k_N = tl.load(at, mask=exists, other=0.0)
    if HAS_TIME:
        t_N = tl.load(times + first_k + n, mask=n < num_k, other=0)
    at, exists = _rows(v, v_stride, first_k, n, num_k, head, WIDTH, D)
    v_N = tl.load(at, mask=exists, other=0.0)
    acc_k = tl.zeros((B, D), tl.float32)
    acc_v = tl.zeros((B, D), tl.float32)
    for begin in range(tl.maximum(start - shift, 0), num_q, B):  # earlier queries see none of these keys
        m = begin + tl.arange(0, B)
        row_M = shift + m
        q_M = tl.zeros((B, D), tl.float32)
        t_M = tl.zeros((B,), tl.float32)
        lse_M = tl.zeros((B,), tl.float32)
        delta_M = tl.zeros((B,), tl.float32)
        if KIND < 2:
            at, exists = _rows(q, q_stride, first_q, m, num_q, head, WIDTH, D)
            q_M = tl.load(at, mask=exists, other=0.0)
        if KIND == 1:
            lse_M = tl.load(lse + head * num_tokens + first_q + m, mask=m < num_q, other=0.0)
            delta_M = tl.load(delta + head * num_tokens + first_q + m, mask=m < num_q, other=0.0)
        if HAS_TIME:
            t_M = tl.load(times + first_k + row_M, mask=m < num_q, other=0)
        at, exists = _rows(grad, HEADS * WIDTH, first_q, m, num_q, head, WIDTH, D)
        grad_M = tl.load(at, mask=exists, other=0.0)
        s, seen, _bucket = _scores(
            q_M, k_N, row_M, n, num_k, position, t_M, t_N, time_bias, cells, bounds, KIND, HAS_POSITION, HAS_TIME,
        )  # fmt: skip
        w, slope = _weights(s, seen, lse_M, KIND)
        acc_v += tl.dot(tl.trans(w).to(grad_M.dtype), grad_M, input_precision="ieee")
        if KIND < 2:
            grad_s = slope * (tl.dot(grad_M, tl.trans(v_N), input_precision="ieee") - delta_M[:, None])
            acc_k += tl.dot(tl.trans(grad_s).to(q_M.dtype), q_M, input_precision="ieee")
    at, exists = _rows(grad_v, HEADS * WIDTH, first_k, n, num_k, head, WIDTH, D)
    tl.store(at, acc_v.to(grad_v.dtype.element_ty), mask=exists)
    if KIND < 2:
        at, exists = _rows(grad_k, HEADS * WIDTH, first_k, n, num_k, head, WIDTH, D)
        tl.store(at, acc_k.to(grad_k.dtype.element_ty), mask=exists)

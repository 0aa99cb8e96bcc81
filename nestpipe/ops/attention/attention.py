"""Which implementation of jagged attention runs, and what its arguments must be.

Shape legend: T tokens of the queries, S of the keys, E = heads x head width.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from nestpipe.ops.attention import cpu, reference
from nestpipe.ops.precision import in_float32

KINDS = ("silu", "softmax", "weights")
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")


@in_float32
def jagged_attention(
    q_TE: Tensor | None,
    k_SE: Tensor | None,
    v_SE: Tensor,
    offsets: Tensor,
    *,
    num_heads: int = 1,
    kind: str = "silu",
    position_bias: Tensor | None = None,
    times: Tensor | None = None,
    time_bias: Tensor | None = None,
    key_offsets: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """[T, E]: for every query i of every sample, the sum over its keys j <= i of weight(i, j) v_j, head by head.

    kind: the weight, of the score s = q_i . k_j + position_bias[i - j] + time_bias[bucket of times_i - times_j]:
        "silu": SiLU(s), as HSTU has it. Divide by the number of keys that a query sees yourself: it is one number per token.
        "softmax": softmax of s over the keys that the query sees. Scale q yourself.
        "weights": the biases alone, `q_TE` and `k_SE` being None: what FuXi's channels of position and time are.
    position_bias: one number per distance, at least as many as the longest sample has keys; shared by the heads.
    times, time_bias: seconds, one per key [S], and one number per logarithmic bucket of time (`time_buckets`); shared by heads.
    key_offsets: if the queries are only the tail of each sequence: the offsets of keys and values, `offsets` being those of the
        queries. The last query stands at the last key. (Keys and values of a prefix can be kept and used again.)
    impl: "reference", "cpu" or "triton"; "auto" takes "cpu" for float32 and float64 on CPUs, "triton" on accelerators where it
        is installed, and else the reference.

    Gradients flow to q, k, v and both biases; scores are computed again in the backward, so that memory grows with tokens only.
    A sample's output and its gradients of q, k and v are the same to the bit, whatever other samples are in the call. The
    gradients of the biases are sums over all of them, in a fixed order.
    """
    _check(q_TE, k_SE, v_SE, offsets, num_heads, kind, position_bias, times, time_bias, key_offsets, impl)
    if impl == "auto":
        impl = _choose(v_SE)
    attention = reference.attention
    if impl == "cpu":
        attention = cpu.attention
    elif impl == "triton":
        from nestpipe.ops.attention import triton  # not everywhere installed

        attention = triton.attention
    return attention(
        q_TE,
        k_SE,
        v_SE,
        offsets,
        offsets if key_offsets is None else key_offsets,
        num_heads=num_heads,
        kind=kind,
        position_bias=position_bias,
        times_S=times if time_bias is not None else None,
        time_bias=time_bias,
    )


def _choose(v_SE: Tensor) -> str:
    if v_SE.device.type == "cpu":
        return "cpu" if v_SE.dtype in (torch.float32, torch.float64) else "reference"
    has_triton = importlib.util.find_spec("triton") is not None
    return "triton" if has_triton and v_SE.dtype != torch.float64 else "reference"


def _check(
    q_TE: Tensor | None,
    k_SE: Tensor | None,
    v_SE: Tensor,
    offsets: Tensor,
    num_heads: int,
    kind: str,
    position_bias: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    key_offsets: Tensor | None,
    impl: str,
) -> None:
    name = "jagged_attention"
    if kind not in KINDS:
        raise ValueError(f"{name}: kind must be one of {KINDS}, got {kind!r}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{name}: impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if (kind == "weights") != (q_TE is None) or (q_TE is None) != (k_SE is None):
        raise ValueError(f"{name}: kind='weights' takes None for q and k, the other kinds need both")
    if kind == "weights" and position_bias is None and time_bias is None:
        raise ValueError(f"{name}: kind='weights' needs position_bias or time_bias: they are the weights")
    if v_SE.shape[1] % num_heads:
        raise ValueError(f"{name}: {v_SE.shape[1]} columns cannot be split into num_heads={num_heads}")
    if time_bias is not None and (times is None or times.shape != v_SE.shape[:1]):
        got = "none" if times is None else f"shape {tuple(times.shape)}"
        raise ValueError(f"{name}: time_bias needs times, one per key [{len(v_SE)}], got {got}")
    of_keys = offsets if key_offsets is None else key_offsets
    for what, tensor, bounds in (("q", q_TE, offsets), ("k", k_SE, of_keys), ("v", v_SE, of_keys)):
        if tensor is not None and (len(tensor) != int(bounds[-1]) or tensor.shape[1] != v_SE.shape[1]):
            raise ValueError(
                f"{name}: {what} must have one row of {v_SE.shape[1]} values for each of the {int(bounds[-1])} tokens, "
                f"got shape {tuple(tensor.shape)}"
            )
    if len(of_keys) != len(offsets):
        raise ValueError(f"{name}: offsets are of {len(offsets) - 1} samples, key_offsets of {len(of_keys) - 1}")
    lengths = of_keys.diff()
    if key_offsets is not None and bool((offsets.diff() > lengths).any()):
        raise ValueError(f"{name}: a sample has more queries than keys; queries are the tail of the keys")
    longest = int(lengths.max()) if len(lengths) else 0
    if position_bias is not None and len(position_bias) < longest:
        raise ValueError(
            f"{name}: position_bias has {len(position_bias)} distances, a sample has {longest} keys; give one for each"
        )

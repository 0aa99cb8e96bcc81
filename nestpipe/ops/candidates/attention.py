"""Which implementation of candidate attention runs, and what its arguments must be.

Shape legend: B samples, C candidates of all samples, S tokens of all histories, E = heads x head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.ops.candidates import cpu, reference
from nestpipe.ops.precision import in_float32

KINDS = ("silu", "weights")
IMPLEMENTATIONS = {"reference": reference.attention, "cpu": cpu.attention}


@in_float32
def candidate_attention(
    q_CE: Tensor | None,
    k_CE: Tensor | None,
    v_CE: Tensor,
    offsets: Tensor,
    *,
    history_k: Tensor | None,
    history_v: Tensor,
    history_offsets: Tensor,
    num_heads: int = 1,
    kind: str = "silu",
    position_bias: Tensor | None = None,
    times: Tensor | None = None,
    now: Tensor | None = None,
    time_bias: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """[C, E]: for every candidate c of every sample, the sum over the items j of its sample's history, and c itself, of
    weight(c, j) v_j, head by head.

    All candidates of a sample stand at one place, right behind its history of n items: item j is n - j away, and a candidate is
    0 away from itself. So their order means nothing, and scores of a candidate do not depend on which others there are.

    q_CE, k_CE, v_CE, offsets: of the candidates. history_k, history_v, history_offsets: of the items, [S, E].
    kind: the weight, of the score s = q_c . k_j + position_bias[n - j] + time_bias[bucket of now - times_j]:
        "silu": SiLU(s), as HSTU has it. Divide by n + 1 yourself.
        "weights": the biases alone, q and both k being None: FuXi's channels of position and time.
    position_bias: one number per distance, one more than the longest history has items; shared by the heads.
    times, now, time_bias: seconds of each item [S] and of each sample's candidates [B], and one number per logarithmic bucket of
        time (`time_buckets`); shared by heads.
    impl: "reference" or "cpu"; "auto" takes "cpu" for float32 and float64 on CPUs, else the reference. (There is no kernel for
        accelerators; a [heads, candidates, items] tensor of one sample at a time exists there.)

    Gradients flow to q, k, v of candidates and histories, and to both biases; scores are computed again in the backward, so that
    memory grows with tokens only. A sample's output is the same to the bit whatever other samples are in the call, and so are
    its gradients of q, k and v. A candidate's output depends on how many others its sample has only as far as the rounding of a
    matrix product depends on its number of rows.
    """
    of_history = history_k, history_v, history_offsets
    _check(q_CE, k_CE, v_CE, offsets, *of_history, num_heads, kind, position_bias, times, now, time_bias, impl)
    if impl == "auto":
        on_cpu = v_CE.device.type == "cpu" and v_CE.dtype in (torch.float32, torch.float64)
        impl = "cpu" if on_cpu else "reference"
    return IMPLEMENTATIONS[impl](
        q_CE,
        k_CE,
        v_CE,
        offsets,
        *of_history,
        num_heads=num_heads,
        kind=kind,
        position_bias=position_bias,
        times_S=times if time_bias is not None else None,
        now_B=now if time_bias is not None else None,
        time_bias=time_bias,
    )


def _check(
    q_CE: Tensor | None,
    k_CE: Tensor | None,
    v_CE: Tensor,
    offsets: Tensor,
    k_SE: Tensor | None,
    v_SE: Tensor,
    history_offsets: Tensor,
    num_heads: int,
    kind: str,
    position_bias: Tensor | None,
    times: Tensor | None,
    now: Tensor | None,
    time_bias: Tensor | None,
    impl: str,
) -> None:
    name = "candidate_attention"
    if kind not in KINDS:
        raise ValueError(f"{name}: kind must be one of {KINDS}, got {kind!r}")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"{name}: impl must be one of {('auto', *IMPLEMENTATIONS)}, got {impl!r}")
    if any((x is None) != (kind == "weights") for x in (q_CE, k_CE, k_SE)):
        raise ValueError(f"{name}: kind='weights' takes None for q, k and history_k, kind='silu' needs all three")
    if kind == "weights" and position_bias is None and time_bias is None:
        raise ValueError(f"{name}: kind='weights' needs position_bias or time_bias: they are the weights")
    if v_CE.shape[1] % num_heads:
        raise ValueError(f"{name}: {v_CE.shape[1]} columns cannot be split into num_heads={num_heads}")
    if len(offsets) != len(history_offsets):
        raise ValueError(
            f"{name}: offsets are of {len(offsets) - 1} samples, history_offsets of {len(history_offsets) - 1}"
        )
    width = v_CE.shape[1]
    for what, tensor, bounds in (
        ("q", q_CE, offsets),
        ("k", k_CE, offsets),
        ("v", v_CE, offsets),
        ("history_k", k_SE, history_offsets),
        ("history_v", v_SE, history_offsets),
    ):
        if tensor is not None and tensor.shape != (int(bounds[-1]), width):
            raise ValueError(
                f"{name}: {what} must have one row of {width} values for each of the {int(bounds[-1])} tokens, got shape "
                f"{tuple(tensor.shape)}"
            )
    if time_bias is not None:
        for what, given, count in (("times", times, len(v_SE)), ("now", now, len(offsets) - 1)):
            if given is None or given.shape != (count,):
                got = "none" if given is None else f"shape {tuple(given.shape)}"
                each = "one per item" if what == "times" else "one per sample"
                raise ValueError(f"{name}: time_bias needs {what}, {each} [{count}], got {got}")
    lengths = history_offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    if position_bias is not None and len(position_bias) <= longest:
        raise ValueError(
            f"{name}: position_bias has {len(position_bias)} distances, a history has {longest} items; give {longest + 1}: a "
            f"candidate is that far from the first item, and 0 from itself"
        )

"""Attention alone: the jagged operation, the padded formula, and groups of similar length padded together, forward and backward.

Tokens are as many at every length, so that what grows is the part that is quadratic. Lengths of a batch are drawn between a
quarter of the longest and the longest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.bench.alternate import alternate
from nestpipe.bench.memory import Growth
from nestpipe.bench.progress import tell
from nestpipe.bench.sequences.padded import grouped_attention, padded_attention
from nestpipe.ops import jagged_attention
from nestpipe.sections import Section, Table, shown

JAGGED, PADDED, GROUPED = "jagged", "padded", "grouped"
CONTESTANTS: dict[str, Callable[..., torch.Tensor]] = {
    PADDED: padded_attention,
    GROUPED: grouped_attention,
    JAGGED: jagged_attention,
}


@dataclasses.dataclass(frozen=True)
class Size:
    lengths: Sequence[int] = (50, 512, 2_048, 8_192)
    tokens: int = 16_384
    num_heads: int = 2
    head_dim: int = 64
    num_time_buckets: int = 64
    rounds: int = 3


QUICK = Size(lengths=(16, 64), tokens=512, head_dim=8, rounds=1)


def ragged(longest: int, tokens: int) -> torch.Tensor:
    """Offsets of samples up to the longest, the first of them that long, with so many tokens in all."""
    draw, lengths = np.random.default_rng(longest), [min(longest, tokens)]
    while sum(lengths) < tokens:
        lengths.append(min(int(draw.integers(longest // 4, longest + 1)), tokens - sum(lengths)))
    return torch.tensor([0, *np.cumsum(lengths).tolist()])


def measure(size: Size) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has it
    try:
        return [_measure(size, longest) for longest in size.lengths]
    finally:
        torch.set_num_threads(threads)


def _measure(size: Size, longest: int) -> dict[str, Any]:
    offsets, draw = ragged(longest, size.tokens), torch.Generator().manual_seed(longest)
    width = size.num_heads * size.head_dim
    qkv = [torch.randn(size.tokens, width, generator=draw).mul_(0.3).requires_grad_() for _ in range(3)]
    biases = [torch.randn(n, generator=draw).mul_(0.1).requires_grad_() for n in (longest, size.num_time_buckets)]
    times = torch.randint(1, 100, (size.tokens,), generator=draw).cumsum(0)
    up = torch.randn(size.tokens, width, generator=draw)
    arguments = {"num_heads": size.num_heads, "position_bias": biases[0], "times": times, "time_bias": biases[1]}

    def step(attention: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = attention(*qkv, offsets, **arguments)
        return [out.detach(), *torch.autograd.grad(out, [*qkv, *biases], up)]

    contestants = {name: functools.partial(step, attention) for name, attention in CONTESTANTS.items()}
    peaks, results = {}, {}
    for name, contestant in contestants.items():
        tell(f"sequences: attention at {longest}, {name}")
        if longest == size.lengths[0]:
            contestant()  # compiles, and allocates what is kept for good
        growth = Growth()
        results[name] = contestant()
        peaks[name] = growth.peak()
    differs = {
        name: max(_differs(*pair) for pair in zip(own, results[PADDED], strict=True)) for name, own in results.items()
    }
    results.clear()
    timings = alternate(
        contestants,
        rounds=size.rounds,
        steps=5 if longest <= 256 else 1,
        warmup=0,
        lead_in=int(longest <= 256),
        reference=PADDED,
    )
    return {
        "longest": longest,
        "samples": len(offsets) - 1,
        "ms": {name: timing.median_ms for name, timing in timings.items()},
        "rounds_ms": {name: timing.rounds_ms for name, timing in timings.items()},
        "peak": peaks,
        "differs": differs,
    }


def _differs(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def sections(size: Mapping[str, Any], lengths: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    rows = []
    for run in lengths:
        faster = {
            name: float(np.median(np.divide(run["rounds_ms"][name], run["rounds_ms"][JAGGED]))) for name in run["ms"]
        }
        rows.append(
            (
                shown("{:,}", run["longest"]),
                shown("{:,}", run["samples"]),
                *(shown("{:.0f}", run["ms"][name]) for name in (PADDED, GROUPED, JAGGED)),
                *(shown("{:.2f}x", faster[name]) for name in (PADDED, GROUPED)),
                *(shown("{:.0f}", run["peak"][name] / 1e6) for name in (PADDED, GROUPED, JAGGED)),
                shown("{:.2f}", run["peak"][JAGGED] / max(1.0, run["peak"][PADDED])),
                shown("{:.1e}", run["differs"][JAGGED]),
            )
        )
    columns = (
        "longest", "samples", "padded ms", "grouped ms", "jagged ms", "faster than padded", "faster than grouped",
        "padded MB", "grouped MB", "jagged MB", "of padded", "difference",
    )  # fmt: skip
    note = (
        f"{size['tokens']:,} tokens, {size['num_heads']} heads of {size['head_dim']}, biases of position and of "
        f"{size['num_time_buckets']} buckets of time; forward and backward with all gradients, one thread; medians of "
        f"{size['rounds']} rounds, ratios within a round. MB: how far the resident set rose at its peak. Difference: the "
        f"largest, of the output or a gradient, against the padded formula, relative to the largest number in it."
    )
    yield Table("Attention: SiLU(q k^T + bias) v", columns, rows, note)

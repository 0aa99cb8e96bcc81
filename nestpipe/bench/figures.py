"""Figures of contestants, over ranks and rounds, and as the cells and bars that every suite shows. To those of their traces
(trace/figures.py) come:

bytes                   of keys, rows and their gradients that a worker sends per step, the mean over workers.
memory                  bytes by which a worker's resident set rose, at its peak, while the contestant was built and did its
                        first steps (see memory.py); the batches, which all contestants share, are not in it. It depends on
                        who is ahead of whom: the same contestant comes out up to a quarter higher or lower.

Times and memory are the largest over ranks. What is shown are medians over rounds; ratios are taken within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from nestpipe.sections import Bars, shown
from nestpipe.trace.figures import Figures

Rounds = Mapping[str, Sequence[Figures]]  # by contestant


def largest(mine: Figures) -> Figures:
    """The largest over ranks, figure by figure."""
    values = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(mine, values.tolist(), strict=True))


def verdict(rounds: Rounds) -> dict[str, Figures]:
    """Medians of each contestant's figures, and of its ratios to the serial run in the same round."""
    reference = rounds["serial"]
    results = {}
    for name, own in rounds.items():
        pairs = list(zip(own, reference, strict=True))
        results[name] = medians(own) | {
            "speedup": statistics.median(serial["step"] / block["step"] for block, serial in pairs),
            "exposed of serial": statistics.median(
                _share(block["exposed communication"], serial["communication"]) for block, serial in pairs
            ),
            "exposed of own": statistics.median(
                _share(block["exposed communication"], block["communication"]) for block in own
            ),
            "step over longest lane": statistics.median(block["step"] / block["longest lane"] for block in own),
            "step over compute lane": statistics.median(block["step"] / block["compute lane"] for block in own),
        }
    return results


def medians(rounds: Sequence[Figures]) -> Figures:
    """Over a contestant's rounds, figure by figure."""
    return {key: statistics.median(block[key] for block in rounds) for key in rounds[0]}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0  # a worker alone communicates with nobody


# -- as every suite shows them -----------------------------------------------------------------------------------------

COLUMNS = ("step ms ± IQR", "speed-up", "MB sent", "exposed lookup ms", "exposed communication ms", "peak MB")
EXPLAINED = (
    "Speed-up over the serial run of the same round; MB of keys, rows and gradients that a worker sends per step; peak MB by "
    "which a worker's memory rose for this contestant."
)


def cells(figures: Mapping[str, float]) -> tuple[str, ...]:
    """One contestant, for `COLUMNS`."""
    return (
        shown("{:.1f} ± {:.1f}", figures["step"], figures["iqr"]),
        shown("{:.2f}x", figures["speedup"]),
        shown("{:.2f}", figures["bytes"] / 1e6),
        shown("{:.1f}", figures["exposed lookup"]),
        shown("{:.1f}", figures["exposed communication"]),
        shown("{:.0f}", figures["memory"] / 1e6),
    )


def bars(title: str, contestants: Mapping[str, Mapping[str, float]], note: str = "") -> Bars:
    """Where each contestant's step goes; beside it the longest of its lanes, below which it cannot come."""
    parts: dict[str, list[float]] = {
        part: [figures[part] for figures in contestants.values()]
        for part in ("compute", "exposed lookup", "exposed communication")
    }
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["rest"] = [max(0.0, figures["step"] - sum_) for figures, sum_ in zip(contestants.values(), sums, strict=True)]
    bounds = {"longest lane": [figures["longest lane"] for figures in contestants.values()]}
    return Bars(title, "ms", list(contestants), parts, bounds, note)

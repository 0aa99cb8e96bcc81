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
    for name, many in rounds.items():
        both = list(zip(many, reference, strict=True))
        results[name] = {key: statistics.median(one[key] for one in many) for key in many[0]} | {
            "speedup": statistics.median(s["step"] / one["step"] for one, s in both),
            "exposed of serial": statistics.median(
                _share(one["exposed communication"], s["communication"]) for one, s in both
            ),
            "exposed of own": statistics.median(
                _share(one["exposed communication"], one["communication"]) for one in many
            ),
            "step over longest lane": statistics.median(one["step"] / one["longest lane"] for one in many),
            "step over compute lane": statistics.median(one["step"] / one["compute lane"] for one in many),
        }
    return results


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0  # a worker alone communicates with nobody


# -- as every suite shows them -----------------------------------------------------------------------------------------

COLUMNS = ("step ms ± IQR", "speed-up", "MB sent", "exposed lookup ms", "exposed communication ms", "peak MB")
EXPLAINED = (
    "Speed-up over the serial run of the same round; MB of keys, rows and gradients that a worker sends per step; peak MB by "
    "which a worker's memory rose for this contestant."
)


def cells(one: Mapping[str, float]) -> tuple[str, ...]:
    """One contestant, for `COLUMNS`."""
    return (
        shown("{:.1f} ± {:.1f}", one["step"], one["iqr"]),
        shown("{:.2f}x", one["speedup"]),
        shown("{:.2f}", one["bytes"] / 1e6),
        shown("{:.1f}", one["exposed lookup"]),
        shown("{:.1f}", one["exposed communication"]),
        shown("{:.0f}", one["memory"] / 1e6),
    )


def bars(title: str, contestants: Mapping[str, Mapping[str, float]], note: str = "") -> Bars:
    """Where each contestant's step goes; beside it the longest of its lanes, below which it cannot come."""
    parts: dict[str, list[float]] = {
        part: [one[part] for one in contestants.values()]
        for part in ("compute", "exposed lookup", "exposed communication")
    }
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["rest"] = [max(0.0, one["step"] - sum_) for one, sum_ in zip(contestants.values(), sums, strict=True)]
    bounds = {"longest lane": [one["longest lane"] for one in contestants.values()]}
    return Bars(title, "ms", list(contestants), parts, bounds, note)

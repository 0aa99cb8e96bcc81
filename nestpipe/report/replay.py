"""A recorded run as costs for the simulator: how long a step would be under another setting, or without its slow rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from nestpipe.report.shares import MAX_KEPT
from nestpipe.report.sources import Run
from nestpipe.schedule.ops import DENSE, OPERATIONS, Op
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.events import Cost, simulate
from nestpipe.trace import RankSummary, RankTrace
from nestpipe.trace.ranks import COLLECTIVES

FILL, STEPS = 8, 16  # simulated steps before those that count (the deepest pipeline is full after 5), and of those


@dataclasses.dataclass(frozen=True)
class Replay:
    """seconds[op]: of a whole batch, one value for each rank; of a collective the exchange alone, without waiting. What a batch
    takes is dealt evenly to the parts of a schedule: what each part costs on top is not in a recording of one setting."""

    seconds: dict[str, np.ndarray]

    def step(self, setting: Setting) -> float:
        """Milliseconds."""
        schedule = setting.make([name for name in self.seconds if name in OPERATIONS and OPERATIONS[name].optional])
        nothing = np.zeros(len(next(iter(self.seconds.values()))))

        def cost(op: Op) -> Cost:
            took = self.seconds.get(op.name, nothing) / schedule.num_parts(op.name)
            return Cost(together=float(took.mean())) if op.name in COLLECTIVES else Cost(took)

        run = simulate(schedule, cost, steps=FILL + STEPS + FILL, counts=np.ones(len(nothing), np.int64))
        begin, end = (run.times[Op(DENSE, batch)][1].max() for batch in (FILL, FILL + STEPS))
        return float(end - begin) / STEPS * 1e3

    def with_rank_like_others(self, rank: int) -> Replay:
        """As if the rank took what the median of the others takes."""
        evened = {name: took.copy() for name, took in self.seconds.items()}
        for took in evened.values():
            took[rank] = np.median(np.delete(took, rank))
        return Replay(evened)


@functools.lru_cache(MAX_KEPT)
def replay(run: Run) -> Replay:
    of_ranks = [_medians(*of_rank) for of_rank in zip(run.traces, run.ranks, run.waits, strict=True)]
    return Replay({name: np.array([took.get(name, 0.0) for took in of_ranks]) for name in _names(of_ranks)})


def _names(of_ranks: Sequence[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for took in of_ranks for name in took))


def _medians(trace: RankTrace, rank: RankSummary, waited: np.ndarray) -> dict[str, float]:
    """Seconds of each operation, of all its parts together: the median over batches, which a few held-up steps do not move."""
    columns = trace.columns
    counted = (columns.end > rank.window_ns[0]) & (columns.end <= rank.window_ns[1])
    took = (columns.end - columns.start - waited) / 1e9
    medians = {}
    for code, name in enumerate(columns.names):
        of_op = counted & (columns.op == code)
        if of_op.any():
            _, batch = np.unique(columns.batch[of_op], return_inverse=True)
            medians[name] = float(np.median(np.bincount(batch, took[of_op])))
    return medians

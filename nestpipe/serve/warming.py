"""First calls of all sizes, so that kernels are compiled and costs are known before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from nestpipe.serve.costs import Costs, Work, copy_work, prefix_work, ranking_work, together
from nestpipe.serve.messages import Ask
from nestpipe.serve.prefixes import part
from nestpipe.serve.scoring import Part, Scorer, to_device, to_host

CANDIDATES = 100
LONGEST = 4096  # items, where the model sets no limit
ENOUGH = 1.0  # seconds of one call: longer histories are not tried
T = TypeVar("T")


class Measured(NamedTuple):
    """kind: "ranking", "prefix" or "copy", as `Costs` has them."""

    kind: str
    work: Work
    seconds: float


def measure(scorer: Scorer) -> list[Measured]:
    """Full passes, prefixes, rankings behind them, and copies, of histories from short to the longest."""
    found: list[Measured] = []

    def timed(kind: str, work: Work, call: Callable[..., T], *arguments: object) -> T:
        began = time.perf_counter()
        result = call(*arguments)
        found.append(Measured(kind, work, time.perf_counter() - began))
        return result

    longest = scorer.max_length or LONGEST
    lengths = sorted({max(1, longest // part) for part in (1, 2, 4, 8, 16)})
    for length in [lengths[0], *lengths]:
        if length == lengths[0]:
            found.clear()  # the first time kernels are compiled
        ask = _made_up(scorer, length)
        full = ranking_work(0, length, CANDIDATES)
        timed("ranking", full, scorer.rank, [Part(ask)])
        head = length - min(length // 4, 16)
        prefix, made = None, 0
        for upto in (head // 2, head) if scorer.in_pieces and head > 1 else (head,):
            items = part(slice(made, upto), ask.history, ask.times)
            prefix = timed("prefix", prefix_work(upto - made, made), scorer.prefix, *items, prefix)
            made = upto
        assert prefix is not None
        behind = ranking_work(head, length - head, CANDIDATES)
        for count in (1, 4):
            timed("ranking", together([behind] * count), scorer.rank, [Part(ask, prefix)] * count)
        host = timed("copy", copy_work(prefix.num_bytes), to_host, prefix)
        timed("copy", copy_work(prefix.num_bytes), to_device, host, scorer.device)
        if max(measured.seconds for measured in found) > ENOUGH:
            break
    return found


def learn(costs: Costs, measured: list[Measured]) -> None:
    for kind, work, seconds in measured:
        {"ranking": costs.ranking, "prefix": costs.prefix, "copy": costs.copy}[kind].observe(work, seconds)


def _made_up(scorer: Scorer, length: int) -> Ask:
    times = np.arange(length) if scorer.uses_times else None
    return Ask("warm-up", np.arange(length), np.arange(CANDIDATES), times=times, now=float(length))

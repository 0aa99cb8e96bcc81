"""`make grid`: every schedule against the serial one over the whole grid. Takes long; pytest runs a part of it.

`python -m tests.behaviour.grid 7` takes every seventh place of the grid; `... 1 replicas` only those with replicas or hot rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time

from tests.behaviour.test_schedules import PLACES, SPLITS, serial, split_case, train
from tests.cluster import Cluster

SCHEDULES = ("dbp", "fwp", "nested")


Case = tuple[int, int, dict[str, int]]  # place, split, and what else


def replicated() -> list[Case]:
    """Replicas, exact and averaged: 2x2, 2x1, 4x1, 3x2, in memory and on disk; each with a quarter
    of the splits."""
    chosen = []
    for number, (replicas, shards, tier, averaged) in enumerate(
        (replicas, shards, tier, averaged)
        for replicas, shards in ((2, 2), (2, 1), (4, 1), (3, 2))
        for tier in ("memory", "disk")
        for averaged in (0, 1, 3)
    ):
        place = PLACES.index((tier, shards, 0.3))
        chosen += [(place, split, {"replicas": replicas, "averaged": averaged}) for split in _quarter(number)]
    return chosen


def hot() -> list[Case]:
    """Hot rows, with one replica and with two."""
    places = [i for i, (_, world, overlap) in enumerate(PLACES) if world in (2, 3) and overlap == 0.3]
    numbered = enumerate(itertools.product(places, (1, 2)))
    return [(p, split, {"replicas": r, "hot": 12}) for number, (p, r) in numbered for split in _quarter(number)]


def _quarter(number: int) -> range:
    return range(number % 4, len(SPLITS), 4)


def main() -> None:
    cluster, start, wrong = Cluster(), time.perf_counter(), 0
    every, only = int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:]
    plain: list[Case] = [(*both, {}) for both in itertools.product(range(len(PLACES)), range(len(SPLITS)))]
    cases = [*([] if only == ["replicas"] else plain), *replicated(), *hot()][::every]
    for number, (place, split, more) in enumerate(cases):
        for schedule in SCHEDULES:
            world, case = split_case(schedule, place, split, steps=8)
            world, case = world * more.get("replicas", 1), dataclasses.replace(case, **more)
            if set(cluster.run(world, train, case)) != {serial(cluster, world, case)}:
                wrong += 1
                print("DIFFERS", world, "workers", case, flush=True)
        if number % 30 == 29:
            seconds = time.perf_counter() - start
            print(f"{number + 1} of {len(cases)} x {len(SCHEDULES)}: {wrong} differ, {seconds:.0f} s", flush=True)
    cluster.close()
    raise SystemExit(f"{wrong} of {len(cases) * len(SCHEDULES)} runs differ" if wrong else 0)


if __name__ == "__main__":
    main()

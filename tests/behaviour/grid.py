"""`make grid`: every schedule against the serial one over the whole grid. Takes long; pytest runs a part of it.

`python -m tests.behaviour.grid 7` takes every seventh place of the grid; `... 1 replicas` only those with replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time

from tests.behaviour.test_schedules import PLACES, SPLITS, serial, split_case, train
from tests.cluster import Cluster

SCHEDULES = ("dbp", "fwp", "nested")


def replicated() -> list[tuple[int, int, int, int]]:
    """Place, split, replicas, steps between averages (0: exact): 2x2, 2x1, 4x1, 3x2, in memory and on disk; each with a quarter
    of the splits."""
    chosen = []
    for number, (replicas, shards, tier, averaged) in enumerate(
        (replicas, shards, tier, averaged)
        for replicas, shards in ((2, 2), (2, 1), (4, 1), (3, 2))
        for tier in ("memory", "disk")
        for averaged in (0, 1, 3)
    ):
        place = PLACES.index((tier, shards, 0.3))
        chosen += [(place, split, replicas, averaged) for split in range(number % 4, len(SPLITS), 4)]
    return chosen


def main() -> None:
    cluster, start, wrong = Cluster(), time.perf_counter(), 0
    every, only = int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:]
    plain = [(place, split, 1, 0) for place, split in itertools.product(range(len(PLACES)), range(len(SPLITS)))]
    cases = (replicated() if only == ["replicas"] else [*plain, *replicated()])[::every]
    for number, (place, split, replicas, averaged) in enumerate(cases):
        for schedule in SCHEDULES:
            world, case = split_case(schedule, place, split, steps=8)
            world, case = world * replicas, dataclasses.replace(case, replicas=replicas, averaged=averaged)
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

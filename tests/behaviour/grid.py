"""`make grid`: every schedule against the serial one over the whole grid. Takes long; pytest runs a part of it.

`python -m tests.behaviour.grid 7` takes every seventh place of the grid.
"""

from __future__ import annotations

import itertools
import sys
import time

from tests.behaviour.test_schedules import PLACES, SPLITS, serial, split_case, train
from tests.cluster import Cluster

SCHEDULES = ("dbp", "fwp", "nested")


def main() -> None:
    cluster, start, wrong = Cluster(), time.perf_counter(), 0
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    cases = list(itertools.product(range(len(PLACES)), range(len(SPLITS))))[::every]
    for number, (place, split) in enumerate(cases):
        for schedule in SCHEDULES:
            world, case = split_case(schedule, place, split, steps=8)
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

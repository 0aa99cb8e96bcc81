"""Where rates are measured: a bundle, a law of load, an SLO, and one server after another under it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.bundle import Ranker, item_keys, make_bundle
from nestpipe.bench.serving.checking import CLOSE, differences
from nestpipe.bench.serving.driver import Driven, Order, drive
from nestpipe.bench.serving.figures import Figures, figures
from nestpipe.bench.serving.service import Service, rise, serving
from nestpipe.serve import warming
from nestpipe.serve.bundle import Bundle, load_bundle
from nestpipe.serve.costs import Costs
from nestpipe.serve.load import Load
from nestpipe.serve.messages import Ask
from nestpipe.serve.scoring import Scorer

COUNTED = ("nestpipe_cache", "nestpipe_misses", "nestpipe_busy_seconds", "nestpipe_stale", "nestpipe_expired")


@dataclasses.dataclass(frozen=True)
class Way:
    """A contestant: what its server is told. Without affinity, signals and rankings go to any instance."""

    name: str
    relay: bool = True
    host: bool = True
    affinity: bool = True
    trigger: bool = True


FULL = Way("full pass", relay=False)
RELAY = Way("relay", host=False)
HOST = Way("relay + host")
ANYWHERE = Way("relay + host, no affinity", affinity=False)
UNTRIGGERED = Way("relay + host, no trigger", trigger=False)
WAYS = (FULL, RELAY, HOST, ANYWHERE)


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The same for all contestants.

    load: its rate is what is varied. slack: the SLO, over what a full pass of the longest history takes alone.
    device_memory, host_memory: of an instance, for prefixes.
    warm_up, seconds: of a point; it is longer where fewer than `requests` would come. A warm-up lasts as long as a session:
        those that had begun before it have ended, or are known, when it counts.
    keep: answers of a point that are checked.
    """

    ranker: Ranker = Ranker()
    load: Load = Load(
        users=4_000, popularity=0.6, session=8.0, pause=1.0, pause_spread=0.5, length=1_200.0, length_spread=0.7, longest=4_096,
        candidates=100, retrieval=0.06, preprocessing=0.04,
    )  # fmt: skip
    instances: int = 2
    slack: float = 1.3
    device_memory: str = "64MB"
    host_memory: str = "512MB"
    warm_up: float = 12.0
    seconds: float = 12.0
    requests: int = 250
    keep: int = 8


class Lab:
    """slo: seconds. costs: laws of this machine, as an instance learns them when it warms up. mean: seconds of a full
    pass over the lengths of the load. checked, wrong, worst: over all points measured so far."""

    def __init__(self, conditions: Conditions, folder: Path) -> None:
        self.conditions, self.folder = conditions, folder
        self.path = make_bundle(conditions.ranker, folder)
        self.items = folder / "items.npy"
        np.save(self.items, item_keys(self.bundle()))
        self.scorer = Scorer(self.bundle())
        self.checked = self.wrong = self.points = 0
        self.worst = 0.0
        self.costs = Costs.guess()
        warming.learn(self.costs, warming.measure(self.scorer))
        longest = self._full_pass(conditions.load.longest)
        self.slo = math.ceil(100 * conditions.slack * longest) / 100
        tell(
            f"serving: a full pass of {conditions.load.longest:,} items takes {1e3 * longest:.0f} ms; SLO "
            f"{1e3 * self.slo:.0f} ms"
        )

    def bundle(self) -> Bundle:
        return load_bundle(self.path)

    def flags(self, way: Way) -> list[str]:
        """For `nestpipe serve`."""
        conditions = self.conditions
        flags = ["--slo-ms", f"{1e3 * self.slo:.0f}", "--threads", "1", "--device-memory", conditions.device_memory]
        flags += ["--host-memory", conditions.host_memory if way.host else "0"]
        flags += ["--reuse"] if way.relay else []
        return flags + [
            f"--no-{technique}" for technique in ("relay", "affinity", "trigger") if not getattr(way, technique)
        ]

    @contextlib.contextmanager
    def serving(self, way: Way) -> Iterator[Service]:
        log = self.folder / "server.log"
        with serving(self.path, *self.flags(way), log=log, instances=self.conditions.instances) as service:
            yield service

    def order(self, service: Service, load: Load, *, signals: bool = True) -> Order:
        """Of the next point. Its users are of its own, so that it finds nothing in the caches that an earlier one has left."""
        conditions = self.conditions
        self.points += 1
        order = Order(
            service.url,
            str(self.items),
            load,
            seconds=max(conditions.seconds, conditions.requests / load.rate),
            warm_up=conditions.warm_up,
            signals=signals,
            keep=conditions.keep,
            patience=5 * self.slo + 1,
            name=f"point-{self.points}",
        )
        return dataclasses.replace(order, seed=typical_seed(order))

    def measure(self, service: Service, way: Way, load: Load) -> Figures:
        """One point: a rate, for a while."""
        order = self.order(service, load, signals=way.relay)
        before = service.counters()
        driven = drive(order)
        server = rise(before, service.counters(), COUNTED)
        found = self.judged(order, driven)
        found.server = server
        tell(
            f"serving: {way.name}, {load.rate:.1f}/s: {found.kept:.1%} in time, P99 {found.p99:.0f} ms, goodput "
            f"{found.goodput:.1f}/s, "
            f"{found.relayed:.0%} relayed, generator late by {found.lag:.1f} ms, {found.wrong} of {found.checked} wrong"
        )
        return found

    def judged(self, order: Order, driven: Driven) -> Figures:
        """Figures, with the answers compared that were kept."""
        found = figures(driven, seconds=order.seconds, slo=self.slo)
        off = differences(order, driven, self.scorer)
        found.checked, found.wrong = len(off), sum(difference > CLOSE for difference in off)
        found.worst = max(off, default=0.0)
        self.checked, self.wrong = self.checked + found.checked, self.wrong + found.wrong
        self.worst = max(self.worst, found.worst)
        return found

    def _full_pass(self, length: int, times: int = 15) -> float:
        """Seconds of one, alone."""
        keys = np.resize(np.load(self.items), length)
        ask = Ask("nobody", keys, keys[: self.conditions.load.candidates])
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            self.scorer.full_pass(ask)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def typical_seed(order: Order, tries: int = 16) -> int:
    """Sessions come in numbers that differ by a quarter in runs of seconds. Of several draws this is the one whose
    number of requests is nearest to the rate: the same for all contestants at one rate, which then get the same visits."""

    def off(seed: int) -> float:
        due = [visit.request for visit in dataclasses.replace(order, seed=seed).visits()]
        return abs(sum(time >= order.warm_up for time in due) - order.load.rate * order.seconds)

    return min(range(tries), key=off)


@contextlib.contextmanager
def lab(conditions: Conditions) -> Iterator[Lab]:
    """One thread, as an instance has: sums of several would come in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
            yield Lab(conditions, Path(folder))
    finally:
        torch.set_num_threads(threads)

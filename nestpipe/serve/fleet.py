"""A simulated fleet: the router, trigger, cache and policy that serve, against a cost model instead of machines.

Discrete events: signals and ranking requests come by the law of a load; what an instance decides to do takes what the cost model
says, give or take; instances learn their costs from that as they would in service. Instances can die and come back.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nestpipe.serve.costs import Costs, copy_work, together
from nestpipe.serve.load import Load, Visit, visits
from nestpipe.serve.policy import Instance
from nestpipe.serve.requests import RELAYED, Action, Piece, Rank, Reject, Request, Settings, Source
from nestpipe.serve.router import Routed, Router
from nestpipe.serve.states import Drop, Spill
from nestpipe.serve.states import Load as LoadCopy
from nestpipe.serve.trigger import Reason

WORK = (Piece, Rank, LoadCopy, Spill)


@dataclasses.dataclass(frozen=True)
class Fleet:
    """instances: how many. settings: of each. costs: what work takes in truth; noise: sigma of the log of what it takes.
    affinity: False: signals and rankings go to any instance. warm_up: share of the requests that come before figures are taken.
    The other techniques are switched off in `settings`: relay, trigger, host_bytes = 0.
    """

    instances: int = 8
    settings: Settings = Settings()
    costs: Costs = dataclasses.field(default_factory=lambda: Costs.guess(learns=False))
    noise: float = 0.1
    affinity: bool = True
    warm_up: float = 0.2


@dataclasses.dataclass(frozen=True)
class Death:
    """An instance is lost at a time, with all that it had; another of its name is there after `back` seconds."""

    time: float
    instance: int
    back: float = math.inf


@dataclasses.dataclass
class Report:
    """Figures of the requests behind the warm-up.

    seconds: from the first to the last. in_time: answered within the SLO. errors: lost with an instance.
    latencies: seconds, of the answered ones, sorted. sources: of the answers. reasons: what became of signals.
    Of the whole run: busy: share of the time that each instance computes. prefix_seconds: computing prefixes, all instances
    together; wasted_seconds: of that, for prefixes that no ranking has used. routed: by the router.
    """

    requests: int = 0
    seconds: float = 0.0
    in_time: int = 0
    rejected: int = 0
    errors: int = 0
    latencies: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    sources: collections.Counter[Source] = dataclasses.field(default_factory=collections.Counter)
    reasons: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    busy: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    prefix_seconds: float = 0.0
    wasted_seconds: float = 0.0
    routed: Routed = dataclasses.field(default_factory=Routed)

    @property
    def goodput(self) -> float:
        """Requests per second that were answered within the SLO."""
        return self.in_time / self.seconds if self.seconds else 0.0

    @property
    def kept(self) -> float:
        """Share of all requests that were answered within the SLO."""
        return self.in_time / self.requests if self.requests else math.nan

    @property
    def relayed(self) -> float:
        """Share of the answers that used a prefix."""
        answers = sum(self.sources.values())
        return sum(self.sources[source] for source in RELAYED) / answers if answers else math.nan

    def latency(self, quantile: float) -> float:
        """Of answers, in seconds."""
        return float(np.quantile(self.latencies, quantile)) if len(self.latencies) else math.nan


class _Node:
    """An instance in the fleet. life: how often it has died; what its earlier lives had under way is void."""

    def __init__(self, name: str, instance: Instance) -> None:
        self.name, self.instance = name, instance
        self.life, self.alive = 0, True
        self.wake_at = math.inf
        self.busy = self.prefixes = 0.0
        self.in_flight: set[int] = set()


def simulate(fleet: Fleet, load: Load, *, requests: int, seed: int = 0, deaths: Sequence[Death] = ()) -> Report:
    """Serves so many requests of the load."""
    for death in deaths:
        if not 0 <= death.instance < fleet.instances:
            raise ValueError(f"{death}: there are instances 0 to {fleet.instances - 1}")
    return _Simulation(fleet, seed).run(list(visits(load, requests=requests, seed=seed)), deaths)


class _Simulation:
    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.draw = fleet, random.Random(seed)
        self.names = [f"instance-{number}" for number in range(fleet.instances)]
        self.router = Router(self.names)
        self.nodes = {name: _Node(name, Instance(fleet.settings)) for name in self.names}
        self.retired: list[Instance] = []  # of nodes that died
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = itertools.count()
        self.report = Report()
        self.latencies: list[float] = []
        self.first = 0

    def run(self, load: list[Visit], deaths: Iterable[Death]) -> Report:
        self.first = int(self.fleet.warm_up * len(load))
        for death in deaths:
            self.at(death.time, self.die, death)
        coming = iter(load)
        visit = next(coming, None)
        now = 0.0
        while visit or self.events:
            if visit and (not self.events or visit.signal <= self.events[0][0]):
                now = visit.signal
                self.signal(now, visit)
                visit = next(coming, None)
            else:
                now, _, what, arguments = heapq.heappop(self.events)
                what(now, *arguments)
        return self.close(load, now)

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.number), what, arguments))

    # -- the cascade ---------------------------------------------------------------------------------------------------

    def signal(self, now: float, visit: Visit) -> None:
        self.at(visit.request, self.request, visit)
        if not self.fleet.settings.relay:
            return
        node = self.route(now, visit, self.router.signal)
        if node is not None:
            reason, actions = node.instance.signal(
                now, user=visit.user, history=visit.history, tokens=visit.known, candidates=visit.candidates
            )
            self.report.reasons[reason] += visit.number >= self.first
            self.act(now, node, actions)

    def request(self, now: float, visit: Visit) -> None:
        node = self.route(now, visit, self.router.ranking)
        if node is None:
            self.report.errors += visit.number >= self.first
            return
        self.router.begin(node.name)
        node.in_flight.add(visit.number)
        actions = node.instance.request(
            now,
            id=visit.number,
            user=visit.user,
            history=visit.history,
            tokens=visit.tokens,
            candidates=visit.candidates,
        )
        self.act(now, node, actions)

    def route(self, now: float, visit: Visit, by_affinity: Callable[[float, int], str]) -> _Node | None:
        """An instance that refuses the connection is dead: the router learns of it, and asks the next."""
        while self.router.members:
            members = list(self.router.members)
            name = by_affinity(now, visit.user) if self.fleet.affinity else self.draw.choice(members)
            if self.nodes[name].alive:
                return self.nodes[name]
            self.router.lost(name)
        return None

    # -- instances -----------------------------------------------------------------------------------------------------

    def act(self, now: float, node: _Node, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, WORK):
                seconds = self.takes(action)
                self.at(now + seconds, self.done, node, node.life, action, seconds)
                if isinstance(action, Piece):
                    node.prefixes += seconds
                if isinstance(action, Piece | Rank):
                    node.busy += seconds
            elif isinstance(action, Reject):
                self.report.rejected += self.leaves(node, action.request)
            else:
                assert isinstance(action, Drop), f"{action}: nothing fails here"
        wake_at = node.instance.next_wakeup()
        if wake_at < node.wake_at:
            node.wake_at = wake_at
            self.at(wake_at, self.wake, node, node.life)

    def takes(self, action: Piece | Rank | LoadCopy | Spill) -> float:
        costs = self.fleet.costs
        if isinstance(action, Piece):
            seconds = costs.prefix.seconds(action.work)
        elif isinstance(action, Rank):
            seconds = costs.ranking.seconds(together(request.work for request in action.requests))
        else:
            seconds = costs.copy.seconds(copy_work(action.size))
        return seconds * self.draw.lognormvariate(0.0, self.fleet.noise)

    def done(self, now: float, node: _Node, life: int, action: Piece | Rank | LoadCopy | Spill, seconds: float) -> None:
        if life != node.life:
            return
        if isinstance(action, Rank):
            for request in action.requests:
                if self.leaves(node, request):
                    latency = now - request.arrival + self.fleet.settings.overhead
                    self.latencies.append(latency)
                    self.report.in_time += latency <= self.fleet.settings.slo
                    self.report.sources[request.source] += 1
        self.act(now, node, node.instance.done(now, action, seconds=seconds))

    def wake(self, now: float, node: _Node, life: int) -> None:
        if life == node.life and now == node.wake_at:
            node.wake_at = math.inf
            self.act(now, node, node.instance.wake(now))

    def leaves(self, node: _Node, request: Request) -> bool:
        """Its answer goes out. Returns whether it counts."""
        node.in_flight.remove(request.id)
        self.router.done(node.name)
        return request.id >= self.first

    # -- the end -------------------------------------------------------------------------------------------------------

    def die(self, now: float, death: Death) -> None:
        node = self.nodes[self.names[death.instance]]
        if not node.alive:
            return
        self.report.errors += sum(number >= self.first for number in node.in_flight)
        self.retired.append(node.instance)
        node.in_flight.clear()
        node.life, node.alive, node.wake_at = node.life + 1, False, math.inf
        node.instance = Instance(self.fleet.settings)
        if death.back < math.inf:
            self.at(now + death.back, self.come_back, node)

    def come_back(self, now: float, node: _Node) -> None:
        node.alive = True
        self.router.join(node.name)

    def close(self, load: list[Visit], now: float) -> Report:
        report = self.report
        assert not any(node.in_flight for node in self.nodes.values()), "a request was never answered"
        report.requests = len(load) - self.first
        report.seconds = load[-1].request - load[self.first].request if report.requests else 0.0
        report.latencies = np.sort(np.array(self.latencies))
        report.busy = np.array([node.busy / now for node in self.nodes.values()]) if now else np.zeros(len(self.nodes))
        report.prefix_seconds = sum(node.prefixes for node in self.nodes.values())
        instances = [*self.retired, *(node.instance for node in self.nodes.values())]
        report.wasted_seconds = sum(instance.cache.wasted_seconds() for instance in instances)
        report.routed = self.router.routed
        assert report.requests == len(self.latencies) + report.rejected + report.errors
        return report

"""Metrics of a server in Prometheus' text format: what the front process has measured, and what each instance says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from nestpipe.serve.supervisor import Member

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
# Of Worker.stats: the metric of a name, its label if the name has a second part, and what it says. The others are counters of the
# cache, or not told.
FAMILIES = {
    "answers": ("source", "Rankings answered, by where the prefix came from or why it was a full pass"),
    "signals": ("decision", "Signals, by what became of them"),
    "misses": ("why", "Rankings and signals that found no prefix, by why"),
}
COUNTERS = {
    "stale": "Rankings that found a prefix of another history, and did the full pass",
    "rejected": "Rankings refused: the queue was full, or they were too late",
    "failed": "Rankings whose full pass failed",
    "expired": "Signals whose ranking did not come",
    "late": "Rankings that could not be in time any more when it was their turn",
    "updates": "Changes of version",
    "busy_seconds": "Seconds that the computing thread has worked",
    "wasted_seconds": "Of these, seconds for prefixes that are gone and that no ranking has used",
}
GAUGES = {
    "queue": "Rankings that are ready to run",
    "waiting": "Rankings that wait for a prefix under way",
    "in_flight": "Rankings without an answer",
    "prefixes": "Prefixes that are there or under way",
    "device_bytes": "Bytes of prefixes in device memory",
    "device_budget": "Bytes that they may have",
    "host_bytes": "Bytes of prefixes in host memory",
    "host_budget": "Bytes that they may have",
    "load": "Share of the instance's time that prefixes take",
    "gap_seconds": "Seconds from a signal to its ranking, running mean",
    "queue_seconds": "Seconds that a ranking waits for its turn, running mean",
    "step": "Steps of training behind the version that is served",
}


class Metrics:
    """What the front process measures itself."""

    def __init__(self) -> None:
        disable_created_metrics()  # a second line for each, of when it was made, which nobody reads
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "nestpipe_requests", "HTTP requests, by path and status", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "nestpipe_rank_seconds",
            "Seconds from the whole request to its answer, of rankings that were answered",
            ["instance"],
            buckets=BUCKETS,
            registry=self.registry,
        )

    def text(self, members: Iterable[Member]) -> bytes:
        of_instances = CollectorRegistry()
        of_instances.register(_Instances(list(members)))
        return generate_latest(self.registry) + generate_latest(of_instances)


class _Instances:
    def __init__(self, members: list[Member]) -> None:
        self.members = members

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("nestpipe_instance_up", "1: the instance is ready", labels=["instance"])
        deaths = CounterMetricFamily("nestpipe_instance_deaths", "Deaths of the instance", labels=["instance"])
        recovery = GaugeMetricFamily(
            "nestpipe_instance_recovery_seconds",
            "Seconds from the last death until it was ready again",
            labels=["instance"],
        )
        version = GaugeMetricFamily(
            "nestpipe_instance_version", "1 for the version that is served", labels=["instance", "version"]
        )
        for member in self.members:
            up.add_metric([member.name], float(member.state == "ready"))
            deaths.add_metric([member.name], member.deaths)
            recovery.add_metric([member.name], member.recovery)
            if member.stats:
                version.add_metric([member.name, member.stats["version"]], 1.0)
        yield from (up, deaths, recovery, version)
        for name, (label, text) in FAMILIES.items():
            family = CounterMetricFamily(f"nestpipe_{name}", text, labels=["instance", label])
            for member in self.members:
                for stat, value in member.stats.items():
                    if stat.startswith(f"{name}."):
                        family.add_metric([member.name, stat.partition(".")[2]], value)
            yield family
        cache = {stat for member in self.members for stat in member.stats if stat.startswith("cache.")}
        for stat in sorted(cache):
            what = stat.partition(".")[2]
            yield self._family(CounterMetricFamily, f"nestpipe_cache_{what}", f"Of the cache of prefixes: {what}", stat)
        for stat, text in COUNTERS.items():
            yield self._family(CounterMetricFamily, f"nestpipe_{stat}", text, stat)
        for stat, text in GAUGES.items():
            yield self._family(GaugeMetricFamily, f"nestpipe_{stat}", text, stat)

    def _family(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, stat: str
    ) -> CounterMetricFamily | GaugeMetricFamily:
        family = kind(name, text, labels=["instance"])
        for member in self.members:
            if stat in member.stats:
                family.add_metric([member.name], member.stats[stat])
        return family

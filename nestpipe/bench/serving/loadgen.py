"""Our generator against MLPerf's (`mlcommons-loadgen`), Server scenario: the same server, rate and kind of requests,
other arrivals.

MLPerf's generator draws queries by a Poisson process from a set of samples and measures from when each was scheduled. It
knows no cascade (a signal, then its request) and no users who come back, so it cannot send the loads of the other parts;
here both send full passes of users who come once, and their latencies are compared.

Runs in a process of its own, as ours does: `python -m nestpipe.bench.serving.loadgen < Order > figures`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.driver import Order, drive, shots
from nestpipe.bench.serving.environment import environment
from nestpipe.bench.serving.http import Client, Lost
from nestpipe.bench.serving.lab import Lab
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Section, Table, shown
from nestpipe.serve.load import Load

MODULE = "mlperf_loadgen"
PERCENTILES = {"p50": "50.00", "p95": "95.00", "p99": "99.00"}


def measure(lab: Lab, service: Service, rate: float) -> dict[str, Any] | None:
    """On a server without relay. None where MLPerf's generator is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        tell("serving: mlcommons-loadgen is not installed, so it is not compared with (pip install 'nestpipe[bench]')")
        return None
    tell(f"serving: MLPerf's load generator at {rate:.1f} requests/s")
    load = dataclasses.replace(lab.conditions.load, rate=rate, session=1.0)
    order = lab.order(service, load, signals=False)
    ours = lab.judged(order, drive(order))
    theirs = theirs_of(lab.order(service, load, signals=False), lab.slo)
    return {"rate": rate, "slo": lab.slo, "ours": ours.to_json(), "mlperf": theirs}


def theirs_of(order: Order, slo: float) -> dict[str, Any]:
    """What MLPerf's generator measures when it sends the ranking requests of an order, in an order of its own."""
    told = json.dumps({"order": dataclasses.asdict(order), "slo": slo}).encode()
    longest = 120 + 4 * (order.warm_up + order.seconds)
    command = [sys.executable, "-m", "nestpipe.bench.serving.loadgen"]
    finished = subprocess.run(
        command, input=told, stdout=subprocess.PIPE, env=environment(), timeout=longest, check=False
    )
    if finished.returncode:
        raise RuntimeError("MLPerf's load generator failed; its own message stands above")
    return dict(json.loads(finished.stdout.splitlines()[-1]))


class _Bridge:
    """From the generator's threads to an event loop that sends, and back."""

    def __init__(self, order: Order) -> None:
        self.bodies = [shot.body for shot in shots(order)]
        self.lost = 0
        self.client = Client(order.url)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def issue(self, queries: list[Any]) -> None:
        for query in queries:
            asyncio.run_coroutine_threadsafe(self._send(query.id, query.index), self.loop)

    async def _send(self, number: int, index: int) -> None:
        import mlperf_loadgen

        try:
            status, _ = await self.client.post("/v1/rank", self.bodies[index])
        except Lost:
            status = 0
        self.lost += status != 200
        mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(number, 0, 0)])

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def _run(order: Order, slo: float) -> dict[str, Any]:
    import mlperf_loadgen as mlperf

    bridge = _Bridge(order)
    settings = mlperf.TestSettings()
    settings.scenario, settings.mode = mlperf.TestScenario.Server, mlperf.TestMode.PerformanceOnly
    settings.server_target_qps = order.load.rate
    settings.server_target_latency_ns, settings.server_target_latency_percentile = int(1e9 * slo), 0.99
    settings.min_duration_ms, settings.min_query_count = int(1e3 * order.seconds), 1
    settings.max_duration_ms = int(2e3 * order.seconds)
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
        output, logs = mlperf.LogOutputSettings(), mlperf.LogSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        logs.log_output, logs.enable_trace = output, False
        sut = mlperf.ConstructSUT(bridge.issue, lambda: None)
        library = mlperf.ConstructQSL(len(bridge.bodies), len(bridge.bodies), lambda _: None, lambda _: None)
        mlperf.StartTestWithLogSettings(sut, library, settings, logs)
        mlperf.DestroyQSL(library)
        mlperf.DestroySUT(sut)
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
    bridge.close()
    return {**read_summary(summary), "lost": bridge.lost}


def read_summary(text: str) -> dict[str, Any]:
    """Milliseconds, and the rate as it was scheduled."""
    found: dict[str, Any] = {}
    for name, percentile in PERCENTILES.items():
        match = re.search(rf"^{re.escape(percentile)} percentile latency \(ns\)\s*: (\d+)", text, re.MULTILINE)
        found[name] = int(match[1]) / 1e6 if match else None
    rate = re.search(r"^Scheduled samples per second\s*: ([\d.]+)", text, re.MULTILINE)
    return found | {"rate": float(rate[1]) if rate else None, "valid": "Result is : VALID" in text}


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: Mapping[str, Any] | None) -> list[Section]:
    if results is None:
        return []
    ours, theirs = results["ours"], results["mlperf"]
    rows = [
        ("nestpipe", shown("{:.1f}", ours["offered"]), *(shown("{:.0f}", ours[name]) for name in PERCENTILES)),
        (
            "mlcommons-loadgen, Server",
            shown("{:.1f}", theirs["rate"]) if theirs["rate"] is not None else "",
            *(shown("{:.0f}", theirs[name]) if theirs[name] is not None else "" for name in PERCENTILES),
        ),
    ]
    note = (
        "Full passes of users who come once, without signals: what both generators can send. Arrivals are Poisson in "
        "both, but not the "
        "same ones."
    )
    return [
        Table("Two load generators, one server", ("generator", "offered /s", "P50 ms", "P95 ms", "P99 ms"), rows, note)
    ]


def main() -> None:
    values = json.load(sys.stdin)
    order = Order(**{**values["order"], "load": Load(**values["order"]["load"])})
    print(json.dumps(_run(order, values["slo"])))


if __name__ == "__main__":
    main()

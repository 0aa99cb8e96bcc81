"""MLPerf's load generator, Server scenario, with the ranking requests of an order as its samples.

A process of its own, as ours is, and without torch: `python -m nestpipe.bench.serving.mlperf < {"order", "slo"} > figures`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from nestpipe.bench.serving.driver import Order, shots
from nestpipe.bench.serving.http import Client, Lost
from nestpipe.serve.load import Load

PERCENTILES = {"p50": "50.00", "p95": "95.00", "p99": "99.00"}


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


def main() -> None:
    values = json.load(sys.stdin)
    order = Order(**{**values["order"], "load": Load(**values["order"]["load"])})
    print(json.dumps(_run(order, values["slo"])))


if __name__ == "__main__":
    main()

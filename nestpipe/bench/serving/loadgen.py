"""Our generator against MLPerf's (`mlcommons-loadgen`), Server scenario: the same server, rate and kind of requests,
other arrivals.

MLPerf's generator draws queries by a Poisson process from a set of samples and measures from when each was scheduled. It
knows no cascade (a signal, then its request) and no users who come back, so it cannot send the loads of the other parts;
here both send full passes of users who come once, and their latencies are compared.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.driver import Order, drive
from nestpipe.bench.serving.environment import environment
from nestpipe.bench.serving.lab import Lab
from nestpipe.bench.serving.mlperf import PERCENTILES
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Section, Table, shown

MODULE = "mlperf_loadgen"


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
    command = [sys.executable, "-m", "nestpipe.bench.serving.mlperf"]
    finished = subprocess.run(
        command, input=told, stdout=subprocess.PIPE, env=environment(), timeout=longest, check=False
    )
    if finished.returncode:
        raise RuntimeError("MLPerf's load generator failed; its own message stands above")
    return dict(json.loads(finished.stdout.splitlines()[-1]))


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

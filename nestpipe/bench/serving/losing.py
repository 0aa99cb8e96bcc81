"""An instance killed under load: no wrong score, errors for what was under way there, and how long until all is as before."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.checking import CLOSE, differences
from nestpipe.bench.serving.driver import drive
from nestpipe.bench.serving.figures import figures
from nestpipe.bench.serving.lab import HOST, Lab
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Section, Table, shown

WITHIN = 60.0  # seconds for the instance to be back


def measure(lab: Lab, rate: float, *, before: float, after: float) -> dict[str, Any]:
    """before, after: seconds of load around the kill."""
    tell(f"serving: an instance is killed at {rate:.1f} requests/s")
    with lab.serving(HOST) as service:
        load = dataclasses.replace(lab.conditions.load, rate=rate)
        order = dataclasses.replace(lab.order(service, load), warm_up=0.0, seconds=before + after, keep=60)
        with ThreadPoolExecutor(1) as beside:
            back = beside.submit(_kill_one, service, before)
            driven = drive(order)
            recovered = back.result()
        found = figures(driven, seconds=order.seconds, slo=lab.slo)
        off = differences(order, driven, lab.scorer)
        found.checked, found.wrong, found.worst = len(off), sum(difference > CLOSE for difference in off), max(off)
        errors = [answer for answer in driven.answers if answer.status != 200]
    return {
        "slo": lab.slo,
        "rate": rate,
        "seconds_to_recover": recovered,
        "seconds_of_errors": max((a.due for a in errors), default=0.0) - min((a.due for a in errors), default=0.0),
        **found.to_json(),
    }


def _kill_one(service: Service, wait: float) -> float | None:
    """After so many seconds. Gives those until the server was ready with all instances again; None: it was not."""
    time.sleep(wait)
    victim = next(iter(service.instances()))
    os.kill(victim, signal.SIGKILL)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WITHIN:
        now = service.instances()
        if victim not in now and set(now.values()) == {"ready"}:
            return time.perf_counter() - begin
        time.sleep(0.05)
    return None


def sections(results: Mapping[str, Any]) -> list[Section]:
    back = results["seconds_to_recover"]
    row = (
        shown("{:.1f}", results["rate"]),
        shown("{:,}", results["requests"]),
        shown("{} of {}", results["wrong"], results["checked"]),
        shown("{}", results["errors"]),
        shown("{}", results["rejected"]),
        shown("{:.2f}", results["seconds_of_errors"]),
        shown("{:.1f}", back) if back is not None else f"not within {WITHIN:.0f}",
        shown("{:.1%}", results["kept"]),
    )
    problems = "; ".join(f"{count} x {text}" for text, count in results["problems"].items())
    columns = ("requests/s", "requests", "wrong scores", "errors", "turned away", "s from first to last error", "s until it was back",
               "in time")  # fmt: skip
    return [Table("An instance killed (SIGKILL) under load", columns, [row], f"Answers that were none: {problems or 'no'}.")]

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
from nestpipe.bench.serving.driver import drive
from nestpipe.bench.serving.lab import Lab
from nestpipe.bench.serving.service import Service
from nestpipe.sections import Section, Table, shown

WITHIN = 60.0  # seconds for the instance to be back


def measure(lab: Lab, service: Service, rate: float, *, before: float, after: float) -> dict[str, Any]:
    """before, after: seconds of load around the kill."""
    tell(f"serving: an instance is killed at {rate:.1f} requests/s")
    load = dataclasses.replace(lab.conditions.load, rate=rate)
    order = dataclasses.replace(lab.order(service, load), warm_up=0.0, seconds=before + after, keep=60)
    with ThreadPoolExecutor(1) as beside:
        back = beside.submit(_kill_one, service, before)
        driven = drive(order)
        recovered = back.result()
    found = lab.judged(order, driven)
    lost = [answer.due for answer in driven.answers if answer.status != 200]
    return {
        "rate": rate,
        "seconds_to_recover": recovered,
        "seconds_of_errors": max(lost) - min(lost) if lost else 0.0,
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
    columns = ("requests/s", "requests", "wrong scores", "errors", "turned away", "s from first to last error", "s until back",
               "in time")  # fmt: skip
    return [
        Table("An instance killed (SIGKILL) under load", columns, [row], f"Answers that were none: {problems or 'no'}.")
    ]

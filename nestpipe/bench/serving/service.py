"""A server on this machine, started and stopped by the measurement, with the command that users start it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nestpipe.bench.serving.environment import environment
from nestpipe.bench.serving.http import Client, Lost
from nestpipe.process import end_with

READY_WITHIN = 180.0  # seconds from its start
STOPS_WITHIN = 30.0


class Service:
    """A running server. url: where it listens. seconds_to_ready: from its start until it said so."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, seconds_to_ready: float) -> None:
        self.process, self.url, self.seconds_to_ready = process, url, seconds_to_ready

    def get(self, path: str) -> tuple[int, bytes]:
        return get(self.url, path)

    def info(self) -> dict[str, Any]:
        """What /v1/info tells."""
        return info(self.url)

    def instances(self) -> dict[int, str]:
        """Processes of instances and their states."""
        return {member["pid"]: member["state"] for member in self.info()["instances"]}

    def counters(self) -> dict[str, float]:
        """All figures of /metrics, over its instances together: `name` or `name{label="value"}`."""
        return parse_metrics(self.get("/metrics")[1].decode())


@contextlib.contextmanager
def serving(bundle: Path, *flags: str, log: Path, instances: int = 2) -> Iterator[Service]:
    """Serves a bundle on a free port of loopback; at the end no process of it is left. log: what it prints."""
    port = free_port()
    command = [sys.executable, "-m", "nestpipe", "serve", str(bundle), "--instances", str(instances)]
    command += ["--port", str(port), *flags]
    begin, parent = time.perf_counter(), os.getpid()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
            preexec_fn=lambda: end_with(parent),  # however this process ends; instances end with their server
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield Service(process, url, time.perf_counter() - begin)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + READY_WITHIN
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"`nestpipe serve` ended with {process.returncode}:\n{_last(log)}")
        with contextlib.suppress(Lost):
            if get(url, "/readyz")[0] == 200 and all(member["state"] == "ready" for member in info(url)["instances"]):
                return
        time.sleep(0.05)
    raise RuntimeError(f"`nestpipe serve` was not ready within {READY_WITHIN:.0f} s:\n{_last(log)}")


def _last(log: Path) -> str:
    return log.read_text(errors="replace")[-2_000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks it to stop; then ends whatever is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def get(url: str, path: str) -> tuple[int, bytes]:
    """Lost if nobody answers."""

    async def ask() -> tuple[int, bytes]:
        client = Client(url)
        try:
            return await asyncio.wait_for(client.get(path), 10.0)
        except TimeoutError:
            raise Lost(f"{url}{path}: no answer within 10 s") from None
        finally:
            client.close()

    return asyncio.run(ask())


def info(url: str) -> dict[str, Any]:
    """Of a server. Lost if there is none, ValueError if it is another one."""
    status, body = get(url, "/v1/info")
    try:
        told = json.loads(body)
        if status == 200 and isinstance(told["instances"], list):
            return dict(told)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{url} is no server of `nestpipe serve`: its /v1/info answers {status}, {body[:60]!r}")


LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text; what differs by instance only is summed."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else LINE.fullmatch(line.strip())
        if match:
            labels = {name: value for name, value in LABEL.findall(match["labels"] or "") if name != "instance"}
            told = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
            name = match["name"] + (f"{{{told}}}" if told else "")
            found[name] = found.get(name, 0.0) + float(match["value"])
    return found


def rise(before: dict[str, float], after: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """By how much the counters rose whose name begins with one of these."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(tuple(names)) and value != before.get(name, 0.0)
    }

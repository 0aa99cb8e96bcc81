"""`nestpipe serve`: one front process that speaks HTTP, and N instances in processes of their own that map the same bundle.

HTTP and JSON by uvicorn: what this field's Python services speak, with curl for a client and every load balancer for a
neighbour; gRPC would need stubs on both sides for the same arrays. The front process never computes and has no torch; requests
go to instances over sockets without a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from nestpipe.serve.api import Limits
from nestpipe.serve.app import Api
from nestpipe.serve.requests import Settings
from nestpipe.serve.supervisor import Patience, Supervisor

log = logging.getLogger("nestpipe")
# Of the SLO: longest wait for a prefix under way. Long histories gain by it, since their full pass would begin from nothing; the
# policy ends it earlier where a full pass can still be in time.
WAIT = 0.7


@dataclasses.dataclass(frozen=True)
class Serving:
    """What is served, where and how. device_memory, host_memory: bytes for prefixes, in each instance. threads: of each.
    relay, trigger, affinity: False switches one off: no prefixes; prefixes for all signals; requests to any instance.
    reuse: prefixes also for users whose full pass is fast enough, where they save more time than they take.
    answer_late: also requests that have not begun by their deadline, when nothing else waits; else they are turned away.
    drain: seconds that requests in flight are given at the end. port 0: any that is free."""

    bundle: Path
    instances: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    slo: float = 0.1
    device_memory: int = 1 << 30
    host_memory: int = 4 << 30
    threads: int = 1
    relay: bool = True
    trigger: bool = True
    reuse: bool = False
    answer_late: bool = False
    affinity: bool = True
    prefix_dtype: str = "float32"
    allow_updates: bool = False
    drain: float = 10.0
    limits: Limits = Limits()
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        if self.instances < 1 or self.threads < 1:
            raise ValueError(f"instances={self.instances}, threads={self.threads}: give at least 1 of each")
        if self.drain < 0:
            raise ValueError(f"drain={self.drain}: give seconds, zero or more")

    @property
    def settings(self) -> dict[str, Any]:
        """Of each instance; those that Settings has other defaults for, or none."""
        changes = {
            "slo": self.slo,
            "overhead": min(0.005, self.slo / 10),
            "device_bytes": self.device_memory,
            "host_bytes": self.host_memory,
            "wait": WAIT * self.slo,
            "relay": self.relay,
            "trigger": self.trigger,
        }
        Settings(**changes)  # type: ignore[arg-type]  # says what is wrong with them here, not in an instance
        return changes


class CannotServe(Exception):
    """Why there is no server, or none any more."""


def serve(serving: Serving) -> None:
    """Serves until SIGTERM or SIGINT, then answers what is in flight and returns. ValueError for what cannot be served,
    CannotServe if all instances were lost for good."""
    if not serving.bundle.is_dir():
        raise ValueError(f"{serving.bundle} is no folder; give a bundle, as `nestpipe export RUN BUNDLE` writes it")
    options = {
        "kind": "start",
        "bundle": str(serving.bundle.resolve()),
        "settings": serving.settings,
        "reuse": serving.reuse,
        "answer_late": serving.answer_late,
        "prefix_dtype": serving.prefix_dtype,
        "threads": serving.threads,
    }
    with _bound(serving.host, serving.port) as bound:
        loop_factory = uvicorn.Config("", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(serving, options, bound))


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again at the end, and the process would not leave with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(serving: Serving, options: dict[str, Any], bound: socket.socket) -> None:
    names = [f"instance-{number}" for number in range(serving.instances)]
    supervisor = Supervisor(options, names, patience=serving.patience, affinity=serving.affinity)
    updates = serving.bundle.resolve().parent if serving.allow_updates else None
    about = {
        "relay": serving.relay,
        "trigger": serving.trigger,
        "reuse": serving.reuse,
        "affinity": serving.affinity,
        "slo_ms": 1000 * serving.slo,
        "device_memory": serving.device_memory,
        "host_memory": serving.host_memory,
        "prefix_dtype": serving.prefix_dtype,
        "limits": dataclasses.asdict(serving.limits),
        "updates": serving.allow_updates,
    }
    api = Api(supervisor, serving.limits, updates=updates, about=about)
    config = uvicorn.Config(
        api.app(),
        access_log=False,
        log_level="warning",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(serving.drain)),
        backlog=2048,
    )
    server = _Uvicorn(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, server)
    supervisor.start()
    serving_http = asyncio.create_task(server.serve(sockets=[bound]))
    over = asyncio.create_task(supervisor.over.wait())
    saying = asyncio.create_task(_say(serving, supervisor, bound))
    try:
        await asyncio.wait([serving_http, over], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving_http
    finally:
        saying.cancel()
        over.cancel()
        await supervisor.stop(0.0 if supervisor.over.is_set() else serving.drain)
    if supervisor.refused:
        raise ValueError(supervisor.refused)
    if supervisor.over.is_set():
        reasons = {member.last_error for member in supervisor.members.values()}
        raise CannotServe(f"no instance is left: {'; '.join(sorted(reasons))}")


def _stop(server: uvicorn.Server) -> None:
    if not server.should_exit:
        print("stopping: no new requests; those in flight are answered", flush=True)
    server.should_exit = True


async def _say(serving: Serving, supervisor: Supervisor, bound: socket.socket) -> None:
    """What a person at the terminal wants to know, when it is so."""
    host, port = bound.getsockname()[:2]
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    relay = (
        f"prefixes in {serving.prefix_dtype}, up to {_size(serving.device_memory)} in device and {_size(serving.host_memory)} "
        f"in host memory, per instance"
        if serving.relay
        else "no relay: full passes only"
    )
    print(
        f"bundle {serving.bundle}, {serving.instances} instance(s) of {serving.threads} thread(s); {relay}", flush=True
    )
    print(f"listening on http://{at} (process {os.getpid()}); instances warm up", flush=True)
    if not ipaddress.ip_address(host).is_loopback:
        print(
            f"warning: {at} is open to the network, without authentication or encryption: put a proxy before it",
            flush=True,
        )
    while not all(member.state in ("ready", "given up") for member in supervisor.members.values()):
        await asyncio.sleep(0.05)
    info = next((member.info for member in supervisor.members.values() if member.info), None)
    if info is None:  # none was ever ready; the server leaves with the reason
        return
    times = ', "times": [100, 160, 220], "now": 300' if info["uses_times"] else ""
    print(
        f"ready: {info['model']} version {info['version']} (step {info['step']}), histories of up to {info['max_length']} items"
    )
    print(
        f"""try: curl http://{at}/v1/rank -H 'Content-Type: application/json' \\\n"""
        f"""  -d '{{"user": "u1", "history": [1, 2, 3]{times}, "candidates": [4, 5]}}'""",
        flush=True,
    )


def _bound(host: str, port: int) -> socket.socket:
    if port > 65_535:  # which getaddrinfo would take for another one
        raise ValueError(f"--port {port}: give a number up to 65535, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    return bound


def _size(num_bytes: int) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000  # type: ignore[assignment]
    return f"{num_bytes:.3g} {unit}"

"""Heartbeat: names a worker that the others wait for within half a minute, long before anybody gives up.

Each worker sends a few bytes to its two successors every BEAT seconds, by UDP and from a thread of its own: they say what it is
doing. A worker that has waited for others for LATE seconds looks at what its predecessors have said, and tells of one that says
nothing any more (stopped, swapped out, its machine gone) or that is busy with something else. A worker that is itself held up
in one operation tells so too. Nobody is ended for it: a step may be slow. Where no datagram gets through nothing is told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from nestpipe.exchange.transport import Transport

BEAT = 2.0  # seconds between two signs of life
LATE = 20.0  # seconds after which somebody is told of
USUAL = 5.0  # times the longest so far: what an operation may take before it counts as held up
NEIGHBOURS = 2

log = logging.getLogger("nestpipe")


class Waiting(Protocol):
    waiting_since: float | None  # by time.monotonic()


Work = Callable[[], tuple[str, float] | None]  # what a worker does besides waiting for others, and since when


class Heartbeat:
    """waiting: where it shows that this worker waits for others. work: see Work; held weakly. timeout: after how long workers
    give up, for the text."""

    def __init__(self, transport: Transport, waiting: Sequence[Waiting], work: Work, *, timeout: float) -> None:
        self._waiting, self._work, self._timeout = waiting, weakref.WeakMethod(work), timeout
        rank, world = transport.rank, transport.world
        self._rank, self._socket = rank, socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(BEAT)
        self._socket.bind((_own_address(), 0))
        told = transport.gather_objects((self._socket.getsockname(), secrets.token_hex(8)))
        self._token = told[0][1]  # what else may arrive is somebody else's
        steps = range(1, min(NEIGHBOURS, world - 1) + 1)
        self._successors = [told[(rank + step) % world][0] for step in steps]
        self._predecessors = [(rank - step) % world for step in steps]
        self._heard: dict[int, tuple[float, str]] = {}  # by predecessor: when it was last heard of, and what it did
        self._seen: tuple[str, float, float] | None = (
            None  # of its own work: what, since when, how long at the last look
        )
        self._longest: dict[str, float] = {}  # by operation: of those that have ended
        self._named: set[object] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nestpipe-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", self._socket.getsockname())  # wakes it up
        if threading.current_thread() is not self._thread:  # the garbage collector may run there
            self._thread.join(BEAT)
        self._socket.close()

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT
                if not self._beat(now):
                    return
            with contextlib.suppress(TimeoutError, OSError, ValueError, KeyError, TypeError):
                self._socket.settimeout(max(0.01, next_beat - time.monotonic()))
                said = json.loads(self._socket.recv(4096))
                if said["token"] == self._token:
                    self._heard[said["rank"]] = time.monotonic(), str(said["does"])

    def _beat(self, now: float) -> bool:
        work = self._work()
        if work is None:
            return False  # the trainer is gone
        doing = work()
        waits = min((since for place in self._waiting if (since := place.waiting_since) is not None), default=None)
        if doing is not None:
            if "(" in doing[0] or self._others_wait(
                now
            ):  # an operation; a call (saving, say) may take long on all alike
                self._tell_of_own_work(*doing, now)
        elif waits is not None and now - waits > LATE:
            for rank in self._predecessors:
                self._tell_of(rank, waits, now)
        does = doing[0] if doing is not None else "" if waits is not None else "nothing"
        word = json.dumps({"token": self._token, "rank": self._rank, "does": does}).encode()
        for address in self._successors:
            with contextlib.suppress(OSError):
                self._socket.sendto(word, address)
        return True

    def _others_wait(self, now: float) -> bool:
        """Whether all that this worker hears of wait."""
        heard = [self._heard[rank] for rank in self._predecessors if rank in self._heard]
        return bool(heard) and all(does == "" and now - when < LATE for when, does in heard)

    def _tell_of_own_work(self, name: str, since: float, now: float) -> None:
        seconds, before = now - since, self._seen
        if before is not None and before[:2] != (name, since):  # that one has ended
            kind = before[0].split("(")[0]
            self._longest[kind] = max(self._longest.get(kind, 0.0), before[2])
        self._seen = name, since, seconds
        if seconds > max(LATE, USUAL * self._longest.get(name.split("(")[0], 0.0)):
            text = f"rank {self._rank} has been in {name} for {seconds:.0f} s; the other workers wait for it"
            self._tell_once((name, since), text)

    def _tell_of(self, rank: int, waits: float, now: float) -> None:
        heard = self._heard.get(rank)
        if heard is None:
            return  # no datagram has ever come through
        when, does = heard
        ends = f"; workers give up after {self._timeout:.0f} s"
        if now - when > LATE:
            self._tell_once(
                (rank, when),
                f"rank {rank} has given no sign of life for {now - when:.0f} s, and rank {self._rank} waits for it: stopped "
                f"(SIGSTOP, a debugger), swapped out, or its machine gone?{ends}",
            )
        elif does == "nothing":
            self._tell_once(
                (rank, waits),
                f"rank {rank} is alive but in no call of the trainer, and rank {self._rank} has waited for "
                f"{now - waits:.0f} s: every worker must make the same calls{ends}",
            )

    def _tell_once(self, what: object, text: str) -> None:
        if what not in self._named:
            self._named.add(what)
            log.warning(text)


def _own_address() -> str:
    """The address of this machine that workers reach each other at: the one from which it reaches the first."""
    if "MASTER_ADDR" not in os.environ:
        return "127.0.0.1"
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 1))))
        return str(probe.getsockname()[0])
    return "127.0.0.1"

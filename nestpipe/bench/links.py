"""Links of a set rate between the workers of a measurement on one machine.

Every worker gets a network namespace of its own, joined to the others by a bridge that has one as well, so that the host's
own network is not touched. Token buckets (`tc tbf`) on both sides of each link limit what a worker sends, and what reaches
it. A delay is added where the kernel can (netem); rate is what limits an exchange of rows. Workers may lie in groups (machines,
racks): each has a bridge of its own, and a link of a set rate that joins it to the others.

Nothing outlives the bench: one small process, the guardian, waits on a pipe whose other end only the bench holds, and removes
the namespaces when it closes, be it at the end, by an exception or by SIGKILL. Should the guardian be killed too, the next
bench finds what is left by the number of the dead process in the names.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
LOOPBACK = "loopback, unlimited"
# A small bucket, else the first bytes after a pause travel for free, and the many small messages of a schedule that cuts its
# batch would gain by it. A bucket must hold a packet, so packets are kept below what the kernel would send at once.
PACKET = 16_384
BURST_SECONDS = 0.001
QUEUE = "32mb"  # more than the sockets of a group hold: nothing is dropped, senders are held up instead

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()  # of namespaces, never used twice in a process

# Workers that outlive their bench are ended with it: each namespace holds nothing else.
_REMOVE = """
trap '' HUP INT TERM
cat > /dev/null
for name in "$@"; do
    ip netns pids "$name" 2> /dev/null | xargs -r kill -KILL 2> /dev/null
    ip netns del "$name" 2> /dev/null
done
true
"""


@dataclasses.dataclass(frozen=True)
class Links:
    """Where each worker's end is. No namespaces: the workers share the host's loopback, and `why` says why.

    addresses: of the workers, in the order of their ranks.
    rate: of each worker's link, in each direction, as `tc` writes it.
    bridge: the namespace between them.
    delay: from worker to worker, as `tc` writes it.
    groups: of neighbouring workers, with a link of the rate `between` from each to the others; 1: there is nothing between.
    """

    namespaces: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    interface: str = INTERFACE
    rate: str = ""
    why: str = ""
    bridge: str = ""
    delay: str = ""
    groups: int = 1
    between: str = ""

    @property
    def label(self) -> str:
        delay = f" with {self.delay} delay" if self.delay else ""
        groups = f", {self.groups} groups with {self.between}/s between them" if self.groups > 1 else ""
        return f"{self.rate}/s links{delay}{groups}" if self.namespaces else LOOPBACK

    def enter(self, rank: int) -> None:
        """Moves the calling thread, and those it starts from now on, to the worker's end; gloo will use it."""
        if not self.namespaces:
            return
        with open(NAMESPACES / self.namespaces[rank]) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot enter the network namespace {file.name}: {os.strerror(error)}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def change_rate(self, rate: str) -> Links:
        """The same links at another rate, from now on. One worker (or the bench) calls it while nothing is sent."""
        for i, name in enumerate(self.namespaces):
            _run("tc", "-n", name, "qdisc", "change", "dev", self.interface, "root", *_bucket(rate))
            _run("tc", "-n", self.bridge, "qdisc", "change", "dev", _port(i), "root", *_bucket(rate))
        return dataclasses.replace(self, rate=rate)

    def bytes_sent(self) -> int:
        """What has left this worker's end so far, with all headers. Over loopback: what all programs there have sent."""
        name = self.interface if self.namespaces else "lo"
        for line in Path("/proc/net/dev").read_text().splitlines():
            interface, _, counters = line.partition(":")
            if interface.strip() == name:
                return int(counters.split()[8])
        raise ValueError(f"no interface {name!r} here")

    def bytes_between(self) -> int:
        """What has left all groups so far, with all headers; 0 where there is nothing between them."""
        if not self.namespaces or self.groups == 1:
            return 0
        shown = json.loads(_run("ip", "-n", self.bridge, "-json", "-stats", "link"))
        ports = {_uplink(group) for group in range(self.groups)}
        return sum(link["stats64"]["tx"]["bytes"] for link in shown if link["ifname"] in ports)


@contextlib.contextmanager
def links(
    workers: int, *, rate: str = "300mbit", delay: str | None = None, groups: int = 1, between: str = ""
) -> Iterator[Links]:
    """Links for `run_workers(..., links=)`, removed at the end. Where they cannot be made it says so: loopback then.

    rate: of each worker, in each direction: "300mbit", "1gbit".
    delay: of what one worker sends to another: "2ms". Refused where the kernel has no netem.
    groups: so many of neighbouring workers, with a link of the rate `between` from each to the others.
    """
    if workers < 1 or workers > 250:
        raise ValueError(f"links: workers must be from 1 to 250, got {workers}")
    if groups < 1 or workers % groups:
        raise ValueError(f"links: {workers} workers cannot form {groups} equal groups")
    bits_per_second(rate)
    if groups > 1:
        bits_per_second(between)
    if delay is not None and re.fullmatch(r"\d+(\.\d+)?ms", delay) is None:
        raise ValueError(f"links: delay {delay!r}; write a number of milliseconds, as in '2ms'")
    why = _missing()
    if not why:
        remove_leftovers()
        if delay is not None and not has_netem():
            raise ValueError(
                f"links: this kernel has no netem (sch_netem), so there is no delay of {delay}; leave delay out, or load "
                f"the module"
            )
        *names, bridge = _names(workers + 1)
        with _removed_at_the_end([*names, bridge]):
            try:
                made = _make(names, bridge, rate, delay or "", groups, between)
            except subprocess.CalledProcessError as error:
                why = f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
            else:
                yield made
                return
    print(f"no links of {rate}/s between workers: {why}. Measured on {LOOPBACK}.", file=sys.stderr)
    yield Links(why=why)


def throughput(megabytes: float = 4.0) -> float:
    """Mbit/s that every worker sends when all send to all; all workers call it and get the same, the slowest worker's.

    Receives are posted before sends: in `all_to_all` gloo may tell a peer that it is ready to receive only behind its own
    data, on the same connection, and the two directions then take turns.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [(rank + i) % world for i in range(1, world)]
    sent = torch.zeros(world, max(1, int(megabytes * 1e6 / 4 / world)))
    received = torch.empty_like(sent)
    seconds = torch.zeros((), dtype=torch.float64)
    for size in (1, sent.shape[1]):  # the first opens the connections
        dist.barrier()
        begin = time.perf_counter()
        messages = [dist.irecv(received[peer, :size], peer) for peer in reversed(others)]
        messages += [dist.isend(sent[peer, :size], peer) for peer in others]
        for message in messages:
            assert message is not None
            message.wait()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return sent[0].nbytes * (world - 1) * 8 / 1e6 / float(seconds)


def bits_per_second(rate: str) -> float:
    for unit, factor in _UNITS.items():
        number = rate.removesuffix(unit)
        if number != rate and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * factor
    raise ValueError(f"links: rate {rate!r}; write a number and one of {', '.join(_UNITS)}, as in '300mbit'")


def has_netem() -> bool:
    """Whether the kernel can delay packets. Root asks, in a namespace of its own."""
    (name,) = _names(1)
    with _removed_at_the_end([name]):
        _run("ip", "netns", "add", name)
        try:
            _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        except subprocess.CalledProcessError:
            return False
    return True


def remove_leftovers() -> list[str]:
    """Removes the namespaces of benches that are dead; their names."""
    dead = []
    for path in sorted(NAMESPACES.glob("nestpipe-*-*")):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            dead.append(path.name)
    if dead:
        subprocess.run(["sh", "-c", _REMOVE, "sh", *dead], stdin=subprocess.DEVNULL, check=True)
    return dead


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "they need root"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"no program {' and '.join(absent)} here (iproute2)" if absent else ""


@contextlib.contextmanager
def _removed_at_the_end(names: Sequence[str]) -> Iterator[None]:
    # In a session of its own, so that Ctrl-C in a terminal does not reach it. No other process inherits the pipe's end.
    guardian = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", *names], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait()


def _names(count: int) -> list[str]:
    return [f"nestpipe-{os.getpid()}-{next(_numbers)}" for _ in range(count)]


def _make(names: Sequence[str], bridge: str, rate: str, delay: str, groups: int, between: str) -> Links:
    limit = ("root", "handle", "1:", *_bucket(rate))
    _run("ip", "netns", "add", bridge)
    for name in ("bridge", *(_bridge(group) for group in range(groups) if groups > 1)):
        _run("ip", "-n", bridge, "link", "add", name, "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", name, "up")
    for group in range(groups if groups > 1 else 0):
        above = f"above{group}"
        _run("ip", "-n", bridge, "link", "add", _uplink(group), "type", "veth", "peer", "name", above)
        for port, master in ((_uplink(group), _bridge(group)), (above, "bridge")):
            _run("ip", "-n", bridge, "link", "set", port, "master", master, "gso_max_size", str(PACKET), "up")
            _run("tc", "-n", bridge, "qdisc", "add", "dev", port, "root", *_bucket(between))
    addresses = []
    for i, name in enumerate(names):
        port, address = _port(i), f"10.0.0.{i + 1}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", bridge, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        master = _bridge(i * groups // len(names)) if groups > 1 else "bridge"
        _run("ip", "-n", bridge, "link", "set", port, "master", master, "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", str(PACKET), "up")
        _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limit)
        _run("tc", "-n", bridge, "qdisc", "add", "dev", port, *limit)
        if delay:  # on the way out only; it holds a second of packets, of the smallest ones too
            hold = ("parent", "1:1", "handle", "10:", "netem", "delay", delay, "limit", "1000000")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *hold)
        addresses.append(address)
    between = between if groups > 1 else ""
    return Links(tuple(names), tuple(addresses), INTERFACE, rate, "", bridge, delay, groups, between)


def _bucket(rate: str) -> tuple[str, ...]:
    burst = max(PACKET + 4096, int(bits_per_second(rate) / 8 * BURST_SECONDS))
    return "tbf", "rate", rate, "burst", str(burst), "limit", QUEUE


def _port(worker: int) -> str:
    return f"worker{worker}"


def _bridge(group: int) -> str:
    return f"bridge{group}"


def _uplink(group: int) -> str:
    return f"group{group}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

"""Whether every worker can connect to every other, with plain sockets: gloo only says that somebody could not."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator

WITHIN = 5.0  # seconds for a connection; a firewall that drops packets says nothing
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def own_address() -> str | None:
    """The IPv4 address on which gloo listens here: of the interface that it is told, or that the machine's name stands for."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        if wanted is None:
            return socket.gethostbyname(socket.gethostname())
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
            request = struct.pack("256s", wanted.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(some.fileno(), _GET_ADDRESS, request)[20:24])
    except (OSError, ImportError):
        return None


@contextlib.contextmanager
def listening(room: int) -> Iterator[int]:
    """A port to which others can connect while it lasts; `room` of them at once."""
    with socket.create_server(("", 0), backlog=room) as server:
        yield server.getsockname()[1]


def unreachable(
    others: Iterator[int], place_of: Callable[[int], tuple[str | None, int] | None]
) -> tuple[int, str] | None:
    """The first of the other workers to which there is no connection, and why."""
    for other in others:
        place = place_of(other)
        if place is None or place[0] is None:  # it says so itself
            continue
        try:
            socket.create_connection((place[0], place[1]), timeout=WITHIN).close()
        except OSError as error:
            return other, f"cannot connect to {place[0]}: {error.strerror or error}"
    return None

"""As much of an HTTP client as a load generator needs: connections that stay open, and nothing between it and the socket.

A client library would take as long as the server it measures: all of them are on the same cores here.
"""

from __future__ import annotations

import asyncio
import collections
import urllib.parse

MOST = 64 << 20  # bytes of an answer


class Lost(Exception):
    """The connection ended, or could not be opened, before there was an answer."""


class Client:
    """Sends requests to one server, each on a connection of its own while it is under way. Idle connections are used
    again; a new one is opened where there is none, so a request never waits for another one's answer."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: give the address of a server as http://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port or 80
        self.opened = 0
        self._idle: collections.deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = collections.deque()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Lost if there is none."""
        return await self._ask(
            b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), self.host.encode(), len(body))
            + body
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._ask(b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path.encode(), self.host.encode()))

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        while True:
            used = bool(self._idle)
            reader, writer = self._idle.pop() if used else await self._open()
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                status, length, stays = _parse(head)
                body = await reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                writer.close()
                if used and not getattr(error, "partial", b""):
                    continue  # the server had closed it while it was idle: it has not seen this request
                raise Lost(f"{type(error).__name__}: {error}") from error
            except asyncio.CancelledError:
                writer.close()
                raise
            if stays:
                self._idle.append((reader, writer))
            else:
                writer.close()
            return status, body

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.opened += 1
        try:
            return await asyncio.open_connection(self.host, self.port)
        except OSError as error:
            raise Lost(f"{type(error).__name__}: {error}") from error


def _parse(head: bytes) -> tuple[int, int, bool]:
    """Status, bytes of the body, and whether the connection stays open."""
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        status, length = int(first.split(" ", 2)[1]), int(fields["content-length"])
    except (IndexError, ValueError, KeyError):
        raise Lost(f"not an answer with a length: {first[:80]!r}") from None
    if not 0 <= length <= MOST:
        raise Lost(f"an answer of {length} bytes")
    return status, length, fields.get("connection", "").lower() != "close"

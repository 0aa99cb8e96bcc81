"""Link: the front process's end of an instance: starts the process, sends it frames, gets answers; says when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from nestpipe.serve.frames import Frame, encode, read

MOST_IN_FLIGHT = 4096  # requests; the instance's own queue refuses long before
OF_CLIENTS = frozenset({"rank", "signal"})


class Lost(Exception):
    """The instance is gone, and whatever it had; the request may be sent again."""


class Refused(Exception):
    """The instance says no. status: of HTTP."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Link:
    """One life of an instance's process."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self._reader, self._writer = process, reader, writer
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count(1)
        self._listening: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    @classmethod
    async def start(cls, options: Mapping[str, Any], *, threads: int) -> Link:
        """Starts the process and tells it what to serve. The socket has no name: nobody else can connect to it, and nothing is
        left of it when both ends are gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "nestpipe.serve.instance", str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)},
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        link = cls(process, reader, writer)
        link._send(options)
        return link

    async def ready(self) -> dict[str, Any]:
        """What it serves, as soon as it does. Refused if it cannot, Lost if it died over it."""
        frame = await read(self._reader)
        if frame is None:
            self.gone.set()
            raise Lost("it ended before it was ready")
        if frame.header["kind"] == "refused":
            raise Refused(500, frame.header["error"])
        self._listening = asyncio.create_task(self._listen())
        return frame.header

    async def _listen(self) -> None:
        """Hands answers to those who wait for them, until the process is gone."""
        while (frame := await read(self._reader)) is not None:
            answer = self._answers.pop(frame.header["id"], None)
            if answer is None or answer.done():  # whoever asked has gone away
                continue
            if frame.header["kind"] == "error":
                answer.set_exception(Refused(frame.header["status"], frame.header["error"]))
            else:
                answer.set_result(frame)
        self.gone.set()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(Lost("the instance that had this request is lost; send it again"))

    async def call(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None] | None = None) -> Frame:
        """The answer. Refused: it says no. Lost: it is gone, or goes before it has answered."""
        if self.gone.is_set():
            raise Lost("the instance of this user is lost; send it again")
        # Only clients are turned away: an instance with much to do must not look like one that no longer answers.
        if len(self._answers) >= MOST_IN_FLIGHT and header["kind"] in OF_CLIENTS:
            raise Refused(429, f"{MOST_IN_FLIGHT} requests wait for this instance; send it later")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send({**header, "id": number}, arrays)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    async def stop(self, drain: float) -> None:
        """Lets it answer what it has for so many seconds; then it ends, by itself or not."""
        self._send({"kind": "stop", "drain": drain})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), drain + 5)
        await self.end()

    async def end(self) -> int:
        """Ends the process at once, if it has not ended; its exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
        code = await self.process.wait()
        if self._listening is not None:
            await self._listening  # which ends with the process
        self._writer.close()
        return code

    def _send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None] | None = None) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(header, arrays))


def ended(code: int) -> str:
    """How a process ended, for people to read."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(-code).name}" + (", perhaps for lack of memory" if code == -signal.SIGKILL else "")
    return f"signal {-code}"

"""A forked process that works while the one that trains goes on: it has the memory as it was when it was forked."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nestpipe.process import end_with

ATTEMPTS, ALIVE_WITHIN = 5, 3.0  # of a fork; seconds
DONE = b"done "
NICE = 10  # by how much the process that writes gives way to those that train


class Child:
    """A forked process, and the pipe through which it says how it went. problem, and what its work returned: known when it is no
    longer running."""

    def __init__(self, pid: int, pipe: int, problem: OSError | None = None) -> None:
        self._pid, self._pipe, self.problem = pid, pipe, problem
        self._said, self.parent = b"", os.getpid()
        self.returned = ""

    def is_running(self) -> bool:
        while self._pipe >= 0:
            try:
                block = os.read(self._pipe, 4096)
            except BlockingIOError:
                return True
            self._said += block
            if not block:
                os.close(self._pipe)
                self._pipe = -1
                os.waitpid(self._pid, 0)
                if self._said.startswith(DONE):
                    self.returned = self._said.removeprefix(DONE).decode()
                else:
                    self.problem = OSError(
                        self._said.decode(errors="replace") or "the process that wrote it was killed"
                    )
        return False


def fork(work: Callable[[], str | None]) -> Child:
    """A process that has begun to work. One that does not come to life is given up and another one is tried: a thread that was
    just ending (those of the lanes are) may hold a lock of the interpreter, and nobody ever gives it back in the copy."""
    for _ in range(ATTEMPTS):
        child = _try_to_fork(work)
        if child is not None:
            return child
    raise OSError(f"{ATTEMPTS} forked processes did not come to life within {ALIVE_WITHIN:g} s each")


def _try_to_fork(work: Callable[[], str | None]) -> Child | None:
    ours, theirs = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if pid == 0:
        _run_and_leave(work, theirs, parent)
    os.close(theirs)
    os.set_blocking(ours, False)
    deadline = time.monotonic() + ALIVE_WITHIN
    while time.monotonic() < deadline:
        try:
            alive = os.read(ours, 1)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        if alive:
            return Child(pid, ours)
        break  # it died
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ours)
    return None


def _run_and_leave(work: Callable[[], str | None], pipe: int, parent: int) -> NoReturn:
    """In the forked process: no threads of torch, no locks that another thread may have held, nothing but arrays and files."""
    try:
        os.write(pipe, b"+")
        gc.disable()  # what is collected here may close a descriptor whose number is another file's by now
        end_with(parent)
        _close_all_but(pipe)
        os.nice(NICE)
        for number in (signal.SIGTERM, signal.SIGINT):  # those are for the one that trains; it waits for this one
            signal.signal(number, signal.SIG_IGN)
        try:
            said = DONE + (work() or "").encode()
        except BaseException as error:
            said = (str(error) or type(error).__name__).encode()
        os.write(pipe, said[:4000])
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Connections to other workers above all: while somebody holds them open, nobody notices that a worker is gone."""
    listed = Path("/proc/self/fd")
    numbers = [int(name) for name in os.listdir(listed)] if listed.exists() else range(4096)
    for number in numbers:
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)

"""The process of one instance: a Worker behind a socket to the front process. `python -m nestpipe.serve.instance FD`

It lives as long as the other end of its socket: the front process tells it what to serve, sends requests and, at the end,
"stop". If the front process dies, the socket ends and so does this.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.errors import describe
from nestpipe.serve import manifest as manifests
from nestpipe.serve.batching import Batching
from nestpipe.serve.bundle import load_bundle
from nestpipe.serve.frames import Frame, encode, receive
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal
from nestpipe.serve.requests import Settings
from nestpipe.serve.scoring import Scorer
from nestpipe.serve.trigger import Bounds
from nestpipe.serve.worker import Worker

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STATUS = {"full": 429, "late": 503, "stopping": 503}  # of a Rejected


class Server:
    """Answers frames of the front process. What takes long is done elsewhere: the thread that reads only reads."""

    def __init__(self, connection: socket.socket, worker: Worker) -> None:
        self.connection, self.worker = connection, worker
        self.prepared: Scorer | None = None  # the last one that was asked for
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="nestpipe-answers", daemon=True)
        self._writer.start()
        self._preparing = ThreadPoolExecutor(1, "nestpipe-prepare")

    def run(self) -> None:
        """Until the front process says "stop", or is gone."""
        self.send(kind="ready", **told(self.worker))
        while (frame := receive(self.connection)) is not None:
            if frame.header["kind"] == "stop":
                self._preparing.shutdown()
                self.worker.close(drain=frame.header["drain"])
                self._out.put(None)
                self._writer.join()
                return
            try:
                self.answer(frame)
            except (ValueError, OSError) as error:
                self.fail(frame.header["id"], 400, describe(error))
            except Rejected as error:
                self.fail(frame.header["id"], STATUS[error.why], str(error))
            if self.worker.broken:
                raise RuntimeError("the instance is broken; what came before says why")
        os._exit(1)  # nobody is there to be answered

    def answer(self, frame: Frame) -> None:
        header, arrays = frame
        number, kind = header["id"], header["kind"]
        if kind == "rank":
            ask = Ask(
                header["user"],
                arrays["history"],
                arrays["candidates"],
                times=arrays.get("times"),
                now=header["now"],
                deadline_seconds=header["deadline_seconds"],
            )
            self.worker.rank(ask).add_done_callback(functools.partial(self.ranked, number))
        elif kind == "signal":
            signal = Signal(header["user"], arrays["history"], arrays.get("times"), header["candidates"])
            self.send(kind="answer", id=number, reason=self.worker.signal(signal).name)
        elif kind == "stats":
            self.send(kind="answer", id=number, stats=self.worker.stats())
        elif kind == "prepare":
            self._preparing.submit(self.prepare, number, Path(header["path"]))
        elif kind == "commit":
            prepared, self.prepared = self.prepared, None
            if prepared is None or prepared.bundle.version != header["version"]:
                raise ValueError(f"version {header['version']} is not prepared; prepare it first")
            self.worker.update(prepared)
            self.send(kind="answer", id=number, **told(self.worker))
        else:
            raise AssertionError(f"a frame of kind {kind!r}")

    def ranked(self, number: int, future: Future[Ranked]) -> None:
        error = future.exception()
        if isinstance(error, Rejected):
            self.fail(number, STATUS[error.why], str(error))
        elif error is not None:
            self.fail(number, 500, describe(error))
        else:
            found = future.result()
            self.send(
                {"scores": found.scores},
                kind="answer",
                id=number,
                source=found.source.name,
                version=found.version,
                seconds=found.seconds,
            )

    def prepare(self, number: int, path: Path) -> None:
        """Opens another version, beside the one that serves: a delta of it, or a bundle of its own."""
        self.prepared = None
        try:
            manifest = manifests.read(path)
            current = self.worker.bundle
            if manifest.version == current.version:
                bundle = current
            elif manifest.base is not None and manifest.base.crc == current.manifest.crc:
                bundle = current.updated(path)
            else:
                bundle = load_bundle(path)
            # All that could speak against it is found now: `commit` must not fail.
            self.prepared = self.worker.successor(bundle)
            self.send(kind="answer", id=number, version=bundle.version)
        except Exception as error:
            self.fail(number, 400, describe(error))

    def fail(self, number: int, status: int, error: str) -> None:
        self.send(kind="error", id=number, status=status, error=error)

    def send(self, arrays: dict[str, np.ndarray | None] | None = None, /, **header: Any) -> None:
        self._out.put(encode(header, arrays))

    def _write(self) -> None:
        """A thread of its own: the computing thread never waits for a reader."""
        while (data := self._out.get()) is not None:
            try:
                self.connection.sendall(data)
            except OSError:
                return  # gone; the thread that reads sees it


def told(worker: Worker) -> dict[str, Any]:
    """What it serves."""
    scorer = worker.scorer
    return {
        "version": scorer.bundle.version,
        "step": scorer.bundle.step,
        "model": type(scorer.model).__name__,
        "max_length": scorer.max_length,
        "uses_times": scorer.uses_times,
        "bytes_per_token": scorer.bytes_per_token,
    }


def main(descriptor: int) -> None:
    # To be stopped is the front process's business, which then lets requests end: a terminal's Ctrl-C and a service
    # manager's SIGTERM reach all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    connection = socket.socket(fileno=descriptor)
    start = receive(connection)
    if start is None:
        sys.exit(1)
    sys.path.insert(0, os.getcwd())  # where models of one's own are looked for
    options = start.header
    threads = options["threads"]
    torch.set_num_threads(threads)
    try:
        worker = Worker(
            load_bundle(options["bundle"]),
            Settings(
                **options["settings"],
                bounds=Bounds(reuse=options["reuse"]),
                batching=Batching(grace=math.inf if options["answer_late"] else 0.0),
            ),
            prefix_dtype=DTYPES[options["prefix_dtype"]],
            threads=threads,
        )
        worker.warm_up()
    except (ValueError, OSError) as error:
        connection.sendall(encode({"kind": "refused", "error": describe(error)}))
        sys.exit(1)
    code = 1
    try:
        Server(connection, worker).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # all is said and done: taking torch apart takes seconds, and threads may hang if something went wrong


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Worker processes of a measurement on one machine: gloo, fixed thread counts, the same allocator for all.

They leave nothing behind, however the bench ends: there is no file (workers meet and report through pipes and a socket), and
each worker is killed when the process that started it is gone.
"""

from __future__ import annotations

import datetime
import json
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.bench.links import Links
from nestpipe.process import end_with, keep_large_blocks


def run_workers(
    work: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    threads: int | None = None,
    timeout: float = 120,
    links: Links | None = None,
) -> Any:
    """Runs `work(*args)` on each of `workers` processes joined in one gloo group; gives back what rank 0 returned.

    `work` must be importable (a module-level function), its result is carried as JSON. An exception on any worker ends
    all of them and is raised here with its traceback.

    threads: OMP and torch threads per worker; the machine's cores divided by the workers if left out.
    timeout: seconds that a collective may wait for another worker.
    links: of limited rate, from `bench.links`; left out, the workers talk over loopback.
    """
    if workers < 1:
        raise ValueError(f"run_workers: workers must be at least 1, got {workers}")
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        with _environment(threads):
            for rank in range(workers):
                ours, theirs = context.Pipe()
                start = _Start(os.getpid(), rank, workers, threads, timeout, links or Links())
                processes.append(context.Process(target=_worker, args=(theirs, start, work, args)))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
        return json.loads(_results(pipes)[0])
    finally:
        for process in processes:
            process.kill()  # those that are done have left already
            process.join()


class _Start:
    """What a worker is told."""

    def __init__(self, parent: int, rank: int, workers: int, threads: int, timeout: float, links: Links) -> None:
        self.parent, self.rank, self.workers, self.links = parent, rank, workers, links
        self.threads, self.timeout = threads, timeout


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """A worker reads these when it first loads OpenMP and torch, so they must be there before it starts."""
    settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    # Else torch warns, at every connection, that a network namespace has nobody to ask for the names of hosts.
    settings["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _results(pipes: list[Connection]) -> dict[int, str]:
    """What each worker returned, as JSON; raises what the first to fail says, unless another has the cause of it."""
    results: dict[int, str] = {}
    while len(results) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                what, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"worker {rank} was killed, or ended without a word") from None
            if what == "meet at":
                for other in pipes[1:]:
                    other.send(value)
            elif what == "failed":
                rank, value = _cause(pipes, rank, value)
                raise RuntimeError(f"worker {rank} failed:\n{value}")
            else:
                results[rank] = value
    return results


def _cause(pipes: list[Connection], rank: int, told: str) -> tuple[int, str]:
    """Of a worker that has only lost contact with another: that one, and what it says, if it comes soon."""
    deadline = time.monotonic() + 5
    while "by peer" in told.splitlines()[-1] and time.monotonic() < deadline:
        for pipe in wait([pipe for other, pipe in enumerate(pipes) if other != rank], timeout=0.1):
            assert isinstance(pipe, Connection)
            try:
                what, value = pipe.recv()
            except EOFError:
                return rank, told
            if what == "failed" and "by peer" not in value.splitlines()[-1]:
                return pipes.index(pipe), value
    return rank, told


def _worker(pipe: Connection, start: _Start, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end_with(start.parent)
    try:
        pipe.send(("result", _work(pipe, start, work, args)))
    except KeyboardInterrupt:
        pass  # of the terminal: the bench has it as well
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _work(pipe: Connection, start: _Start, work: Callable[..., Any], args: tuple[Any, ...]) -> str:
    start.links.enter(start.rank)  # before there are other threads: they stay where they are
    keep_large_blocks()  # for contestants that are not ours too
    logging.getLogger("nestpipe").setLevel(logging.WARNING)  # what each run says of itself is not for a bench to print
    torch.set_num_threads(start.threads)
    timeout = datetime.timedelta(seconds=start.timeout)
    address = start.links.addresses[0] if start.links.addresses else "127.0.0.1"
    if start.rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        pipe.send(("meet at", store.port))
    else:
        store = dist.TCPStore(address, pipe.recv(), timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.workers, timeout=timeout)
    try:
        result = json.dumps(work(*args))
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()

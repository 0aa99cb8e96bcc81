"""A pool of worker processes that outlives single tests: importing torch costs seconds, so it is done once."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.waiting import PATIENCE


class Failed(AssertionError):
    """A rank raised; the text is its traceback."""


def _serve(pipe: Connection, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # it may have a reader process, which leaves with it
    logging.getLogger("nestpipe").addHandler(logging.NullHandler())  # what runs say of themselves is for nobody here
    gc.freeze()  # what was imported: so that collecting after every job is cheap
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        job = pipe.recv()
        if job is None:
            return
        function, args, rank, world, run = job
        try:
            if world > 1:
                dist.init_process_group("gloo", store=dist.PrefixStore(run, store), rank=rank, world_size=world)
                dist.barrier()  # nobody leaves while others still connect to it
            pipe.send(("ok", function(*args)))
        except BaseException as error:
            pipe.send(("failed", (type(error).__name__, str(error), traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()


class Cluster:
    """`run(world, function, *args)` calls function(*args) on `world` ranks of one process group; results by rank."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # torch's optimizers import torch._dynamo, seconds of it, when they are first used.
        self._context.set_forkserver_preload(["nestpipe", "torch._dynamo"])
        self._workers: list[tuple[Any, Connection]] = []
        # Where workers find each other. (Over a file, which they look into now and then, it takes half as long again.)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0

    def _grow(self, world: int) -> None:
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def outcomes(self, world: int, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """("ok", result) or ("failed", (error type, message, traceback)) of every rank; ("hung", None) if no rank says
        anything for PATIENCE seconds, less than a lost worker is waited for; ("died", exit code) if it is gone."""
        self._grow(world)
        self._runs += 1
        for rank in range(world):
            self._workers[rank][1].send((function, args, rank, world, f"run {self._runs}"))
        results: list[Any] = [("hung", None)] * world
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        while waiting:
            ready = wait(list(waiting), PATIENCE)
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = ("died", self._workers[rank][0].exitcode)
            if not ready:
                break
        if any(kind in ("hung", "died") for kind, _ in results):
            self.close()  # what is left of the group may be stuck; start anew next time
        return results

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        outcomes = self.outcomes(world, function, *args)
        for rank, (kind, value) in enumerate(outcomes):
            if kind != "ok":
                raise Failed(f"rank {rank} of {world} {kind}: {value[2] if kind == 'failed' else value}")
        return [value for _, value in outcomes]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []


def in_a_group(work: Callable[..., Any], *args: Any) -> Any:
    """work(*args), also where the cluster gives no group, to a single worker."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return work(*args)

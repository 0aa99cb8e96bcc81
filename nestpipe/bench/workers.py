"""Worker processes of a measurement on one machine: gloo, fixed thread counts, the same allocator for all."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from nestpipe.bench.links import Links
from nestpipe.process import keep_large_blocks


def run_workers(
    work: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    threads: int | None = None,
    keep_blocks: bool = True,
    timeout: float = 120,
    links: Links | None = None,
) -> Any:
    """Runs `work(*args)` on each of `workers` processes joined in one gloo group; gives back what rank 0 returned.

    `work` must be importable (a module-level function), its result is carried as JSON. An exception on any worker ends
    all of them and is raised here with its traceback.

    threads: OMP and torch threads per worker; the machine's cores divided by the workers if left out.
    keep_blocks: apply `process.keep_large_blocks` before the work starts.
    timeout: seconds that a collective may wait for another worker.
    links: of limited rate, from `bench.links`; left out, the workers talk over loopback.
    """
    if workers < 1:
        raise ValueError(f"run_workers: workers must be at least 1, got {workers}")
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)  # read when a worker first loads OpenMP, so it must be there before it starts
    try:
        with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
            torch.multiprocessing.spawn(
                _worker, (work, args, workers, threads, keep_blocks, timeout, folder, links), nprocs=workers
            )
            return json.loads(Path(folder, "result.json").read_text())
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(
    rank: int,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    workers: int,
    threads: int,
    keep_blocks: bool,
    timeout: float,
    folder: str,
    links: Links | None,
) -> None:
    if links is not None:
        links.enter(rank)  # before there are other threads: they stay where they are
    if keep_blocks:
        keep_large_blocks()
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=workers,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        result = work(*args)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()

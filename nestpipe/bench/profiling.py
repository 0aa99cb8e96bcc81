"""Measures what the simulator wants to know: what operations take, from recorded steps, and what links do."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nestpipe import process
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.config import Config, parse
from nestpipe.exchange.transport import Transport
from nestpipe.run import make_trainer
from nestpipe.schedule.ops import BWD, DENSE, FWD
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import READ, Profile, Work, units
from nestpipe.simulate.workload import BATCHES, of_batches
from nestpipe.trace import RankTrace
from nestpipe.trace.times import steady_steps

MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21)  # bytes
TOO_LONG = 2.0  # seconds; larger messages are left out where one takes that long


def operations(trace: RankTrace) -> dict[str, float]:
    """Median seconds of each operation in the steady state; of one that micro-batches do, of one of them."""
    bounds = steady_steps(trace).bounds
    columns = trace.columns
    counted = (columns.end > bounds[0]) & (columns.end <= bounds[-1])
    return {
        name: float(np.median((columns.end - columns.start)[counted & (columns.op == code)])) / 1e9
        for code, name in enumerate(columns.names)
        if (counted & (columns.op == code)).any()
    }


def lines(points: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Work]:
    """From measurements of two sizes, each (seconds by operation, units by operation): a line through both points. An operation
    whose units are the same in both, or that does not grow with them, has a fixed time."""
    (small, small_units), (large, large_units) = points
    works = {}
    for name in small:
        more = large_units[name] - small_units[name]
        each = max(0.0, (large[name] - small[name]) / more) if more > 0 else 0.0
        fixed = max(0.0, small[name] - each * small_units[name]) if each else (small[name] + large[name]) / 2
        works[name] = Work(fixed, each)
    return works


def link(group: dist.ProcessGroup | None = None, *, repeats: int = 5) -> Level:
    """What links between the workers do when all send to all, as the slowest sees it; all workers call it."""
    transport = Transport(group or dist.group.WORLD)
    peers = transport.world - 1
    if not peers:
        raise ValueError("links are between workers: there is only one")
    points = []
    for size in MESSAGES:
        sent, received = (np.zeros(size * transport.world, np.uint8) for _ in range(2))
        counts = np.full(transport.world, size)
        taken = []
        for _ in range(repeats + 1):
            dist.barrier(group)
            begin = time.perf_counter()
            transport.all_to_all(sent, counts, received, counts)
            taken.append(time.perf_counter() - begin)
        slowest = torch.tensor(statistics.median(taken[1:]), dtype=torch.float64)  # the first opens connections
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        points.append((size * peers, float(slowest)))
        if float(slowest) > TOO_LONG:
            break
    # Weighted so that a short message counts as much as a long one.
    num_bytes, seconds = (np.array(values, np.float64) for values in zip(*points, strict=True))
    a = np.stack([np.ones(len(points)), num_bytes], 1) / seconds[:, None]
    fixed, each = np.linalg.lstsq(a, np.ones(len(points)), rcond=None)[0]
    return Level(latency=max(0.0, float(fixed)) / peers, bandwidth=1 / max(1e-15, float(each)))


# -- a profile of this machine -----------------------------------------------------------------------------------------

STEPS, WARM_UP = 8, 4
ON_DEVICE = (FWD, BWD, DENSE)  # where there is one; the host's cores do all else
QUARTER = 4  # what is measured besides the batch of the config, to tell fixed times from those that grow


def profile(config: Config, *, workers: int, name: str = "this-machine") -> Profile | None:
    """What operations of this config take on one worker of this machine, and what links between workers do.

    Under torchrun all of them call it, and links are those between them, inside a node and between nodes; rank 0 gets the
    profile, the others None.
    """
    launched = process.under_launcher()
    rank, per_node = int(os.environ.get("RANK", 0)), workers
    if launched:
        process.join_group(3600.0)  # the others wait until the first has measured operations
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    measured = None
    if rank == 0:
        tell("profile: operations on one worker")
        threads = max(1, (os.cpu_count() or 1) // per_node)
        measured = run_workers(_operations, config.to_dict(), workers=1, threads=threads)
        tell("profile: links between workers")
    levels = _launched_links(per_node) if launched else _local_links(workers)
    if measured is None:
        return None
    cpu = not torch.accelerator.is_available()
    note = (
        f"Measured by `nestpipe profile`, {per_node} worker(s) a node with {os.cpu_count()} cores: operations on one worker with "
        f"{measured['threads']} thread(s), in batches of {' and '.join(map(str, measured['samples']))} samples;\nlinks when all "
        f"workers send to all. {levels.note}\n"
    )
    return Profile(
        name=name,
        network=Network(per_node, levels.inside, levels.between),
        operations={operation: Work(**work) for operation, work in measured["works"].items()},
        note=note,
        cores=os.cpu_count() or 1,
        hosted=tuple(name for name in units() if cpu or name not in ON_DEVICE),
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node,
        disk=shutil.disk_usage(".").free / per_node,
    )


class _Levels(NamedTuple):
    inside: Level
    between: Level
    note: str


def _local_links(workers: int) -> _Levels:
    if workers == 1:
        guess = Level(latency=1e-4, bandwidth=1e9)
        return _Levels(guess, guess, "With one worker there were no links to measure: those here are a guess.")
    level = Level(**run_workers(_link, workers=workers))
    note = "Links between nodes were not measured and stand here like those inside: put yours in, or run it under torchrun."
    return _Levels(level, level, note)


def _link() -> dict[str, float]:
    return dataclasses.asdict(link())


def _launched_links(per_node: int) -> _Levels:
    world, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    everywhere = link()
    if per_node == world:
        return _Levels(
            everywhere, everywhere, "All workers were on one node: links between nodes stand like those inside."
        )
    inside = everywhere
    for first in range(0, world, per_node):
        group = dist.new_group(list(range(first, min(world, first + per_node))))
        if per_node > 1 and rank // per_node == first // per_node:
            inside = link(group)
    return _Levels(
        inside, everywhere, f"Links between nodes: {world} workers on {-(-world // per_node)} nodes, all to all."
    )


def _operations(values: dict[str, Any]) -> dict[str, Any]:
    config = parse(values)
    if config.train.batch_size is None:
        raise ValueError(
            "config: a profile is measured on batches by samples: give train.batch_size, not train.batch_tokens"
        )
    points, samples = [], []
    works: dict[str, Work] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (max(1, config.train.batch_size // QUARTER), config.train.batch_size):
            now = dataclasses.replace(
                config,
                train=dataclasses.replace(config.train, batch_size=size),
                setting=Setting("serial"),
            )
            trainer, built = make_trainer(now, storage=Path(folder) / str(size), record=True)
            source = built.data.batches("train", batch_size=size, rank=0, world=1, seed=now.train.seed)
            begin = time.perf_counter()
            read = [batch for batch in itertools.islice(source, BATCHES) if batch.size]
            seconds = time.perf_counter() - begin
            if not read:
                raise ValueError("config: the training data is empty, so there is nothing to measure")
            again = itertools.cycle(read)
            trainer.fit(itertools.islice(again, WARM_UP), steps=WARM_UP)
            trainer.recorded(clear=True)
            trainer.fit(itertools.islice(again, STEPS), steps=STEPS)
            load = of_batches("profile", read, built)
            costs = Costs(load, _EMPTY, Setting("serial"), 1)
            taken = operations(trainer.recorded())
            points.append((taken, {operation: costs.units(operation) for operation in taken}))
            samples.append(load.samples)
            works[READ] = Work(0.0, seconds / sum(batch.size for batch in read))
            trainer.close()
    works |= lines(points)
    taken, done = points[1]
    for name in taken:  # of the same parameters in both sizes
        if units()[name] == "byte of dense gradients" and done[name] > 0:
            works[name] = Work(0.0, taken[name] / done[name])
    return {
        "works": {operation: dataclasses.asdict(work) for operation, work in works.items()},
        "samples": samples,
        "threads": torch.get_num_threads(),
    }


_EMPTY = Profile(name="", network=Network(1, *(Level(latency=0.0, bandwidth=1.0),) * 2), operations={})

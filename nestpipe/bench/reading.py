"""`nestpipe bench reading`: what reading costs training, by a compute loop beside the reading of its batches, in a
thread and in a process.

A thread that runs Python code and the compute loop share one GIL. Torch gives it away at every operation and must ask
for it again; a thread that holds it may keep it for a switch interval (5 ms, unless set), each time. So the cost of
reading depends on how much of it holds the GIL, which this measures.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestpipe.batch import Batch, Jagged
from nestpipe.bench.alternate import spread
from nestpipe.bench.progress import tell
from nestpipe.data import Criteo, Dataset, SyntheticClicks, SyntheticSequences
from nestpipe.data.reader import in_process
from nestpipe.engine.loader import Loader
from nestpipe.sections import Section, Table, shown

SHORT_INTERVAL = 0.0005  # seconds


@dataclasses.dataclass(frozen=True)
class Size:
    """settle: steps until a loader that stood still, with a full queue, reads as fast as it is asked to."""

    samples: int  # of a batch; of Python lists a quarter
    lines: int  # of the text file
    layers: int
    rounds: int
    steps: int
    settle: int


FULL = Size(samples=1024, lines=40_000, layers=48, rounds=15, steps=10, settle=4)
QUICK = Size(samples=64, lines=2_000, layers=4, rounds=1, steps=1, settle=1)


class PythonLists:
    """Bags made one key at a time: how a data set looks that was written without a thought of speed."""

    features = ("f0", "f1", "f2", "f3")

    def batches(
        self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0
    ) -> Iterator[Batch]:
        draw = random.Random(seed * 65_537 + epoch)
        while True:
            yield Batch(
                {
                    name: Jagged.from_lists([[draw.randrange(1 << 40) for _ in range(5)] for _ in range(batch_size)])
                    for name in self.features
                },
                labels=torch.tensor([float(draw.random() < 0.5) for _ in range(batch_size)]),
            )


def forever(data: Dataset, batch_size: int) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from data.batches("train", batch_size=batch_size, rank=0, world=1, seed=0, epoch=epoch)


def run(*, quick: bool) -> dict[str, Any]:
    """By data set: ms to read a batch, and by way of reading the ms of a step and its ratio to a step without reading."""
    size = QUICK if quick else FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = {}
            for name, (data, batch_size) in _data_sets(Path(folder), size).items():
                tell(f"reading: {name}")
                results[f"{name}, {batch_size:,}"] = _measure(data, batch_size, size)
            return results
    finally:
        torch.set_num_threads(threads)


def sections(results: dict[str, Any]) -> list[Section]:
    names = list(next(iter(results.values()))["ways"])
    rows = []
    for name, data in results.items():
        ways = data["ways"]
        cells = [shown("{:.1f} ({:.2f}x)", ways[way]["ms"], ways[way]["ratio"]) for way in names[1:]]
        rows.append(
            (
                name,
                shown("{:.1f}", data["read_ms"]),
                shown("{:.1f} ± {:.1f}", ways[names[0]]["ms"], ways[names[0]]["iqr_ms"]),
                *cells,
            )
        )
    columns = (
        "data, samples of a batch",
        "read ms",
        f"{names[0]} ms ± IQR",
        *(f"{name} ms (x {names[0]})" for name in names[1:]),
    )
    note = "A step of compute without reading (alone), and with the reading of its batches beside it, on one thread."
    return [Table("What reading costs training", columns, rows, note)]


def _data_sets(folder: Path, size: Size) -> dict[str, tuple[Any, int]]:
    path = folder / "criteo.tsv"
    draw = random.Random(0)
    row = "\t".join(["{}"] + ["{}"] * 13 + ["{:08x}"] * 26) + "\n"
    with path.open("w") as file:
        for _ in range(size.lines):
            numbers = [draw.randrange(1000) for _ in range(13)]
            file.write(row.format(draw.randrange(2), *numbers, *(draw.randrange(1 << 32) for _ in range(26))))
    return {
        "synthetic_sequences": (SyntheticSequences(), size.samples),
        "synthetic_clicks, 8 x 10 keys": (SyntheticClicks(), size.samples),
        "criteo text": (Criteo(path=str(path), shuffle_buffer=size.lines // 4), size.samples),
        "Python lists, 4 x 5 keys": (PythonLists(), size.samples // 4),
    }


def _measure(data: Dataset, batch_size: int, size: Size) -> dict[str, Any]:
    kept = list(itertools.islice(forever(data, batch_size), 8))
    read_ms = _read_ms(data, batch_size, count=4 * size.steps)
    again = itertools.cycle(kept)
    compute = _compute_loop(num_layers=size.layers)
    loaders: list[Loader] = []

    def beside(batches: Iterator[Batch], interval: float | None = None) -> Callable[[], None]:
        loader = Loader(batches, data.features, skip_nonfinite=False, timeout=60.0)
        loaders.append(loader)
        usual = sys.getswitchinterval()

        def step() -> None:
            if interval is not None:
                sys.setswitchinterval(interval)
            loader.next()
            compute()
            sys.setswitchinterval(usual)

        return step

    with in_process(forever, data, batch_size) as reader:
        try:
            ways: dict[str, Callable[[], None]] = {
                "alone": lambda: (next(again), compute())[1],
                "thread": beside(forever(data, batch_size)),
                "thread, 0.5 ms switch interval": beside(forever(data, batch_size), SHORT_INTERVAL),
                "process": beside(reader),
            }
            return {"read_ms": read_ms, "ways": _alternate(ways, size)}
        finally:
            for loader in loaders:
                loader.close()


def _alternate(ways: dict[str, Callable[[], None]], size: Size) -> dict[str, dict[str, float]]:
    """Medians over rounds of the mean step, and of its ratio to the first way in the same round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(size.rounds):
        for name, step in ways.items():
            for _ in range(size.settle):
                step()
            begin = _own_seconds()
            for _ in range(size.steps):
                step()
            times[name].append(1e3 * (_own_seconds() - begin) / size.steps)
    alone = next(iter(times.values()))
    return {
        name: {
            "ms": statistics.median(log),
            "iqr_ms": spread(log),
            "ratio": statistics.median(ms / alone_ms for ms, alone_ms in zip(log, alone, strict=True)),
        }
        for name, log in times.items()
    }


def _own_seconds() -> float:
    """A clock that stands still while this thread could run but another process has the core.

    It runs on while the thread waits for the GIL or for a batch, which is what is to be seen here; without this, a busy
    machine shows more of its other programs than of the GIL.
    """
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():  # not Linux
        return time.perf_counter()
    before, now = "", 0.0
    while True:  # until the two clocks were read without losing the core between them
        waited = path.read_text().split()[1]
        if waited == before:
            return now - int(waited) * 1e-9
        before, now = waited, time.perf_counter()


def _read_ms(data: Dataset, batch_size: int, *, count: int) -> float:
    """The mean, not the median: a data set that shuffles in a buffer works in bursts."""
    batches = forever(data, batch_size)
    next(batches)
    begin = _own_seconds()
    for _ in itertools.islice(batches, count):
        pass
    return 1e3 * (_own_seconds() - begin) / count


def _compute_loop(*, num_layers: int) -> Callable[[], None]:
    """Forward, backward and update of a model of many small operations, as on one worker of many."""
    torch.manual_seed(0)
    layers = [part for _ in range(num_layers) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    inputs = torch.randn(256, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step

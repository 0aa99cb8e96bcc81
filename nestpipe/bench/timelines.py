"""`nestpipe bench timelines`: each schedule as a picture of a few steps, made by the trace.

The paper's mix of lookup, communication and compute on two workers, all of it emulated (see ablation.py, part mix), with few
micro-batches so that they can be told apart. The pictures and timelines are in runs/timelines/SCHEDULE; docs/schedules.md
shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestpipe import trace
from nestpipe.bench.ablation import Mix, mix_contestants
from nestpipe.bench.contestants import Way, figures, largest
from nestpipe.bench.workers import run_workers

FOLDER = Path("runs/timelines")
MICRO_BATCHES = 4
FULL = Mix(workers=2, step=0.8, steps=16)
QUICK = Mix(workers=2, samples=32, length=10, step=0.1, steps=10)


def run(*, quick: bool) -> dict[str, Any]:
    for way in _ways():
        trace.clear(FOLDER / way.schedule)
    size = QUICK if quick else FULL
    result = run_workers(_record, size, str(FOLDER.absolute()), workers=size.workers, threads=1)
    for way in _ways():
        trace.draw(trace.read(FOLDER / way.schedule)[:1], FOLDER / way.schedule / "trace.png", steps=2)
    return result


def _ways() -> list[Way]:
    cut = [Way(name, MICRO_BATCHES, clustering="window") for name in ("fwp", "nested")]
    return [Way("serial"), Way("dbp"), *cut]


def _record(size: Mix, folder: str) -> dict[str, Any]:
    results = {}
    for one in mix_contestants(size, _ways()):
        one.trainer._engine.recorded(rank=0, world=1, clear=True)
        one.train(size.steps)
        one.trainer.save_trace(Path(folder, one.way.schedule))
        recorded = one.trainer._engine.recorded(rank=one.trainer.rank, world=one.trainer.world)
        results[one.way.schedule] = largest(figures(recorded))
    return results


def table(results: dict[str, Any]) -> str:
    lines = [
        "| schedule | step ms | exposed lookup ms | exposed communication ms | compute ms | picture |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results.items():
        lines.append(
            f"| {name} | {one['step']:.0f} | {one['exposed lookup']:.0f} | {one['exposed communication']:.0f} "
            f"| {one['compute']:.0f} | {FOLDER / name}/trace.png |"
        )
    return "\n".join(lines)

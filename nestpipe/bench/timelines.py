"""`nestpipe bench timelines`: each schedule as a picture of a few steps, made by the trace.

The paper's mix of lookup, communication and compute on two workers, all of it emulated (see mix.py), with few
micro-batches so that they can be told apart. The pictures and timelines are in runs/timelines/SCHEDULE; docs/schedules.md
shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestpipe import trace
from nestpipe.bench import emulated
from nestpipe.bench.figures import bars, largest
from nestpipe.bench.mix import Mix, mix_contestants
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table, shown
from nestpipe.trace.figures import figures

FOLDER = Path("runs/timelines")
MICRO_BATCHES = 4
FULL = Mix(workers=2, step=0.8, steps=16)
QUICK = Mix(workers=2, samples=32, length=10, step=0.1, steps=10)


def run(*, quick: bool) -> dict[str, Any]:
    for setting in _settings():
        trace.clear(FOLDER / setting.schedule)
    size = QUICK if quick else FULL
    result = run_workers(_record, size, str(FOLDER.absolute()), workers=size.workers, threads=1)
    for setting in _settings():
        trace.draw(trace.read(FOLDER / setting.schedule)[:1], FOLDER / setting.schedule / "trace.png", steps=2)
    return result


def _settings() -> list[Setting]:
    cut = [Setting(name, MICRO_BATCHES, clustering="window") for name in ("fwp", "nested", "semi_async")]
    return [Setting("serial"), Setting("dbp"), *cut]


def _record(size: Mix, folder: str) -> dict[str, Any]:
    results = {}
    contestants, _ = mix_contestants(size, _settings())
    for contestant in contestants:
        setting = contestant.setting
        tell(f"timelines: {setting.name}")
        contestant.train(size.steps)
        contestant.trainer.save_trace(Path(folder, setting.schedule))
        results[setting.schedule] = largest(figures(contestant.recorded()))
    return results


def sections(results: dict[str, Any]) -> list[Section]:
    note = f"The paper's mix on 2 workers, all of it on an {emulated.LABEL}."
    rows = [
        (
            name,
            shown("{:.0f} ± {:.0f}", ms["step"], ms["iqr"]),
            shown("{:.0f}", ms["exposed lookup"]),
            shown("{:.0f}", ms["exposed communication"]),
            shown("{:.0f}", ms["compute"]),
            f"{FOLDER / name}/trace.png",
        )
        for name, ms in results.items()
    ]
    columns = ("schedule", "step ms ± IQR", "exposed lookup ms", "exposed communication ms", "compute ms", "picture")
    return [Table("Timelines", columns, rows, note), bars("A step of the pictures", results, note)]

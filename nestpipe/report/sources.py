"""What a page is made of: run folders, and the JSON files of benches."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.schedule.ops import FWD
from nestpipe.sections import Bars, Curves, Section, Table, from_json
from nestpipe.trace import RankSummary, RankTrace, read, summary
from nestpipe.trace.ranks import waits, without_pauses
from nestpipe.trace.record import FOLDER as TRACE

Points = list[tuple[int, float]]
NEEDED: dict[str, type | tuple[type, ...]] = {
    "schedule": str,
    "micro_batches": int,
    "workers": int,
    "steps": int,
    "samples": int,
    "samples_per_second": (int, float),
    "tables": dict,
    "digest": str,
}


@dataclasses.dataclass(frozen=True)
class Start:
    """A run that was resumed has several: steps that each did and the next did not do again, and the seconds between their first
    and last point in the curves."""

    first_step: int
    last_step: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)  # a key of what is computed once for each run
class Run:
    """result, config: empty where the folder has none, as that of a script. traces: without pauses, which took `paused` seconds;
    empty where the run was not recorded, as are ranks and waits (see `trace.ranks`). curves: by TensorBoard's tag, e.g.
    `train/loss`, over all starts.
    """

    name: str
    result: dict[str, Any]
    config: dict[str, Any]
    traces: list[RankTrace]
    ranks: list[RankSummary]
    waits: list[np.ndarray]
    paused: float
    curves: dict[str, Points]
    starts: list[Start]

    @property
    def schedule(self) -> str | None:
        recorded = self.traces[0].schedule if self.traces else self.config.get("schedule", {}).get("name")
        return str(self.result.get("schedule", recorded)) if self.result or recorded else None

    @property
    def micro_batches(self) -> int:
        recorded = (
            max((event.part or 0 for event in self.traces[0].events if event.op == FWD), default=0)
            if self.traces
            else 0
        )
        return int(self.result.get("micro_batches", recorded + 1))

    @property
    def workers(self) -> int | None:
        return self.result.get("workers", len(self.traces) or None)

    @property
    def way(self) -> str:
        """`nested, 8 micro-batches`."""
        parts = self.micro_batches
        return (self.schedule or "unfinished") + (f", {parts} micro-batches" if parts != 1 else "")

    @property
    def samples_per_step(self) -> float | None:
        """Of all workers together."""
        return self.result["samples"] / self.session_steps if self.session_steps else None

    @property
    def session_steps(self) -> int:
        """Steps since the last start, which samples, seconds and bytes of the result are of."""
        return int(self.result.get("session_steps", self.result.get("steps", 0)))

    @property
    def resumed_after(self) -> int:
        """Step after which the last start began."""
        first_recorded = min((event.batch for event in self.traces[0].events), default=0) if self.traces else 0
        return int(self.result.get("resumed_after", first_recorded if len(self.starts) > 1 else 0))

    def mean(self, name: str) -> float:
        """Of a figure of the ranks."""
        return float(sum(getattr(rank, name) for rank in self.ranks) / len(self.ranks))


@dataclasses.dataclass(frozen=True)
class Bench:
    name: str
    suite: str
    quick: bool
    command: str
    machine: dict[str, Any]
    sections: list[Section]


def read_all(paths: Sequence[Path]) -> list[Run | Bench]:
    """In the order given. Raises ValueError for what is neither a run folder nor the JSON of a bench."""
    if not paths:
        raise ValueError("a report needs at least one run folder or JSON file of a bench")
    names = _names(paths)
    return [
        _read_run(path, name) if path.is_dir() else _read_bench(path, name)
        for path, name in zip(paths, names, strict=True)
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, and more of it where that is not enough to tell them apart."""
    whole = [path.absolute().parts[1:] for path in paths]
    depth = 1
    while len({parts[-depth:] for parts in whole}) < len(set(whole)):
        depth += 1
    return ["/".join(parts[-depth:]) for parts in whole]


def _read_run(folder: Path, name: str) -> Run:
    result = _read_result(folder / "result.json") if (folder / "result.json").is_file() else {}
    config_file = folder / "config.json"
    config = _read_json(config_file) if config_file.is_file() else {}
    for section in ("schedule", "train", "tables"):
        _check_objects(config_file, config, section)
    recorded = read(folder) if (folder / TRACE).is_dir() and any((folder / TRACE).glob("rank-*.json")) else []
    curves, starts = _read_curves(folder / "tensorboard")
    if not (result or recorded or curves):
        raise ValueError(
            f"{folder} has no result.json: it is not a run folder, or its run has not finished, and it has no traces or curves "
            f"either; make one with `nestpipe train CONFIG.toml --trace --out {folder}`, or in a script with "
            f"Trainer(..., record=True) and trainer.save_trace({str(folder)!r})"
        )
    traces, paused = without_pauses(recorded) if recorded else ([], 0.0)
    return Run(
        name=name,
        result=result,
        config=config,
        traces=traces,
        ranks=summary(traces),
        waits=waits(traces),
        paused=paused,
        curves=curves,
        starts=starts,
    )


def _read_result(path: Path) -> dict[str, Any]:
    result = _read_json(path)
    missing = [entry for entry in NEEDED if entry not in result]
    if missing:
        raise ValueError(f"{path} has no entry {missing[0]!r}: it is not the result of `nestpipe train`; train again")
    for entry, kind in NEEDED.items():
        if not isinstance(result[entry], kind):
            raise ValueError(f"{path}: {entry!r} is {result[entry]!r:.40}, which nestpipe does not write; train again")
    for entry in ("tables", "metrics"):
        _check_objects(path, result, entry)
    for table in result["tables"]:
        _check_objects(path, result["tables"], table, what="'tables'")
    return result


def _check_objects(path: Path, values: dict[str, Any], entry: str, *, what: str | None = None) -> None:
    """Raises ValueError if an entry that is there is no JSON object."""
    if not isinstance(values.get(entry, {}), dict):
        raise ValueError(f"{path}: {what or repr(entry)} must be a JSON object, got {values[entry]!r:.40}; train again")


def _read_curves(folder: Path) -> tuple[dict[str, Points], list[Start]]:
    """Each start of a run has written a file; steps that a later one did again are taken from that one."""
    files = sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not files:
        return {}, []
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # slow to import

    curves: dict[str, Points] = {}
    times: list[list[tuple[int, float]]] = []  # of each start: step, time of day
    for path in files:
        points = [
            (value.tag, event.step, event.wall_time, value.tensor.float_val[0])
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
            if len(value.tensor.float_val) == 1 and math.isfinite(value.tensor.float_val[0])
        ]
        first = min((step for _, step, _, _ in points), default=sys.maxsize)
        curves = {tag: [point for point in line if point[0] < first] for tag, line in curves.items()}
        times = [[(step, time) for step, time in of_start if step < first] for of_start in times]
        for tag, step, _, value in points:
            curves.setdefault(tag, []).append((step, value))
        times.append([(step, time) for tag, step, time, _ in points if tag.startswith("train/")])
    starts = [Start(kept[0][0], kept[-1][0], kept[-1][1] - kept[0][1]) for kept in times if kept]
    return {tag: line for tag, line in curves.items() if line}, starts


def _read_bench(path: Path, name: str) -> Bench:
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: give run folders, or files written by `nestpipe bench SUITE --json FILE`"
        )
    values = _read_json(path)
    if "suite" not in values:
        trained = "digest" in values and "schedule" in values
        hint = "it is the result of a training: give its run folder" if trained else "is it of another program?"
        raise ValueError(f"{path} was not written by `nestpipe bench SUITE --json {path}`: {hint}")
    suite = str(values["suite"])
    again = f"run `nestpipe bench {suite} --json {path}` again"
    if not isinstance(values.get("sections"), list):
        raise ValueError(f"{path} has no sections to show, an older nestpipe wrote it: {again}")
    try:
        sections = from_json(values["sections"])
        for section in sections:
            _check_shape(section)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; {again}") from None
    machine = values.get("machine")
    return Bench(
        name=name,
        suite=suite,
        quick=bool(values.get("quick")),
        command=str(values.get("command") or f"nestpipe bench {suite}"),
        machine=machine if isinstance(machine, dict) else {},
        sections=sections,
    )


def _check_shape(section: Section) -> None:
    """What from_json cannot know: rows as long as their table is wide, a value for each label or x."""
    if not (isinstance(section.title, str) and isinstance(section.note, str)):
        raise ValueError(
            f"title and note of a section must be text, got {section.title!r:.40} and {section.note!r:.40}"
        )
    rows: dict[str, Sequence[Any]]
    match section:
        case Table():
            rows, width = {f"row {number}": row for number, row in enumerate(section.rows)}, len(section.columns)
        case Bars():
            rows, width = {**section.parts, **section.bounds}, len(section.labels)
        case Curves():
            rows, width = {**section.lines, "x": section.x}, len(section.x)
    for name, row in rows.items():
        if isinstance(row, str) or len(row) != width:
            raise ValueError(f"section {section.title!r}: {name} must have {width} values, got {row!r:.60}")
        if not isinstance(section, Table) and not all(value is None or type(value) in (int, float) for value in row):
            raise ValueError(f"section {section.title!r}: {name} must be numbers, got {row!r:.60}")
    if isinstance(section, Curves) and None in section.x:
        raise ValueError(f"section {section.title!r}: x must be numbers, got {section.x!r:.60}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): write it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not what nestpipe writes: a JSON object was expected, got {str(values)[:40]}")
    return values

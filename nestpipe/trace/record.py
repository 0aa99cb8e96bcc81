"""The recording: which operation ran when, one file per rank, `RUN/trace/rank-R.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nestpipe.files import write_text
from nestpipe.schedule.ops import COMPUTE

FORMAT = 1
FOLDER = "trace"


class Event(NamedTuple):
    """One operation as it ran. A plain tuple of the same six values will do in its place.

    lane: index into the trace's lanes.
    batch, part: the batch, and the micro-batch where the operation is of one.
    start_ns, end_ns: `time.perf_counter_ns` of the rank; waiting for peers inside a collective is part of the
        operation, waiting for other operations before it is not.
    """

    lane: int
    op: str
    batch: int
    part: int | None
    start_ns: int
    end_ns: int

    @property
    def label(self) -> str:
        """`FWD 7.1` is FWD of batch 7, micro-batch 1."""
        return f"{self.op} {self.batch}" + ("" if self.part is None else f".{self.part}")


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """All that one rank recorded.

    text: the schedule as text, one line a lane.
    lanes: their names, in the order in which they are shown; one is "compute". A lane runs one operation at a time.
    wall_ns: what turns an event's time into wall-clock time (`wall_offset_ns`), to lay machines side by side.
    dropped: operations that ran but are not among the events, because the ring that keeps them was full.
    """

    rank: int
    world: int
    schedule: str
    text: str
    lanes: list[str]
    wall_ns: int
    events: list[Event]
    dropped: int = 0

    @functools.cached_property
    def columns(self) -> Columns:
        return Columns.of(self.events)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The same events, in the same order, as arrays; `op` is an index into `names`."""

    lane: np.ndarray
    op: np.ndarray
    batch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    names: list[str]

    @classmethod
    def of(cls, events: list[Event]) -> Columns:
        names = list(dict.fromkeys(event[1] for event in events))
        codes = {name: code for code, name in enumerate(names)}
        rows = [(event[0], codes[event[1]], event[2], event[4], event[5]) for event in events]
        lane, op, batch, start, end = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
        return cls(lane, op, batch, start, end, names)


def wall_offset_ns() -> int:
    """Nanoseconds to add to `time.perf_counter_ns()` for the time of day."""
    return time.time_ns() - time.perf_counter_ns()


def save(run_folder: Path, trace: RankTrace) -> Path:
    """Writes the rank's file, complete or not at all."""
    fields = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
    path = run_folder / FOLDER / f"rank-{trace.rank}.json"
    write_compact(path, {"format": FORMAT, **fields})
    return path


def clear(run_folder: Path) -> None:
    """Removes an earlier run's recording, and what was made of it, so that it cannot be taken for the next one's."""
    for path in (*_rank_files(run_folder), run_folder / "trace.json", run_folder / "trace.png"):
        path.unlink(missing_ok=True)


def read(run_folder: Path) -> list[RankTrace]:
    """The traces of all ranks, rank 0 first. Raises ValueError where they are not those of one whole run."""
    files = _rank_files(run_folder)
    if not files:
        raise ValueError(
            f"{run_folder} has no recorded operations ({run_folder / FOLDER}/rank-0.json): "
            f"record them with `nestpipe train ... --trace`"
        )
    traces = sorted((_read_rank(path) for path in files), key=lambda trace: trace.rank)
    for name in ("world", "schedule"):
        values = {getattr(trace, name): trace.rank for trace in traces}
        if len(values) > 1:
            told = ", ".join(f"{value} (rank {rank})" for value, rank in values.items())
            raise ValueError(
                f"{run_folder / FOLDER} has traces of different runs: {name} is {told}; "
                f"delete the folder and run again with --trace"
            )
    missing = sorted(set(range(traces[0].world)) - {trace.rank for trace in traces})
    if missing:
        raise ValueError(
            f"{run_folder / FOLDER} has no trace of rank {', '.join(map(str, missing))} of {traces[0].world}: "
            f"the run did not finish there, or its files are on another machine (copy them here)"
        )
    return traces


def write_compact(path: Path, value: Any) -> None:
    """JSON without spaces (a trace has many small lists), complete or not at all."""
    write_text(path, json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")


def _rank_files(run_folder: Path) -> list[Path]:
    return sorted((run_folder / FOLDER).glob("rank-*.json"))


def _read_rank(path: Path) -> RankTrace:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is cut short or not JSON ({error}): run again with --trace") from error
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError(f"{path} is not a trace: it has no entry 'format'; run again with --trace")
    if values["format"] != FORMAT:
        raise ValueError(
            f"{path} has trace format {values['format']}, this nestpipe reads format {FORMAT}: "
            f"use the version that recorded it, or run again with --trace"
        )
    fields: dict[str, Any] = {}
    kinds: dict[str, type] = {"schedule": str, "text": str, "lanes": list, "events": list}
    for field in dataclasses.fields(RankTrace):
        value = values.get(field.name)
        kind = kinds.get(field.name, int)
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {field.name!r} must be of type {kind.__name__}, got {value!r:.50}")
        fields[field.name] = value
    if path.name != f"rank-{fields['rank']}.json" or not 0 <= fields["rank"] < fields["world"]:
        raise ValueError(f"{path} says it is of rank {fields['rank']} of {fields['world']}: it was renamed or mixed up")
    if COMPUTE not in fields["lanes"]:
        raise ValueError(f"{path}: the lanes {fields['lanes']} have no {COMPUTE!r}, against which others are measured")
    fields["events"] = [_event(row, number, len(fields["lanes"]), path) for number, row in enumerate(fields["events"])]
    return RankTrace(**fields)


def _event(row: Any, number: int, lanes: int, path: Path) -> Event:
    try:
        event = Event(*row)
        valid = 0 <= event.lane < lanes and event.start_ns <= event.end_ns
        valid = (
            valid and type(event.op) is str and type(event.batch) is type(event.start_ns) is type(event.end_ns) is int
        )
        valid = valid and type(event.lane) is int and (event.part is None or type(event.part) is int)
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(
            f"{path}: event {number} must be [lane below {lanes}, op, batch, part or null, start_ns, end_ns], got {row!r:.90}"
        )
    return event

"""Several runs beside each other: what a step's time goes to, how much faster, how far from the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestpipe.report.markup import NOTHING, figure
from nestpipe.report.shares import PARTS, chart, longest_lane, shares
from nestpipe.report.sources import Run
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Bars, Section, Table

COLUMNS = ("run", "workers", "samples/s", "speed-up", "step", *PARTS[1:4], "longest lane", "step / longest lane",
           "last loss", "digest")  # fmt: skip


def sections(runs: Sequence[Run]) -> list[Section]:
    """Against the first run that hides nothing, else the first. Bars of times only of runs that were recorded."""
    labels = _labels(runs)
    base = next((number for number, run in enumerate(runs) if _hides_nothing(run)), 0)
    recorded = [(label, run) for label, run in zip(labels, runs, strict=True) if run.ranks]
    all_recorded = len(recorded) == len(runs)
    if any(run.samples_per_step is None for run in runs) and all_recorded:  # those of scripts: by steps per second
        speeds = [1e3 / run.mean("mean_step_ms") for run in runs]
    else:
        speeds = [_speed(run, all_recorded) for run in runs]
    gains = [speed / (speeds[base] or 1.0) for speed in speeds]
    bounds = [
        gain * run.mean("mean_step_ms") / longest_lane(run) for gain, run in zip(gains, runs, strict=True) if run.ranks
    ]
    return [
        *([chart([run for _, run in recorded], [label for label, _ in recorded])] if recorded else []),
        Bars(
            title=f"Speed-up over {labels[base]}",
            unit="x",
            labels=labels,
            parts={"speed-up": gains},
            bounds={"were a step as short as the run's longest lane": bounds} if all_recorded else {},
            note=_how(runs, all_recorded),
        ),
        Table(
            "Side by side",
            COLUMNS,
            [_row(label, run, gain) for label, run, gain in zip(labels, runs, gains, strict=True)],
            _digests(runs),
        ),
    ]


def _hides_nothing(run: Run) -> bool:
    return run.schedule in SCHEDULES and Setting(run.schedule).hides_nothing


def _labels(runs: Sequence[Run]) -> list[str]:
    """The schedule where that tells the runs apart, otherwise with the name of the run."""
    ways = [run.way for run in runs]
    return [f"{run.way} ({run.name})" if ways.count(run.way) > 1 else run.way for run in runs]


def _speed(run: Run, steady: bool) -> float:
    """Samples per second; of a recorded run without the first steps, which compile and fill the pipeline. 0: not known."""
    if steady:
        return (run.samples_per_step or 1.0) / run.mean("mean_step_ms") * 1e3
    return float(run.result.get("samples_per_second", 0.0))


def _how(runs: Sequence[Run], steady: bool) -> str:
    how = "By samples per second in the steady state of the recording."
    if any(not run.result for run in runs):
        how = "By the time of a step: some of the runs do not say how many samples it has."
    elif not steady:
        how = "By samples per second of the whole run, first steps included: not all were recorded (`--trace`)."
    values: dict[str, list[Any]] = {
        "workers": [run.workers for run in runs],
        "samples in a step": [run.samples_per_step for run in runs],
        "model": [run.config.get("model") for run in runs],
        "data": [run.config.get("data") for run in runs],
    }
    differing = [name for name, each in values.items() if any(value != each[0] for value in each)]
    return how + (f" **These runs differ in more than their schedule**: {', '.join(differing)}." if differing else "")


def _digests(runs: Sequence[Run]) -> str:
    digests = {run.result.get("digest") for run in runs}
    if None in digests:
        return ""
    if len(digests) == 1:
        return "All end with the same digest: every row, its state and the dense weights are the same, to the bit."
    return (
        "Digests differ: rows, state or weights are not all the same. They are for the same data, split and steps only."
    )


def _row(label: str, run: Run, gain: float) -> list[str]:
    times = [NOTHING] * 6
    if run.ranks:
        step, parts, longest = run.mean("mean_step_ms"), shares(run), longest_lane(run)
        exposed = [f"{parts[name]:.1f} ms, {parts[name] / step:.1%}" for name in PARTS[1:4]]
        times = [f"{step:.1f} ms", *exposed, f"{longest:.1f} ms", f"{step / longest:.3f}"]
    result = run.result
    return [
        label,
        str(run.workers or NOTHING),
        f"{result['samples_per_second']:,.0f}" if result else NOTHING,
        f"{gain:.2f}x",
        *times,
        figure(result.get("last_loss")),
        f"`{result['digest'][:8]}`" if result else NOTHING,
    ]

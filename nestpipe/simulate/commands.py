"""`nestpipe simulate` and `nestpipe plan`: from a config and a profile to tables, a plot and a timeline."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestpipe import trace
from nestpipe.config import Config, read
from nestpipe.errors import did_you_mean
from nestpipe.files import check_writable, write_json
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, markdown, to_json
from nestpipe.simulate import plan, profile, sweep
from nestpipe.simulate.keys import Growth, zipf
from nestpipe.simulate.profile import Profile
from nestpipe.simulate.workload import Workload, of_config

MICRO_BATCHES = 8  # of schedules that cut the batch, where the config does not say how often
SHOWN = 4  # workers on the timeline


def settings_of(config: Config, schedules: Sequence[str], replicas: int | None = None) -> list[Setting]:
    replicas = config.setting.replicas if replicas is None else replicas
    asked = config.setting.micro_batches
    cut = asked if isinstance(asked, int) and asked > 1 else MICRO_BATCHES
    settings = []
    for name in schedules:
        if name not in SCHEDULES:
            raise ValueError(f"--schedules names {name!r}, {did_you_mean(name, list(SCHEDULES))}")
        setting = dataclasses.replace(config.setting, schedule=name, replicas=replicas, look_ahead=None)
        settings.append(setting.cut_into(cut if setting.cuts else 1))
    return settings


def simulate(
    path: Path,
    overrides: Sequence[str],
    *,
    profile_name: str,
    counts: Sequence[int],
    schedules: Sequence[str],
    replicas: int | None,
    laws: Sequence[str],
    steps: int,
    seed: int,
    folder: Path,
    json_file: Path | None,
    command: Sequence[str],
) -> str:
    """Writes FOLDER/simulate.json, scaling.png and the timeline of the config's schedule on the largest count; returns what
    to print."""
    check_writable(json_file, folder=folder)
    config, cluster = read(path, overrides), profile.read(profile_name)
    settings = settings_of(config, schedules, replicas)
    load = with_laws(of_config(config), laws)
    predictions = sweep.sweep(load, cluster, settings, counts, steps=steps, seed=seed)
    note = f"{describe(load)} on {cluster.name}."
    sections = list(sweep.sections(predictions, note))
    document = _document("simulate", command, sections, sweep.results(predictions), cluster)
    write_json(folder / "simulate.json", document)
    if json_file is not None:
        write_json(json_file, document)
    from nestpipe.simulate.plot import draw  # half a second to import

    draw(predictions, folder / "scaling.png", title=note)
    shown = next((setting for setting in settings if setting.schedule == config.setting.schedule), settings[-1])
    timeline(load, cluster, shown, max(counts), folder, seed=seed)
    return "\n\n".join(
        [
            markdown(sections),
            f"plot: {folder}/scaling.png\ntimeline of {shown.name} on {max(counts):,} workers: {folder}/trace.png, "
            f"{folder}/trace.json (open ui.perfetto.dev, then drop the file on the page)\n"
            f"page: nestpipe report {folder}/simulate.json",
        ]
    )


def timeline(load: Workload, cluster: Profile, setting: Setting, workers: int, folder: Path, *, seed: int = 0) -> None:
    """As `nestpipe trace` shows a run, of the first workers."""
    simulated, costs = sweep.run(load, cluster, setting, workers, seed=seed)
    shown = min(len(costs.counts), SHOWN)
    trace.clear(folder)
    for worker in range(shown):
        trace.save(folder, dataclasses.replace(simulated.trace(worker), world=shown))
    trace.report(folder)


def make_plan(
    path: Path,
    overrides: Sequence[str],
    *,
    profile_name: str,
    workers: int,
    rows: Sequence[str],
    laws: Sequence[str],
    json_file: Path | None,
    command: Sequence[str],
) -> str:
    check_writable(json_file)
    config, cluster = read(path, overrides), profile.read(profile_name)
    counted = dict(_rows(text) for text in rows)
    load = with_laws(of_config(config), laws)
    choices = plan.plan(load, cluster, workers, counted)
    note = f"{describe(load)} on {workers:,} workers of {cluster.name}. Predicted, not measured."
    sections = plan.sections(choices, note)
    if json_file is not None:
        write_json(json_file, _document("plan", command, sections, plan.results(choices), cluster))
    return "\n\n".join([markdown(sections), plan.told(choices, cluster, workers, counted)])


def describe(load: Workload) -> str:
    distinct = sum(table.growth(table.keys) for table in load.tables)
    flops = (load.forward_flops + load.backward_flops) / 1e9
    return (
        f"{load.name}: {load.samples} samples a worker, {load.keys:,.0f} keys of which {distinct:,.0f} distinct, "
        f"{flops:,.1f} GFLOP, {load.dense_bytes / 1e6:,.1f} MB of dense parameters,"
    )


def with_laws(load: Workload, laws: Sequence[str]) -> Workload:
    """The same batch, with distinct keys of some tables by a power law instead of as counted in the data."""
    names = [table.name for table in load.tables]
    growths: dict[str, Growth] = {}
    for text in laws:
        name, _, law = text.partition("=")
        skew, _, items = law.partition(",")
        try:
            growths[name] = zipf(float(skew), float(items.replace("_", "")))
        except ValueError as error:
            raise ValueError(
                f"--zipf {text!r}: write it as TABLE=SKEW,ITEMS, for example --zipf item=1.05,1e10 ({error})"
            ) from None
        if name not in names:
            raise ValueError(f"--zipf names table {name!r}, {did_you_mean(name, names)}")
    tables = [dataclasses.replace(table, growth=growths.get(table.name, table.growth)) for table in load.tables]
    return dataclasses.replace(load, tables=tables)


def _rows(text: str) -> tuple[str, float]:
    name, sign, number = text.partition("=")
    try:
        count = float(number.replace("_", ""))
        if not sign or not name or not count >= 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"--rows {text!r}: write it as TABLE=COUNT, for example --rows item=1e9") from None
    return name, count


def _document(
    suite: str, command: Sequence[str], sections: Sequence[Section], results: Any, cluster: Profile
) -> dict[str, Any]:
    """As a bench writes it, so that `nestpipe report` shows it."""
    return {
        "suite": suite,
        "quick": False,
        "command": shlex.join(["nestpipe", *command]),
        "machine": {"simulated": cluster.name},
        "sections": to_json(sections),
        "results": results,
        "profile": profile.to_toml(cluster),
    }

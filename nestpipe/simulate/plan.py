"""What to rent and how to train on it: memory of each tier, and the setting with the shortest predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import FWD
from nestpipe.schedule.setting import NEAR, Setting
from nestpipe.sections import Section, Table, shown
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.profile import Profile
from nestpipe.simulate.sweep import Prediction, predict
from nestpipe.simulate.workload import Workload
from nestpipe.sizes import num_bytes
from nestpipe.tables import DEFAULT_MEMORY

INDEX = 26  # bytes a key, while the index doubles (docs/storage.md)
DENSE_COPIES = 4  # parameters, gradients, and two of Adam
IN_FLIGHT = 3  # batches of a pipeline whose keys, rows or gradients are somewhere between their owners and the model
CUTS = (2, 4, 8, 16, 32)
REPLICAS = (2, 4, 8)
AS_GOOD = 1.01  # a simpler setting is taken if it is no more than this times as long


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one worker. What the model keeps between forward and backward is not in it.

    device: two buffers of rows, what travels, the dense part; 0 where the profile has no device of its own.
    host: tables in memory, indexes and budgets of tables on disk; without a device the rest as well.
    disk: rows of tables on disk.
    """

    device: float
    host: float
    disk: float

    def short_of(self, profile: Profile) -> list[str]:
        """Tiers that it does not fit, as far as the profile knows their size."""
        limits = {"device": profile.device_memory, "host": profile.host_memory, "disk": profile.disk}
        return [name for name, limit in limits.items() if limit and getattr(self, name) > limit]


@dataclasses.dataclass(frozen=True)
class Choice:
    setting: Setting
    prediction: Prediction
    memory: Memory
    short_of: Sequence[str]


def memory(
    workload: Workload,
    profile: Profile,
    setting: Setting,
    workers: int,
    rows: Mapping[str, float],
) -> Memory:
    """Of the worker that has most. rows: of each table, over all workers; one that is not named counts as empty."""
    unknown = sorted(set(rows) - {table.name for table in workload.tables})
    if unknown:
        known = ", ".join(table.name for table in workload.tables)
        raise ValueError(f"--rows names a table {unknown[0]!r}; the config has {known}")
    costs = Costs(workload, profile, setting, workers)
    host = disk = 0.0
    for table in workload.tables:
        owners = min(costs.group, table.owners or costs.group)
        mine = rows.get(table.name, 0.0) / owners
        if table.tier == "disk":
            host += num_bytes(table.memory or DEFAULT_MEMORY) / owners
            disk += mine * (table.record + 16) * 4096 / (4096 - 232)  # slots in blocks, see docs/storage.md
        else:
            host += mine * (table.record + INDEX)
    records = sum(t.growth(t.keys * costs.group) / costs.group * t.record for t in workload.tables)
    moving = 4 * costs.moved_bytes  # rows that leave and come, gradients that leave and come
    batches = IN_FLIGHT if setting.hides_lookups else 1
    working = 2 * records + batches * moving + DENSE_COPIES * workload.dense_bytes
    working += batches * workload.input_bytes
    if profile.device_memory:
        return Memory(working, host, disk)
    return Memory(0.0, host + working, disk)


def settings(workers: int, clustering: Sequence[str] = ("window", "taper")) -> list[Setting]:
    """Every exact one, the simplest first."""
    uncut = [setting for setting in map(Setting, SCHEDULES) if setting.is_exact]
    cut = [
        dataclasses.replace(setting, micro_batches=count, clustering=how)
        for count in CUTS
        for how in clustering
        for setting in uncut
        if setting.cuts
    ]
    more = [m for m in REPLICAS if workers % m == 0 and workers // m > 1]
    replicated = [
        dataclasses.replace(setting, replicas=m, near=near) for m in more for near in NEAR for setting in (*uncut, *cut)
    ]
    return [*uncut, *cut, *replicated]


def plan(
    workload: Workload,
    profile: Profile,
    workers: int,
    rows: Mapping[str, float],
) -> list[Choice]:
    """All settings, the best first: those that fit before those that do not; of those about as fast, the simplest first."""
    choices = []
    for setting in settings(workers):
        if setting.parts > workload.samples:
            continue
        needed = memory(workload, profile, setting, workers, rows)
        predicted = predict(workload, profile, setting, workers)
        choices.append(Choice(setting, predicted, needed, needed.short_of(profile)))
    simplicity = {choice.setting: place for place, choice in enumerate(choices)}
    left, ranked = sorted(choices, key=lambda choice: (len(choice.short_of), choice.prediction.step)), []
    while left:
        alike = [
            choice
            for choice in left
            if len(choice.short_of) == len(left[0].short_of)
            and choice.prediction.step <= AS_GOOD * left[0].prediction.step
        ]
        ranked.append(min(alike, key=lambda choice: simplicity[choice.setting]))
        left.remove(ranked[-1])
    return ranked


# -- the result --------------------------------------------------------------------------------------------------------


def told(choices: Sequence[Choice], profile: Profile, workers: int, rows: Mapping[str, float]) -> str:
    """In words: the best, and its runner-up."""
    best = choices[0]
    other = next((choice for choice in choices[1:] if choice.setting.schedule != best.setting.schedule), None)
    lines = [
        f"On {workers:,} workers of {profile.name}: {_toml(best.setting)}",
        f"  predicted step {best.prediction.step:,.1f} ms, utilization {best.prediction.utilization:.1%}, "
        f"{best.prediction.samples_per_second:,.0f} samples/s; the busiest lane is {best.prediction.limit} "
        f"({best.prediction.limit_op})",
    ]
    if other is not None:
        ratio = other.prediction.step / best.prediction.step
        lines.append(f"  runner-up: {other.setting.name}, {other.prediction.step:,.1f} ms ({ratio:.2f} times as long)")
    if best.setting.replicas > 1:
        single = next(choice for choice in choices if choice.setting.replicas == 1)
        lines.append(
            f"  with one replica of the tables it would be {single.prediction.step:,.1f} ms ({single.setting.name})"
            + (", which does not fit" if single.short_of else "")
        )
    needed, limits = best.memory, {
        "device": profile.device_memory, "host": profile.host_memory, "disk": profile.disk,
    }  # fmt: skip
    sizes = [
        f"{name} {_size(getattr(needed, name))}" + (f" of {_size(limit)}" if limit else "")
        for name, limit in limits.items()
        if getattr(needed, name)
    ]
    lines.append(f"  memory of a worker, without the model's activations: {', '.join(sizes)}")
    if best.short_of:
        lines.append(
            f"  DOES NOT FIT: {' and '.join(best.short_of)}; use more workers, or tier = 'disk' for the largest table"
        )
    if best.setting.parts > 1 and not profile.work(FWD).fixed:
        lines.append(
            f"  {profile.name} knows no fixed time of a forward, so cutting the batch finer looks free here: try fewer "
            f"micro-batches too"
        )
    if not rows:
        lines.append("  tables are counted as empty: say how many rows they will have with --rows TABLE=COUNT")
    return "\n".join(lines)


def _toml(setting: Setting) -> str:
    cut = f", micro_batches = {setting.micro_batches}, clustering = {setting.clustering!r}"
    replicas = f", replicas = {setting.replicas}" if setting.replicas > 1 else ""
    replicas += f", near = {setting.near!r}" if replicas and setting.near != Setting.near else ""
    return f"schedule {setting.schedule!r}" + (cut if setting.parts > 1 else "") + replicas


def _size(value: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value / 1e3:.1f} kB"


def sections(choices: Sequence[Choice], note: str, *, most: int = 12) -> list[Section]:
    rows = [
        (
            choice.setting.name,
            shown("{:,.1f}", choice.prediction.step),
            shown("{:.1%}", choice.prediction.utilization),
            shown(_size(choice.memory.device) if choice.memory.device else "", choice.memory.device),
            shown(_size(choice.memory.host), choice.memory.host),
            shown(_size(choice.memory.disk) if choice.memory.disk else "", choice.memory.disk),
            f"no: {', '.join(choice.short_of)}" if choice.short_of else "yes",
        )
        for choice in choices[:most]
    ]
    columns = ("setting", "step ms", "utilization", "device", "host", "disk", "fits")
    title = f"The best {len(rows)} of {len(choices)} settings; of those within {AS_GOOD - 1:.0%} the simplest first"
    return [Table(title, columns, rows, note)]


def results(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {**dataclasses.asdict(choice), "utilization": choice.prediction.utilization, "fits": not choice.short_of}
        for choice in choices
    ]

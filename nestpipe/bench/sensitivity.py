"""`nestpipe bench sensitivity`: one thing at a time is changed from a base point, to see where nesting gains and where not.

Two workers on links of a limited rate. Compute is an emulated accelerator with a fixed time per token, so that it stays the same
while an axis changes what travels; at the base point a model that really computes (CPU) stands beside it.

micro-batches   N of fwp and nested; serial and dbp do not cut their batch.
dim             of rows: bytes grow with it, compute does not.
length          of sequences, with fewer samples so that tokens of a batch stay the same.
keys            uniform, Zipf, and sessions: how often a batch has the same key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from nestpipe.bench import emulated
from nestpipe.bench.computing import Layers, layers_for
from nestpipe.bench.contestants import Law, alternate, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import COLUMNS, EXPLAINED, cells, verdict
from nestpipe.bench.links import links
from nestpipe.bench.progress import tell
from nestpipe.bench.workers import run_workers
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Bars, Curves, Section, Table, shown
from nestpipe.trainer import Trainer

WORKERS = 2
AXES = ("micro-batches", "dim", "length", "keys")


@dataclasses.dataclass(frozen=True)
class Point:
    """tokens: of a worker's batch; a sequence of `length` is a sample."""

    micro_batches: int = 8
    dim: int = 64
    length: int = 50
    law: Law = Law(1.05)
    tokens: int = 25_600

    @property
    def samples(self) -> int:
        return self.tokens // self.length

    def settings(self) -> list[Setting]:
        return [Setting("serial"), Setting("nested", self.micro_batches, clustering="window")]


@dataclasses.dataclass(frozen=True)
class Size:
    """seconds_per_token: at the base point FWD and BWD are then about 1.4 times the communication.
    steps, short: of a block of a schedule that hides lookups, and of one that does not, where nothing fills and drains."""

    base: Point = Point()
    cuts: Sequence[int] = (1, 2, 4, 8, 16, 32)
    dims: Sequence[int] = (16, 32, 64, 128, 256)
    lengths: Sequence[int] = (10, 25, 50, 100, 200)
    laws: Sequence[Law] = (Law(0), Law(1.05), Law(1.2), Law(1.05, per_user=4))
    rate: str = "150mbit"
    seconds_per_token: float = 9e-6
    batches: int = 4  # in turn
    rounds: int = 2
    steps: int = 12
    short: int = 6

    def points(self, axis: str) -> dict[str, Point]:
        """By what is changed; all contestants of the axis "micro-batches" share one point."""
        if axis == "dim":
            return {str(dim): dataclasses.replace(self.base, dim=dim) for dim in self.dims}
        if axis == "length":
            return {str(length): dataclasses.replace(self.base, length=length) for length in self.lengths}
        return {law.name: dataclasses.replace(self.base, law=law) for law in self.laws}

    def cut_settings(self) -> list[Setting]:
        cut = [Setting(name, n, clustering="window") for name in ("fwp", "nested") for n in self.cuts]
        return [Setting("serial"), Setting("dbp"), *cut]

    def steps_of(self, setting: Setting) -> int:
        return self.steps if setting.hides_lookups else self.short


FULL = Size()
QUICK = Size(
    base=Point(micro_batches=4, tokens=2_000, length=20),
    cuts=(2, 4),
    dims=(16, 64),
    lengths=(10, 20),
    laws=(Law(0), Law(1.05, per_user=4)),
    rate="100mbit",
    seconds_per_token=1e-5,
    batches=2,
    rounds=1,
    steps=8,
    short=4,
)


def run(*, quick: bool) -> dict[str, Any]:
    return measure(QUICK if quick else FULL)


def measure(size: Size, axes: Sequence[str] = AXES, *, real: bool = True) -> dict[str, Any]:
    """{"axes": {axis: {value: {contestant: figures}}}, "cpu": the base point with real compute}"""
    results: dict[str, Any] = {"size": dataclasses.asdict(size), "axes": {}}
    with links(WORKERS, rate=size.rate) as made:
        results |= {"links": made.label, "why": made.why}
        start = partial(run_workers, workers=WORKERS, threads=1, links=made)
        for axis in axes:
            tell(f"sensitivity: {axis}")
            results["axes"][axis] = (
                start(_measure_cuts, size) if axis == "micro-batches" else start(_measure, size, axis)
            )
        if real:
            results["cpu"] = start(_measure_cpu, size)
    return results


def _measure_cuts(size: Size) -> dict[str, Any]:
    """By N; serial and dbp, which have none, are the same for all."""
    load_everything()
    ms = _point(size, size.base, size.cut_settings(), "sensitivity: micro-batches")
    return {
        str(n): {s.schedule: ms[s.name] for s in size.cut_settings() if not s.cuts or s.micro_batches == n}
        for n in size.cuts
    }


def _measure(size: Size, axis: str) -> dict[str, Any]:
    load_everything()
    results = {}
    for value, point in size.points(axis).items():
        ms = _point(size, point, point.settings(), f"sensitivity: {axis} {value}")
        results[value] = {setting.schedule: ms[setting.name] for setting in point.settings()}
    return results


def _measure_cpu(size: Size) -> dict[str, Any]:
    load_everything()
    base = size.base
    pool = pool_of(base.law, base.samples, base.length, count=size.batches)
    layers = layers_for(base.tokens * size.seconds_per_token * 1e3, pool, steps=size.short)
    model = partial(Layers, layers, dim=base.dim)
    ms = _point(size, base, base.settings(), "sensitivity: real compute", model=model)
    return {"layers": layers, "ms": {setting.schedule: ms[setting.name] for setting in base.settings()}}


def _point(
    size: Size, point: Point, settings: Sequence[Setting], what: str, *, model: Callable[[], nn.Module] | None = None
) -> dict[str, dict[str, float]]:
    """Figures by contestant; of an emulated accelerator unless a model is given that really computes."""
    pool = pool_of(point.law, point.samples, point.length, count=size.batches)
    prepare: Callable[[Trainer], None] | None = None
    if model is None:
        model, prepare = partial(EmulatedModel, dim=point.dim), partial(pad, seconds_per_token=size.seconds_per_token)
    contestants = [in_memory(setting, model(), pool, prepare, dim=point.dim, warm_up=len(pool)) for setting in settings]
    return verdict(alternate(contestants, rounds=size.rounds, steps=size.steps_of, what=what))


# -- the result --------------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    size = results["size"]
    base = size["base"]
    where = f"2 workers on {results['links']}{' (' + results['why'] + ')' if results['why'] else ''}"
    note = (
        f"{where}; compute is an {emulated.LABEL} of {size['seconds_per_token'] * 1e6:g} us a token, {base['tokens']:,} tokens a "
        f"batch and worker whatever the axis. Base: N = {base['micro_batches']}, dim {base['dim']}, length {base['length']}, "
        f"{Law(**base['law']).name} keys; clustering window. "
    )
    page: list[Section] = []
    for axis, values in results["axes"].items():
        page += _axis(axis, values, note)
    if "cpu" in results:
        cpu = results["cpu"]
        real = f"{where}; real compute on the CPU, {cpu['layers']} layers, at the base point of the emulated axes. "
        rows = [(name, *_cells(figures)) for name, figures in cpu["ms"].items()]
        page.append(Table("The base point with real compute (CPU)", ("schedule", *_COLUMNS), rows, real + EXPLAINED))
    return page


def _axis(axis: str, values: Mapping[str, Any], note: str) -> Iterator[Section]:
    title = f"Sensitivity to {axis}, {emulated.LABEL}"
    rows: list[tuple[str, ...]] = []
    for value, ms in values.items():
        for name, figures in ms.items():
            uncut = axis == "micro-batches" and not Setting(name).cuts
            if not uncut:
                label = value if axis == "keys" else shown(value, float(value))
                rows.append((label, name, *_cells(figures)))
            elif ms is next(iter(values.values())):  # the same for all
                rows.append(("", name, *_cells(figures)))
    yield Table(title, (axis, "schedule", *_COLUMNS), rows, note + EXPLAINED)
    names = next(iter(values.values()))
    for key, what in (("speedup", "speed-up over serial"), ("exposed of serial", "exposed, of serial communication")):
        lines = {name: [ms[name][key] for ms in values.values()] for name in names}
        if axis == "keys":  # has no order: a bar each
            for name in (name for name in lines if name != "serial"):
                yield Bars(f"{title}: {what}, {name}", "x", list(values), {what: lines[name]}, note=note)
        else:
            yield Curves(f"{title}: {what}", axis, what, [float(value) for value in values], lines, note)


_COLUMNS = (*COLUMNS, "compute ms", "communication ms", "exposed, of the serial run's")


def _cells(figures: Mapping[str, float]) -> tuple[str, ...]:
    return (
        *cells(figures),
        shown("{:.0f}", figures["compute"]),
        shown("{:.0f}", figures["communication"]),
        shown("{:.1%}", figures["exposed of serial"]),
    )

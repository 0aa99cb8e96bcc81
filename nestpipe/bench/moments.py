"""Steps of rows that M replicas update and average, beside those of one table ("1D") that all groups share.

The kernels are those of training; gradients are drawn, and do not depend on the rows, so that both see the same ones. A
replica gets the gradient of its group, the one table the mean over all groups. Of a row counts how far it has moved from one
averaging to the next, since nobody but its replica sees where it is in between; and of that the root of the mean square over
rows, since the way of a single one is mostly chance where gradients are noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nestpipe.bench.alternate import alternate
from nestpipe.kernels import update
from nestpipe.kernels.average import average, average_row_scaled
from nestpipe.kernels.rows import ONES, rows_of
from nestpipe.kernels.update import ROW_SCALED_FLOATS, Gradients
from nestpipe.sections import Section, Table, shown, shown_list

f32 = np.float32
LR, EPS = f32(0.05), f32(1e-20)
COMMON = f32(1), LR, f32(0), f32(0)  # scale, lr, weight_decay, clip
BY_ROW = "row"


@dataclasses.dataclass(frozen=True)
class Size:
    """touches: at which the first steps are shown. every: steps between averagings.
    cost_rows: of `cost_dim` values, that are updated and averaged against the clock."""

    replicas: int = 8
    rows: int = 256
    dim: int = 16
    steps: int = 200
    touches: Sequence[int] = (1, 10, 100)
    every: Sequence[int] = (1, 4)
    cost_rows: int = 20_000
    cost_dim: int = 64
    rounds: int = 7


FULL = Size()
QUICK = Size(rows=24, steps=40, touches=(1, 10), cost_rows=500, rounds=1)


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Where gradients come from. signal_ND: what the mean gradient of each row would be without noise."""

    rng: np.random.Generator
    num_replicas: int
    signal_ND: np.ndarray

    def noise(self) -> np.ndarray:
        return self.rng.standard_normal((self.num_replicas, *self.signal_ND.shape), np.float32)

    def rare(self) -> np.ndarray:
        """Those of one group only, M times as large as in the mean."""
        of_group = self.rng.integers(0, self.num_replicas, len(self.signal_ND))
        is_touched = of_group == np.arange(self.num_replicas)[:, None]
        return np.where(is_touched[:, :, None], f32(self.num_replicas) * self.noise(), f32(0))

    def mixed(self) -> np.ndarray:
        return self.signal_ND + self.noise()

    def irregular(self) -> np.ndarray:
        is_touched = self.rng.random((self.num_replicas, len(self.signal_ND), 1)) < 0.5
        return np.where(is_touched, self.mixed(), f32(0))

    def consistent(self) -> np.ndarray:
        return np.broadcast_to(self.noise()[:1], (self.num_replicas, *self.signal_ND.shape))


# What groups do to a row in a step, [M, N, D]; a gradient of zeros: the group does not touch it.
KINDS: dict[str, Callable[[Drawn], np.ndarray]] = {
    "rare: one group at a time": Drawn.rare,
    "noisy: independent of group and step": Drawn.noise,
    "mixed: signal and noise of equal size": Drawn.mixed,
    "irregular: mixed, each group in half of the steps": Drawn.irregular,
    "consistent: all groups the same": Drawn.consistent,
}


# -- what moves --------------------------------------------------------------------------------------------------------


class OneTable:
    def __init__(self, size: Size) -> None:
        self._records, self._dim = np.zeros((size.rows, size.dim + 1), np.float32), size.dim
        self._scratch = update.scratch_for(size.dim)

    @property
    def values(self) -> np.ndarray:
        return self._records[:, : self._dim]

    def step(self, grads_MND: np.ndarray) -> None:
        mean = grads_MND.mean(0)
        at = np.flatnonzero(mean.any(1))
        update.rowwise_adagrad(rows_of(self._records), at, one_each(mean[at]), self._scratch, *COMMON, f32(1e-10))


class Replicas:
    """M tables that are averaged after every `every` steps. scale: c, or BY_ROW."""

    def __init__(self, size: Size, scale: float | str, every: int) -> None:
        self._scale, self._every, self._dim, self._steps = scale, every, size.dim, 0
        words = size.dim + (ROW_SCALED_FLOATS if scale == BY_ROW else 1)
        self._records_MNW = np.zeros((size.replicas, size.rows, words), np.float32)
        self._scratch = update.scratch_for(size.dim)

    @property
    def values(self) -> np.ndarray:
        """As they were averaged last."""
        return self._records_MNW[0, :, : self._dim]

    def step(self, grads_MND: np.ndarray) -> bool:
        """Whether they were averaged after it."""
        is_touched = np.asarray(grads_MND.any(2))
        sharers = is_touched.sum(0)
        for records, grads, touched in zip(self._records_MNW, grads_MND, is_touched, strict=True):
            at = np.flatnonzero(touched)
            common = rows_of(records), at, one_each(grads[at]), self._scratch, *COMMON, EPS
            if self._scale == BY_ROW:
                update.row_scaled_adagrad(*common, len(self._records_MNW), sharers[at])
            else:
                update.scaled_rowwise_adagrad(*common, f32(self._scale))
        self._steps += 1
        if self._steps % self._every:
            return False
        out = np.empty_like(self._records_MNW[0])
        (average_row_scaled if self._scale == BY_ROW else average)(self._records_MNW, self._dim, False, out)
        self._records_MNW[:] = out
        return True


def one_each(grads: np.ndarray) -> Gradients:
    """Gradients of rows, one for each."""
    everything = np.arange(len(grads) + 1, dtype=np.int32)
    return Gradients(grads, everything, everything[:-1], ONES)


class Race:
    """Replicas and the one table on the same gradients: squared movements of both, window by window."""

    def __init__(self, size: Size, scale: float | str, every: int) -> None:
        self._size, self._every = size, every
        self._replicas = Replicas(size, scale, every)
        self._before = self._before_1d = np.zeros((size.rows, size.dim), np.float32)
        self._moved: list[tuple[float, float]] = []

    def step(self, grads_MND: np.ndarray, one_table: OneTable) -> None:
        if self._replicas.step(grads_MND):
            now, now_1d = self._replicas.values.copy(), one_table.values.copy()
            ways = now - self._before, now_1d - self._before_1d
            self._moved.append(tuple(float(np.square(way, dtype=np.float64).sum()) for way in ways))  # type: ignore[arg-type]
            self._before, self._before_1d = now, now_1d

    def ratios(self) -> dict[str, Any]:
        """Of the windows with the touches that are shown, and of the second half of all."""
        moved = np.array(self._moved)
        at = [(touch - 1) // self._every for touch in self._size.touches]
        first, steady = moved[at], moved[len(moved) // 2 :].sum(0)
        return {
            "touches": np.sqrt(first[:, 0] / first[:, 1]).tolist(),
            "steady": float(np.sqrt(steady[0] / steady[1])),
        }


def measure(size: Size) -> dict[str, Any]:
    """{kind: {steps between averagings: {scale: ratios of what replicas move to what one table does}}}"""
    results: dict[str, Any] = {}
    for number, (kind, draw) in enumerate(KINDS.items()):
        rng = np.random.default_rng(number)
        drawn = Drawn(rng, size.replicas, rng.standard_normal((size.rows, size.dim), np.float32))
        one_table = OneTable(size)
        races = {
            every: {str(scale): Race(size, scale, every) for scale in (1, size.replicas, BY_ROW)}
            for every in size.every
        }
        for _ in range(size.steps):
            grads_MND = np.ascontiguousarray(draw(drawn))
            one_table.step(grads_MND)
            for by_scale in races.values():
                for race in by_scale.values():
                    race.step(grads_MND, one_table)
        results[kind] = {
            str(every): {name: race.ratios() for name, race in by_scale.items()} for every, by_scale in races.items()
        }
    return results


def measure_cost(size: Size) -> dict[str, dict[str, float]]:
    """Of a row: nanoseconds of CPU time to update it, and to average its replicas; bytes of state beside it."""
    n, dim = size.cost_rows, size.cost_dim
    rng = np.random.default_rng(0)
    grads, scratch, at = one_each(rng.standard_normal((n, dim), np.float32)), update.scratch_for(dim), np.arange(n)
    sharers = np.full(n, size.replicas)
    rules: dict[str, tuple[Any, tuple[Any, ...], Any, int]] = {
        "RowwiseAdagrad": (update.rowwise_adagrad, (EPS,), average, 1),
        "one scale": (update.scaled_rowwise_adagrad, (EPS, f32(size.replicas)), average, 1),
        "row": (update.row_scaled_adagrad, (EPS, size.replicas, sharers), average_row_scaled, ROW_SCALED_FLOATS),
    }
    contestants: dict[str, Callable[[], object]] = {}
    for name, (apply, own, merge, floats) in rules.items():
        records = rng.random((size.replicas, n, dim + floats), np.float32)
        out = np.empty_like(records[0])

        def updated(apply: Any = apply, own: Any = own, records: Any = records) -> None:
            apply(rows_of(records[0]), at, grads, scratch, *COMMON, *own)

        def averaged(merge: Any = merge, records: Any = records, out: Any = out) -> None:
            merge(records, dim, False, out)

        contestants |= {f"update {name}": updated, f"average {name}": averaged}
    timings = alternate(contestants, rounds=size.rounds, steps=3, warmup=1)
    return {
        name: {
            "update_ns": timings[f"update {name}"].cpu_ms * 1e6 / n,
            "average_ns": timings[f"average {name}"].cpu_ms * 1e6 / n,
            "state_bytes": 4.0 * floats,
        }
        for name, (_, _, _, floats) in rules.items()
    }


# -- as it is shown ----------------------------------------------------------------------------------------------------


def sections(size: dict[str, Any], ratios: dict[str, Any], cost: dict[str, Any]) -> list[Section]:
    replicas, touches = size["replicas"], " / ".join(map(str, size["touches"]))
    rows = [
        (
            kind,
            shown("{:.0f}", float(every)),
            *(shown_list("{:.2f}", [*ratio["touches"], ratio["steady"]]) for ratio in by_scale.values()),
        )
        for kind, by_every in ratios.items()
        for every, by_scale in by_every.items()
    ]
    note = (
        f"{replicas} replicas, {size['rows']} rows of {size['dim']} values, the kernels of training on drawn gradients. "
        f"How far the averaged row moves from one averaging to the next (root of the mean square over rows), relative to one "
        f"table that gets the mean gradient; 1.00 is right. Windows with touch {touches} / the second half of "
        f"{size['steps']} steps."
    )
    columns = ("gradients of a row", "steps between averagings", "c = 1", f"c = M = {replicas}", "row")
    cost_rows = [
        (
            name,
            shown("{:.0f}", figures["state_bytes"]),
            shown("{:.0f}", figures["update_ns"]),
            shown("{:.0f}", figures["average_ns"]),
        )
        for name, figures in cost.items()
    ]
    cost_note = (
        f"{size['cost_rows']:,} rows of {size['cost_dim']} float32; CPU time of one thread, averaged from {replicas} "
        f"replicas."
    )
    return [
        Table("Moment scaling: steps relative to one table", columns, rows, note),
        Table(
            "Moment scaling: cost of a row",
            ("scale", "bytes of state", "update ns", "average ns"),
            cost_rows,
            cost_note,
        ),
    ]

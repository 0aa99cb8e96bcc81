"""Learning rates of a step: of the rows of each table, and of the dense optimizer, the same on every worker."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from nestpipe.engine.dense import Dense
from nestpipe.rates import Schedule, factor_at
from nestpipe.store.table_store import TableStore

MARKS = 2**20  # squares of so large numbers, of thousands of workers, have a sum that a float64 holds exactly


@dataclasses.dataclass(frozen=True)
class StepRates:
    """rows: by table. dense: by group of the dense optimizer, with dense_factor: what a schedule makes of its own rates."""

    rows: list[float]
    dense: list[float]
    dense_factor: float

    @property
    def mark(self) -> int:
        """A number that other rates hardly have."""
        rates = [*self.rows, *self.dense]
        return zlib.crc32(struct.pack(f"{len(rates)}d", *rates)) % MARKS

    def named(self, stores: Sequence[TableStore], step: int) -> dict[str, Any]:
        rows = {f"table {store.table.name!r}": rate for store, rate in zip(stores, self.rows, strict=True)}
        dense = {f"dense group {number}": rate for number, rate in enumerate(self.dense)}
        return {f"learning rate of {what} in step {step + 1}": rate for what, rate in {**rows, **dense}.items()}


class Rates:
    """What was declared, times what `scale_lr` was told last, times the factor of the step.

    lr_schedule: of tables that have none of their own; of the dense optimizer too, unless it has a torch scheduler.
    """

    def __init__(self, lr_schedule: Schedule | None, dense: Dense) -> None:
        self._lr_schedule, self._dense = lr_schedule, dense

    def at(self, step: int, stores: Sequence[TableStore]) -> StepRates:
        """In which update the step counts, from 0, whatever the schedule works ahead."""
        common = factor_at(self._lr_schedule, step)
        rows = []
        for store in stores:
            own = store.table.lr_schedule
            rows.append(store.lr * (common if own is None else factor_at(own, step)))
        factor = self._dense.lr_scale * (common if self._dense.lr_scheduler is None else 1.0)
        return StepRates(rows, [rate * factor for rate in self._dense.learning_rates()], factor)


def all_alike(sum_of_marks: float, sum_of_squares: float, world: int) -> bool:
    """Whether all workers had the same mark, as all of them can tell: its variance is 0."""
    return int(sum_of_marks) ** 2 == int(sum_of_squares) * world

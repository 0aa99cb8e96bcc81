"""Balance: how evenly tables and what they are asked for lie on the workers."""

from __future__ import annotations

import dataclasses

import numpy as np

from nestpipe.engine.step import StepOperations


@dataclasses.dataclass(frozen=True)
class Balance:
    """By worker, of the steps of a call of `fit`.

    keys: that it was asked for as the owner of their rows, by itself included.
    rows: that it holds, at the end.
    bytes: of keys, rows and gradients that it sent.
    """

    keys: list[int]
    rows: list[int]
    bytes: list[int]

    @property
    def ratios(self) -> dict[str, float]:
        """The most over the mean; 1 is even."""
        return {name: _ratio(values) for name, values in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.ratios.items())


def _ratio(values: list[int]) -> float:
    mean = sum(values) / max(1, len(values))
    return max(values) / mean if mean else 1.0


class Counts:
    """What this worker has done since it was made."""

    def __init__(self, ops: StepOperations) -> None:
        self._ops, self._before = ops, self._now(ops)

    @staticmethod
    def _now(ops: StepOperations) -> np.ndarray:
        return np.array([ops.keys_asked, 0, ops.keys.bytes_sent + ops.rows.bytes_sent])

    def gather(self) -> Balance:
        """All workers call it."""
        rows = self._ops.rows
        counts = np.zeros((rows.world, 3), np.int64)
        counts[rows.rank] = self._now(self._ops) - self._before
        counts[rows.rank, 1] = sum(len(store) for store in self._ops.stores)
        return Balance(*rows.sum(counts).T.tolist())

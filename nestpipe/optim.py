"""Row optimizers: what happens to a row when its gradient arrives.

Only rows that a batch touched are updated, once per batch, with the gradient summed over all workers and divided by
the global weight. Each optimizer keeps its state in floats beside the row; `state_floats` says how many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any


def _is_number(value: Any, *, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Settings that every row optimizer has.

    lr: learning rate; `Trainer.scale_lr` changes it during a run.
    weight_decay: L2 term added to the gradient of rows that the batch touched (as torch optimizers do it).
    clip: largest Euclidean norm of one row's gradient; longer ones are scaled down to it. 0 means no limit.
    """

    lr: float = 0.05
    weight_decay: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        self._check_numbers(field.name for field in dataclasses.fields(self))

    def _check_numbers(self, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(self, name)
            if not _is_number(value, least=0):
                raise ValueError(f"{type(self).__name__}: {name} must be a finite number >= 0, got {value!r}")

    def state_floats(self, dim: int) -> int:
        """How many float32 of state lie beside a row of `dim` values."""
        return 0

    @property
    def first_state(self) -> float:
        """What every float of state of a newborn row is: the setting `initial` if there is one, else 0."""
        return getattr(self, "initial", 0.0)

    @property
    def state_kind(self) -> str:
        """What a checkpoint calls the state; one with another name does not fit."""
        return type(self).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """row -= lr * grad"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """sum += grad^2; row -= lr * grad / (sqrt(sum) + eps), each value with its own sum (as torch.optim.Adagrad)."""

    eps: float = 1e-10
    initial: float = 0.0

    def state_floats(self, dim: int) -> int:
        return dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(RowOptimizer):
    """sum += mean(grad^2); row -= lr * grad / (sqrt(sum) + eps): one sum per row, the field's default for large tables."""

    eps: float = 1e-10
    initial: float = 0.0

    def state_floats(self, dim: int) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledRowwiseAdagrad(RowOptimizer):
    """sum += mean(grad^2); row -= lr * grad / sqrt(sum / c + eps): row-wise AdaGrad for a table that M groups of workers
    hold a replica of each, update with the gradients of their own samples, and average every few steps.

    A replica's gradients are larger and noisier than their mean over all groups, so its sum grows too fast. With c = 1 a row
    that few groups use, or on which they disagree, takes steps up to sqrt(M) times shorter than in one table that all groups
    share. With c = M these are right, but a row on which the groups agree takes steps sqrt(M) times longer. docs/two_d.md has
    the figures. Without replicas c is 1, whatever `scale` says.

    eps: under the root. The default is that of RowwiseAdagrad, squared.
    initial: what the sum starts with.
    scale: c. "replicas" is M, as published. "row" estimates it for each row from how many groups use the row and how much
        their gradients agree; it also makes `clip` and `weight_decay` act as they would on the mean gradient. State beside a
        row is then 9 floats instead of 1. A number of at least 1 is c itself.
    """

    eps: float = 1e-20
    initial: float = 0.0
    scale: float | str = "replicas"

    def __post_init__(self) -> None:
        self._check_numbers(field.name for field in dataclasses.fields(self) if field.name != "scale")
        if self.scale not in ("replicas", "row") and not _is_number(self.scale, least=1):
            raise ValueError(
                f"{type(self).__name__}: scale must be 'replicas', 'row' or a finite number >= 1, got {self.scale!r}"
            )

    @property
    def is_by_row(self) -> bool:
        return self.scale == "row"

    def divisor(self, num_replicas: int) -> float:
        """c, where it is the same for all rows."""
        if num_replicas == 1:
            return 1.0
        return float(num_replicas if self.scale == "replicas" else self.scale)

    def state_floats(self, dim: int) -> int:
        return 9 if self.is_by_row else 1

    @property
    def first_state(self) -> float:
        return 0.0 if self.is_by_row else self.initial  # by row it stands beside eps under the root

    @property
    def state_kind(self) -> str:
        return f"{type(self).__name__} by row" if self.is_by_row else type(self).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Lazy Adam: both moments move only when the row is touched; bias correction counts the table's updates
    (as torch.optim.SparseAdam)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.beta1 < 1 and self.beta2 < 1):
            raise ValueError(f"Adam: beta1 and beta2 must be below 1, got {self.beta1} and {self.beta2}")

    def state_floats(self, dim: int) -> int:
        return 2 * dim


OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "scaled_rowwise_adagrad": ScaledRowwiseAdagrad,
    "adam": Adam,
}

"""Row optimizers: what happens to a row when its gradient arrives.

Only rows that a batch touched are updated, once per batch, with the gradient summed over all workers and divided by
the global weight. Each optimizer keeps its state in floats beside the row; `state_floats` says how many.
"""

from __future__ import annotations

import dataclasses
import math


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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{type(self).__name__}: {field.name} must be a finite number >= 0, got {value!r}")

    def state_floats(self, dim: int) -> int:
        """How many float32 of state lie beside a row of `dim` values."""
        return 0


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
    "adam": Adam,
}

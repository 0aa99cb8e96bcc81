"""Where a run's curves go: TensorBoard, MLflow, Weights & Biases, each a callback of `Trainer.fit`, and the bar on a terminal.

`train.track = ["tensorboard", "mlflow"]` in a config names them. `tracker` is what they share: who adds another one writes the
four methods at its end. Packages are imported when a run begins to use them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe.tracking.mlflow import MLflow
    from nestpipe.tracking.tensorboard import TensorBoard
    from nestpipe.tracking.tracker import Tracker
    from nestpipe.tracking.wandb import WeightsAndBiases

__all__ = ["MLflow", "TensorBoard", "Tracker", "WeightsAndBiases"]

# By the names that configs have: the class, in the file of that name, and what must be installed.
TRACKERS = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "mlflow": ("MLflow", "mlflow"),
    "wandb": ("WeightsAndBiases", "wandb"),
}
_HOMES = {name: home for home, (name, _) in TRACKERS.items()} | {"Tracker": "tracker"}


def tracker_class(name: str) -> type[Tracker]:
    return getattr(importlib.import_module(f"nestpipe.tracking.{name}"), TRACKERS[name][0])


def check_installed(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker whose package is not there."""
    for name in names:
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"train.track has {name!r}, and {package} is not installed: pip install 'nestpipe[{name}]', or leave it out"
            )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nestpipe.tracking.{_HOMES[name]}"), name)

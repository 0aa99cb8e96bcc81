"""nestpipe: train recommendation models with embedding tables of any size, sharded by key over all workers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nestpipe.importing import nothing_collected

if TYPE_CHECKING:
    from nestpipe.batch import Batch, Jagged, Output, Streamed
    from nestpipe.best import Best
    from nestpipe.callbacks import Callback
    from nestpipe.engine.context import StepResult
    from nestpipe.errors import TrainingError
    from nestpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
    from nestpipe.rates import LRSchedule
    from nestpipe.serve.bundle import Bundle, load_bundle
    from nestpipe.strings import hash_strings
    from nestpipe.tables import Eviction, Feature, Normal, Table, Uniform
    from nestpipe.trainer import FitResult, Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD", "Adagrad", "Adam", "Batch", "Best", "Bundle", "Callback", "Eviction", "Feature", "FitResult", "Jagged",
    "LRSchedule", "Normal", "Output", "RowwiseAdagrad", "ScaledRowwiseAdagrad", "StepResult", "Streamed", "Table", "Trainer",
    "TrainingError", "Uniform", "hash_strings", "load_bundle",
]  # fmt: skip

# Where each stands. Imported when it is first asked for: torch takes seconds, and `nestpipe --help` needs none of it.
_HOMES = {
    "batch": ("Batch", "Jagged", "Output", "Streamed"),
    "best": ("Best",),
    "callbacks": ("Callback",),
    "engine.context": ("StepResult",),
    "errors": ("TrainingError",),
    "optim": ("SGD", "Adagrad", "Adam", "RowwiseAdagrad", "ScaledRowwiseAdagrad"),
    "rates": ("LRSchedule",),
    "serve.bundle": ("Bundle", "load_bundle"),
    "strings": ("hash_strings",),
    "tables": ("Eviction", "Feature", "Normal", "Table", "Uniform"),
    "trainer": ("FitResult", "Trainer"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with nothing_collected():
                value = globals()[name] = getattr(importlib.import_module(f"nestpipe.{home}"), name)
            return value
    raise AttributeError(f"module 'nestpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

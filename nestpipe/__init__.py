"""nestpipe: train recommendation models with embedding tables of any size, sharded by key over all workers."""

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.engine.context import StepResult
from nestpipe.errors import TrainingError
from nestpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from nestpipe.tables import Eviction, Feature, Normal, Table, Uniform
from nestpipe.trainer import FitResult, Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD", "Adagrad", "Adam", "Batch", "Eviction", "Feature", "FitResult", "Jagged", "Normal", "Output",
    "RowwiseAdagrad", "StepResult", "Table", "Trainer", "TrainingError", "Uniform",
]  # fmt: skip

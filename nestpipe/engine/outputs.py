"""What a model returned, checked: losses of each sample, by task where there are several."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor, nn

from nestpipe.batch import Jagged, Output
from nestpipe.ops.precision import wide

Predictions = Tensor | Jagged


@dataclasses.dataclass(eq=False)
class Task:
    """One of several: its own losses [B]; weights [B], for reports; and what it predicts, if it does."""

    losses: Tensor
    weights: Tensor | None = None
    predictions: Predictions | None = None

    def counted(self, part: Predictions) -> Predictions:
        """What belongs to samples whose weight is above 0: the others have no label for this task."""
        if self.weights is None or bool((self.weights > 0).all()):
            return part
        samples = (self.weights > 0).nonzero()[:, 0]
        if isinstance(part, Jagged):
            return part.select(samples.to(part.offsets.device))
        return part[samples.to(part.device)]


@dataclasses.dataclass(eq=False)
class Checked:
    """losses: [B], what is trained on: the sum over tasks. weights: [B], what they are divided by; 1 each if None. predictions:
    of a model without tasks. tasks: by name, in the order that the model declares."""

    losses: Tensor
    weights: Tensor | None = None
    predictions: Predictions | None = None
    tasks: dict[str, Task] = dataclasses.field(default_factory=dict)


def tasks_of(model: nn.Module) -> tuple[str, ...]:
    """The tasks that a model declares, so that all workers know of them, also one that has no samples. (A module or a number
    under that name is the model's own business.)"""
    tasks = getattr(model, "tasks", ())
    if not isinstance(tasks, tuple | list) or not all(isinstance(name, str) for name in tasks):
        return ()
    if len(set(tasks)) < len(tasks) or "" in tasks or any("/" in name for name in tasks):
        raise ValueError(f"the model declares tasks = {tuple(tasks)!r}; they must be different names without '/'")
    return tuple(tasks)


def sums_of(losses: Tensor, weights: Tensor | None) -> np.ndarray:
    """Of losses and weights of a batch."""
    return np.array(
        [float(losses.detach().double().sum()), len(losses) if weights is None else float(weights.double().sum())]
    )


def mean_of(loss: float, weight: float) -> float:
    return loss / weight if weight else float("nan")


def checked_output(output: Any, size: int, tasks: tuple[str, ...] = ()) -> Checked:
    """Losses of one per sample, from whatever the model returned; in float32, as all that follows expects them."""
    output = output if isinstance(output, Output) else Output(output)
    output = Output(*(wide(part) for part in (output.losses, output.weights, output.predictions)))
    if tasks or isinstance(output.losses, dict):
        return _of_tasks(output, size, tasks)
    for what in ("weights", "predictions"):
        if isinstance(getattr(output, what), dict):
            raise ValueError(f"the model returned {what} by task and losses of no task; give losses by task too")
    checked = Checked(output.losses, output.weights, output.predictions)
    _check_losses(checked.losses, size)
    _check_weights(checked.weights, size)
    _check_predictions(checked.predictions, size)
    return checked


def _of_tasks(output: Output, size: int, tasks: tuple[str, ...]) -> Checked:
    losses, weights, predictions = output.losses, output.weights, output.predictions
    if not isinstance(losses, dict):
        raise ValueError(
            f"the model declares tasks = {tasks!r} and returned losses of no task; return Output with a dict of losses by task"
        )
    if set(losses) != set(tasks) or not tasks:
        raise ValueError(
            f"the model returned losses of the tasks {', '.join(map(repr, losses)) or 'none'} and declares "
            f"{', '.join(map(repr, tasks)) or 'none'}; say in the model which tasks it has, as in tasks = {tuple(losses)!r}, "
            f"and return losses of all of them for every batch (zeros where a sample has no label)"
        )
    for what, given in (("weights", weights), ("predictions", predictions)):
        unknown = [name for name in given if name not in tasks] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(f"the model returned {what} of {unknown[0]!r}, which is none of its tasks {tasks!r}")
    if predictions is not None and not isinstance(predictions, dict):
        raise ValueError("the model returned losses by task and predictions of no task; give predictions by task too")
    checked: dict[str, Task] = {}
    for name in tasks:
        of_task = weights.get(name) if isinstance(weights, dict) else weights
        task = checked[name] = Task(losses[name], of_task, (predictions or {}).get(name))
        where = f" of task {name!r}"
        _check_losses(task.losses, size, where)
        if isinstance(weights, dict):
            _check_weights(task.weights, size, where)
        _check_predictions(task.predictions, size, where)
    common = None if isinstance(weights, dict) else weights
    _check_weights(common, size)
    total, *others = (task.losses for task in checked.values())
    for more in others:  # in the order that is declared: the same sum on every worker
        total = total + more
    return Checked(total, common, None, checked)


def _check_losses(losses: Any, size: int, where: str = "") -> None:
    if not isinstance(losses, Tensor):
        raise ValueError(
            f"the model returned {type(losses).__name__}{where}; return a tensor of losses, one per sample, or an Output"
        )
    if losses.shape != (size,):
        kind = "a scalar loss" if losses.ndim == 0 else f"losses of shape {tuple(losses.shape)}"
        raise ValueError(
            f"the model returned {kind}{where} for {size} samples; return one loss per sample, shape [{size}], and let the "
            f"trainer take the mean (with reduction='none' in torch's loss functions)"
        )


def _check_weights(weights: Tensor | None, size: int, where: str = "") -> None:
    if weights is not None and weights.shape != (size,):
        raise ValueError(
            f"the model returned weights of shape {tuple(weights.shape)}{where} for {size} samples; give one per sample"
        )
    # NaN is told with the sample's name, or its batch skipped, if it is divided by; in a report nobody else would notice it.
    wrong = None if weights is None else ~(weights >= 0) if where else weights < 0
    if weights is not None and wrong is not None and wrong.any():
        sample = int(wrong.nonzero()[0])
        weight = float(weights[sample])
        raise ValueError(
            f"the model returned the weight {weight}{where} for sample {sample} of its micro-batch; it must be >= 0"
        )


def _check_predictions(predictions: Any, size: int, where: str = "") -> None:
    if isinstance(predictions, Jagged) and len(predictions) != size:
        raise ValueError(
            f"the model returned predictions{where} for {len(predictions)} samples of {size}; give one list per sample"
        )
    if isinstance(predictions, Tensor) and predictions.shape[:1] != (size,):
        raise ValueError(
            f"the model returned predictions of shape {tuple(predictions.shape)}{where} for {size} samples; give one per sample"
        )

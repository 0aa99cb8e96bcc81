"""What a training step's result keeps of predictions, for curves of training: see StepResult.predicted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nestpipe.batch import SINGLE, Batch, Jagged, labels_of
from nestpipe.engine.outputs import Checked, Task


def scored(output: Checked, batch: Batch) -> tuple[Any, Any] | None:
    """(predictions, labels) of the samples that have a label, both by task where there are several; None: there are none, or
    more than one number for each sample or candidate.

    Copies: they outlive the batch, and must not keep what they are a part of.
    """
    labels = labels_of(batch)
    tasks = output.tasks or {SINGLE: Task(output.losses, None, output.predictions)}
    pairs = {
        name: _labelled(task.predictions, labels[name], task.weights)
        for name, task in tasks.items()
        if name in labels and _is_flat(task.predictions) and _is_flat(labels[name])
    }
    if SINGLE in pairs:
        return pairs[SINGLE]
    by_task = ({name: pair[place] for name, pair in pairs.items()} for place in (0, 1))
    return (next(by_task), next(by_task)) if pairs else None


def _is_flat(part: Any) -> bool:
    values = part.values if isinstance(part, Jagged) else part
    return isinstance(values, Tensor) and values.ndim == 1


def _labelled(predictions: Any, labels: Any, weights: Tensor | None) -> tuple[Any, Any]:
    """Without samples of weight 0, which have no label for this task; as evaluations leave them out."""
    if weights is not None and len(predictions) == len(labels) == len(weights) and not bool((weights > 0).all()):
        samples = (weights > 0).nonzero()[:, 0]
        predictions, labels = _select(predictions, samples), _select(labels, samples)
    return _copied(predictions), _copied(labels)


def _select(part: Tensor | Jagged, samples: Tensor) -> Tensor | Jagged:
    return part.select(samples) if isinstance(part, Jagged) else part[samples]


def _copied(part: Tensor | Jagged) -> Tensor | Jagged:
    return part.like(part.values.detach().clone()) if isinstance(part, Jagged) else part.detach().clone()

"""Metrics of others, torchmetrics' say, whose `compute` takes no group of workers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.batch import Jagged
from nestpipe.metrics.merging import merging


def takes_group(metric: Any) -> bool:
    """Whether it merges over workers as metrics here do."""
    try:
        parameters = inspect.signature(metric.compute).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return True  # what is wrong with it shows when it is called
    return any(p.name == "group" or p.kind is p.VAR_KEYWORD for p in parameters)


class OfEverybody:
    """A metric with `update(predictions, labels)`, `compute()` and `reset()` that gives the number of all workers' samples, on
    every worker: there it is fed all of them when it is computed. It keeps what it is fed in memory until then. The metric may
    ask for lists (`takes_lists`) and for the group of each sample (`group`), as those here do.

    (torchmetrics can merge by itself, but not if a worker has no samples: empty states travel in another type.)
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._name, self._metric = name, metric
        self.takes_lists, self.group = getattr(metric, "takes_lists", False), getattr(metric, "group", None)
        self._kept: list[tuple[Tensor | Jagged, ...]] = []

    def update(self, predictions: Tensor | Jagged, labels: Tensor | Jagged, *groups: Tensor) -> None:
        self._kept.append(tuple(_kept(part) for part in (predictions, labels, *groups)))

    def compute(self, *, group: Any = None) -> float:
        everybody = [self._kept]
        if merging(group):
            everybody = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everybody, self._kept, group=group)
        updates = [parts for kept in everybody for parts in kept]
        # Clicks: metrics of classes take whole numbers only. Asked of all samples: one batch of ratings may have no others.
        clicks = all(_are_clicks(labels) for _, labels, *_ in updates)
        device = getattr(self._metric, "device", torch.device("cpu"))
        _alone(self._metric)
        for predictions, labels, *groups in updates:
            parts = predictions, _whole(labels) if clicks else labels, *groups
            self._metric.update(*(part.to(device) for part in parts))
        if not updates:
            return float("nan")
        value = self._metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"metric {self._name!r} ({type(self._metric).__name__}) gives {type(value).__name__} {value!r:.80}; an "
                f"evaluation takes one number of each metric: average it, or give the metrics of a collection one by one"
            ) from None


def _kept(part: Tensor | Jagged) -> Tensor | Jagged:
    cpu = torch.device("cpu")
    return Jagged(part.values.detach(), part.offsets).to(cpu) if isinstance(part, Jagged) else part.detach().to(cpu)


def _are_clicks(labels: Tensor | Jagged) -> bool:
    values = labels.values if isinstance(labels, Jagged) else labels
    return bool(((values == 0) | (values == 1)).all())


def _whole(labels: Tensor | Jagged) -> Tensor | Jagged:
    return labels.like(labels.values.long()) if isinstance(labels, Jagged) else labels.long()


def _alone(metric: Any) -> None:
    """torchmetrics would merge over workers what each of them has been fed in full."""
    parts: list[Any] = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    for part in parts:
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = lambda: False

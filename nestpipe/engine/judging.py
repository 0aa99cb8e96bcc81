"""What an evaluation does with each batch: losses, metrics of predictions, ranks of targets; by task where there are several."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import SINGLE, Batch, Jagged, labels_of
from nestpipe.engine.dense import call
from nestpipe.engine.outputs import Checked, Task, sums_of, tasks_of
from nestpipe.errors import did_you_mean
from nestpipe.inference import BLOCK, recommend, seen_of
from nestpipe.metrics.everybody import OfEverybody, takes_group
from nestpipe.metrics.ranking import in_lists, rank_all
from nestpipe.ops.precision import wide

Judge = Callable[[Batch, dict[str, Any]], None]  # looks at a batch and its rows

# Metrics without `reset` that an evaluation has fed, by id, as long as they live.
_used: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def start_anew(metrics: Mapping[str, Any]) -> None:
    """Metrics forget what they were fed before, so that an evaluation is of its own batches only."""
    names: dict[int, str] = {}
    for name, metric in metrics.items():
        if id(metric) in names:
            raise ValueError(
                f"metrics {names[id(metric)]!r} and {name!r} are one and the same object, which would be fed every batch twice; "
                f"make one for each name"
            )
        names[id(metric)] = name
    for name, metric in metrics.items():
        if hasattr(metric, "reset"):
            metric.reset()
        elif id(metric) in _used:
            raise ValueError(
                f"metric {name!r} ({type(metric).__name__}) has been used before and would add this evaluation to the last "
                f"one; give its class a reset(), or make a new one for every evaluation"
            )
        else:
            try:
                _used[id(metric)] = metric
            except TypeError:  # __slots__: no weak references
                raise ValueError(
                    f"metric {name!r} ({type(metric).__name__}) has no reset(), and because of its __slots__ it cannot be told "
                    f"whether it has been used before; give its class a reset()"
                ) from None


@dataclasses.dataclass
class Judged:
    """A metric, the task whose predictions it is fed, and the name of its result."""

    name: str
    task: str
    metric: Any


def by_task(metrics: Mapping[str, Any], tasks: tuple[str, ...]) -> list[Judged]:
    """Of a model with tasks, "click/AUC" is of one of them, and "AUC" of each, with a copy of the metric for each. A metric whose
    `compute` takes no group is fed the samples of all workers."""
    judged: list[Judged] = []
    for name, metric in metrics.items():
        task, slash, _ = name.partition("/")
        if not tasks:
            judged.append(Judged(name, SINGLE, metric))
        elif slash and task in tasks:
            judged.append(Judged(name, task, metric))
        elif slash:
            raise ValueError(f"metric {name!r} is of the task {task!r}, {did_you_mean(task, list(tasks))}")
        else:
            judged += [Judged(f"{task}/{name}", task, copy.deepcopy(metric)) for task in tasks]
    names = [one.name for one in judged]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"metrics {twice!r} and {twice.partition('/')[2]!r}, which is of every task, are the same; give one of them"
        )
    return [
        dataclasses.replace(one, metric=one.metric if takes_group(one.metric) else OfEverybody(one.name, one.metric))
        for one in judged
    ]


def judge_losses(
    model: nn.Module, metrics: list[Judged], *, autocast: Callable[[], Any] = contextlib.nullcontext
) -> tuple[Judge, np.ndarray]:
    """Adds losses and weights of a batch up in the returned array, first of all tasks together, then of each; and feeds
    predictions to the metrics. autocast: around what the model computes; metrics are outside."""
    tasks = tasks_of(model)
    totals = np.zeros((1 + len(tasks), 2))

    def judge(batch: Batch, rows: dict[str, Any]) -> None:
        with autocast():
            output = call(model, batch, rows, tasks)
        totals[0] += sums_of(output.losses, output.weights)
        for number, task in enumerate(output.tasks.values(), 1):
            totals[number] += sums_of(task.losses, task.weights)
        for judged in metrics:
            _feed(judged, output, batch)

    return judge, totals


def _feed(judged: Judged, output: Checked, batch: Batch) -> None:
    task: Task | Checked = output.tasks[judged.task] if judged.task else output
    predictions, labels, name = task.predictions, labels_of(batch).get(judged.task), judged.name
    if predictions is None or labels is None:
        missing = "labels in the batch" if labels is None else "Output.predictions from the model"
        raise ValueError(f"metric {name!r} needs {missing}" + (f", of the task {judged.task!r}" if judged.task else ""))
    groups = _groups(judged.metric, name, batch)
    if isinstance(task, Task):
        predictions, labels = task.counted(predictions), task.counted(labels)
        groups = groups if groups is None else task.counted(groups)  # type: ignore[assignment]
    given = _for(judged.metric, name, predictions, labels)
    if groups is None:
        judged.metric.update(*given)
    else:
        end_to_end = isinstance(labels, Jagged) and not isinstance(given[1], Jagged)
        judged.metric.update(*given, labels.spread(groups) if end_to_end else groups)  # type: ignore[union-attr]


def _groups(metric: Any, name: str, batch: Batch) -> Tensor | None:
    """The group of each sample, for a metric that asks for it by the name of a dense input or of a feature."""
    group = getattr(metric, "group", None)
    if not isinstance(group, str):
        return None
    part = batch.dense.get(group, batch.keys.get(group))
    if part is None:
        known = [*batch.dense, *batch.keys]
        raise ValueError(f"metric {name!r}: group {group!r} of the batch, {did_you_mean(group, known)}")
    if isinstance(part, Jagged):
        if not bool((part.lengths == 1).all()):
            sample = int((part.lengths != 1).nonzero()[0])
            raise ValueError(
                f"metric {name!r}: sample {sample} has {int(part.lengths[sample])} keys of {group!r}; a group is one key per "
                f"sample"
            )
        return part.values
    if part.ndim != 1 or part.is_floating_point():
        raise ValueError(
            f"metric {name!r}: batch.dense[{group!r}] must be whole numbers [B], the group of each sample, got {part.dtype} of "
            f"shape {tuple(part.shape)}"
        )
    return part


def _for(
    metric: Any, name: str, predictions: Tensor | Jagged, labels: Tensor | Jagged
) -> tuple[Tensor | Jagged, Tensor | Jagged]:
    """Lists of candidates go to a metric as lists if it takes them so, else all candidates end to end."""
    lists = getattr(metric, "takes_lists", False)
    if isinstance(predictions, Jagged) != isinstance(labels, Jagged) or (lists and not isinstance(labels, Jagged)):
        kinds = ["a Jagged" if isinstance(part, Jagged) else "a tensor" for part in (predictions, labels)]
        raise ValueError(
            f"metric {name!r}: predictions are {kinds[0]}, labels {kinds[1]}; it needs "
            f"{'a Jagged of both, one list per sample' if lists else 'both alike'}"
        )
    if not isinstance(predictions, Jagged) or not isinstance(labels, Jagged):
        return predictions, labels
    if not torch.equal(predictions.offsets, labels.offsets):
        raise ValueError(f"metric {name!r}: a sample has another number of predictions than of labels")
    return (predictions, labels) if lists else (predictions.values, labels.values)


def judge_ranking(
    model: nn.Module,
    metrics: Mapping[str, Any],
    candidate_rows: Tensor,
    candidates: Tensor,
    *,
    history: str,
    exclude_seen: bool,
    seen_targets: str,
    autocast: Callable[[], Any] = contextlib.nullcontext,
) -> tuple[Judge, np.ndarray]:
    """Feeds the rank of each sample's target among all candidates to the metrics, and to those that say `takes_top = True`
    the best candidates; for the rest see `evaluate_ranking`. The returned array counts targets that were ranked, and those
    that the sample's user has had before."""
    counts = np.zeros(2, np.int64)
    of_top = [metric for metric in metrics.values() if getattr(metric, "takes_top", False)]
    of_ranks = [metric for metric in metrics.values() if not getattr(metric, "takes_top", False)]
    blocks = list(candidate_blocks(candidates, candidate_rows)) if of_top else []

    def judge(batch: Batch, rows: dict[str, Any]) -> None:
        if not isinstance(batch.labels, Tensor):
            raise ValueError("ranking needs batch.labels, a tensor: the key of each sample's target")
        seen = seen_of(batch, history)
        with autocast():
            queries_BD = wide(model.query(batch, rows))  # type: ignore[operator]
        # Scores are not cast: of thousands of candidates many would have the same in bfloat16.
        ranks = rank_all(
            model.score,  # type: ignore[arg-type]
            queries_BD=queries_BD,
            candidates_ND=candidate_rows,
            candidate_keys=candidates,
            target_keys=batch.labels,
            exclude=seen if exclude_seen else None,
        )
        if seen is not None:
            again_B = in_lists(batch.labels, seen)
            counts[1] += int(again_B.sum())
            if seen_targets == "skip":
                ranks = ranks[~again_B]
            elif seen_targets == "miss":  # behind all others, whatever k
                ranks = ranks.masked_fill(again_B, torch.iinfo(ranks.dtype).max)
        counts[0] += len(ranks)
        for metric in of_ranks:
            metric.update(ranks)
        if of_top:
            most = min(max(metric.k for metric in of_top), len(candidates))
            left_out = seen if exclude_seen else None
            best = recommend(model.score, queries_BD, blocks, most, seen=left_out)  # type: ignore[arg-type]
            for metric in of_top:
                there_Bk = best.scores[:, : metric.k] > -torch.inf
                metric.update(best.keys[:, : metric.k][there_Bk], len(candidates))

    return judge, counts


def candidate_blocks(candidates: Tensor, rows_ND: Tensor) -> list[tuple[np.ndarray, Tensor]]:
    """Keys, sorted, and their rows, to be scored a block at a time."""
    keys, order = candidates.sort()
    return [(keys[part].numpy(), rows_ND[order[part]]) for part in torch.arange(len(keys)).split(BLOCK)]

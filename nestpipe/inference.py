"""What a trained model says of samples: predictions, and the best items of a catalogue. For `Trainer` and `Bundle` alike.

Shape legend: B samples, N items of a block, k items that are wanted, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import SEEN, Batch, Jagged, Output

BLOCK = 1 << 16  # items that are scored together


class Recommended(NamedTuple):
    """keys, scores: [B, k], the best first; of equal scores the lower key first. A score of -inf: there were no more items for
    this sample."""

    keys: Tensor
    scores: Tensor


def predict(model: nn.Module, batch: Batch, rows: dict[str, Any]) -> Any:
    """The model's `predict(batch, rows)`, where it has one, else `Output.predictions` of its forward; a dict by task of a
    model that has several."""
    if has_method(model, "predict"):
        return model.predict(batch, rows)  # type: ignore[operator]
    try:
        output = model(batch, rows)
    except Exception as error:
        if batch.labels is None:
            error.add_note(
                "the batch has no labels; if the model's forward reads them, give it predict(batch, rows), which needs none"
            )
        raise
    if not isinstance(output, Output) or output.predictions is None:
        able = not missing_methods(model)
        raise ValueError(
            f"{type(model).__name__} predicts nothing for a sample: give it predict(batch, rows), or let its forward return "
            f"Output(losses, predictions=...)" + ("; for the next items see `recommend`" if able else "")
        )
    return output.predictions


def has_method(model: nn.Module, name: str) -> bool:
    """Not a layer of that name: attention has a `query` too."""
    there = getattr(model, name, None)
    return callable(there) and not isinstance(there, nn.Module)


def missing_methods(model: nn.Module) -> list[str]:
    """Of those that a ranking of all items needs."""
    return [name for name in ("query", "score") if not has_method(model, name)]


def need_query_and_score(model: nn.Module, what: str) -> None:
    missing = missing_methods(model)
    if missing:
        raise ValueError(f"{type(model).__name__} has no {' and no '.join(missing)}, which {what} needs")


def history_of(model: nn.Module, given: str | None = None) -> str:
    """The feature with what a user has had."""
    named = getattr(model, "history", None) if given is None else given
    return named if isinstance(named, str) else "history"


def items_of(model: nn.Module, history: str, features: Collection[str]) -> str:
    """The feature whose table the items are in: the one that the model calls its `item` (two towers: a user's features may have
    tables of their own), else the history."""
    item = getattr(model, "item", None)
    return item if isinstance(item, str) and item in features else history


def seen_of(batch: Batch, history: str) -> Jagged | None:
    """All that each sample's user has had: what the data says, else the history that the model reads, if there is one."""
    seen = batch.dense.get(SEEN)
    if seen is None:
        return batch.keys.get(history)
    if not isinstance(seen, Jagged) or seen.values.dtype != torch.int64:
        raise ValueError(f"batch.dense[{SEEN!r}] must be a Jagged of int64 keys: all that each sample's user has had")
    return seen


def to_leave_out(batch: Batch, history: str) -> Jagged:
    """The same, where it must be known."""
    seen = seen_of(batch, history)
    if seen is None:
        raise ValueError(
            f"recommend: exclude_seen leaves out what each user has had, and the batch has neither dense[{SEEN!r}] nor keys of "
            f"{history!r}; give one of them, or set exclude_seen=False"
        )
    return seen


def unique_sorted(candidates: np.ndarray) -> np.ndarray:
    """The order in which equal scores are told."""
    every = np.unique(candidates)
    if len(every) < len(candidates):
        raise ValueError("recommend: a candidate is given more than once; make them unique")
    return every


def check_k(k: int, num_items: int) -> None:
    if not 1 <= k <= num_items:
        raise ValueError(f"recommend: k must be at least 1 and at most the {num_items:,} items there are, got {k}")


def recommend(
    score: Callable[[Tensor, Tensor], Tensor],
    queries_BD: Tensor,
    blocks: Iterable[tuple[np.ndarray, Tensor]],
    k: int,
    *,
    seen: Jagged | None,
) -> Recommended:
    """The k items of highest score for each sample. blocks: keys, sorted within each block, and their rows [N, D]; all are
    scored, never more than one block at a time. seen: items that are left out for each sample."""
    best = Recommended(
        torch.zeros(len(queries_BD), 0, dtype=torch.int64), torch.zeros(len(queries_BD), 0, dtype=torch.float32)
    )
    seen = None if seen is None else seen.to(torch.device("cpu"))
    for keys, rows_ND in blocks:
        scores_BN = score(queries_BD, rows_ND.to(queries_BD.device)).cpu().float()
        if torch.isnan(scores_BN).any():
            sample = int(torch.isnan(scores_BN).any(1).nonzero()[0])
            raise ValueError(f"scores of sample {sample} hold NaN, so nothing is best; look at the model's weights")
        if seen is not None:
            scores_BN = _leave_out(scores_BN, keys, seen)
        best = _better(best, torch.from_numpy(keys), scores_BN, k)
    return best


def on_cpu(predictions: Any, size: int) -> Any:
    """A model's predictions for that many samples, checked, to be kept."""
    if isinstance(predictions, dict):
        return {name: on_cpu(part, size) for name, part in predictions.items()}
    if not isinstance(predictions, Tensor | Jagged) or (isinstance(predictions, Tensor) and predictions.ndim == 0):
        what = "a single number" if isinstance(predictions, Tensor) else type(predictions).__name__
        raise ValueError(f"the model predicts {what}; give a tensor [B, ...] or a Jagged, or a dict of them by task")
    if len(predictions) != size:
        raise ValueError(f"the model gives {len(predictions)} predictions for {size} samples; give one for each")
    if isinstance(predictions, Jagged):
        return Jagged(predictions.values.detach().cpu(), predictions.offsets.cpu())
    return predictions.detach().cpu()


def joined(parts: Sequence[Any]) -> Any:
    """Predictions of several batches as those of one."""
    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return Jagged.joined(parts) if isinstance(parts[0], Jagged) else torch.cat(list(parts))


def none_of(predictions: Any) -> Any:
    """Predictions of the same kind, for no samples."""
    if isinstance(predictions, dict):
        return {name: none_of(part) for name, part in predictions.items()}
    return predictions.slice(0, 0) if isinstance(predictions, Jagged) else predictions[:0]


def _leave_out(scores_BN: Tensor, keys: np.ndarray, seen: Jagged) -> Tensor:
    values = seen.values.numpy()
    column = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
    known = np.flatnonzero(keys[column] == values)
    samples, columns = seen.sample_ids()[known], torch.from_numpy(column[known])
    return scores_BN.index_put((samples, columns), torch.tensor(-torch.inf))  # a copy: the model may have kept its own


def _better(best: Recommended, keys_N: Tensor, scores_BN: Tensor, k: int) -> Recommended:
    """The k best of those before and of a block whose keys are sorted."""
    few = min(k, len(keys_N))
    top_Bk, places_Bk = scores_BN.topk(few, dim=1)
    if ((scores_BN >= top_Bk[:, -1:]).sum(1) > few).any():  # equal scores, of which topk takes any
        top_Bk, places_Bk = (part[:, :few] for part in scores_BN.sort(dim=1, descending=True, stable=True))
    keys = torch.cat([best.keys, keys_N[places_Bk]], 1)
    scores = torch.cat([best.scores, top_Bk], 1)
    by_key = keys.argsort(dim=1)
    order = by_key.gather(1, scores.gather(1, by_key).argsort(dim=1, descending=True, stable=True))[:, :k]
    return Recommended(keys.gather(1, order), scores.gather(1, order))

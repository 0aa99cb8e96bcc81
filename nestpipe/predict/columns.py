"""What is told of each sample, as columns of Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged, labels_of
from nestpipe.inference import Recommended


def of_data(batch: Batch) -> dict[str, pa.Array]:
    """What the data tells of each sample besides the model's inputs."""
    user = batch.dense.get("user")
    columns = {"user": _column(user)} if isinstance(user, Tensor) and user.ndim == 1 else {}
    return columns | {f"label_{task}" if task else "label": _column(part) for task, part in labels_of(batch).items()}


def of_scores(predictions: Any, batch: Batch, model: Any) -> dict[str, pa.Array]:
    by_task = {f"score_{task}": part for task, part in predictions.items()} if isinstance(predictions, dict) else {}
    named = getattr(model, "candidates", None)
    # Where an item is made of several features (DIN), the first is what it is known by.
    names = [named] if isinstance(named, str) else named if isinstance(named, (list, tuple)) else []
    columns = {"candidates": _column(batch.keys[names[0]])} if names and names[0] in batch.keys else {}
    return columns | {name: _column(part) for name, part in (by_task or {"score": predictions}).items()}


def of_best(best: Recommended) -> dict[str, pa.Array]:
    there_Bk = best.scores > -torch.inf  # a user who has had nearly everything gets fewer
    lengths = there_Bk.sum(1)
    parts = {"items": best.keys, "scores": best.scores}
    return {name: _column(Jagged.from_lengths(part[there_Bk], lengths)) for name, part in parts.items()}


def _column(part: Tensor | Jagged) -> pa.Array:
    if isinstance(part, Jagged):
        offsets = pa.array(part.offsets.cpu().numpy().astype(np.int32))
        return pa.ListArray.from_arrays(offsets, _column(part.values))
    numbers = part.detach().cpu()
    numbers = numbers.float() if numbers.dtype in (torch.bfloat16, torch.float16) else numbers
    if numbers.ndim > 2:
        raise ValueError(f"predictions of shape {tuple(part.shape)} are no column; let the model give [B] or [B, C]")
    flat = pa.array(numbers.reshape(-1).numpy())
    return flat if numbers.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, numbers.shape[1])

"""From the keys of a batch to the rows that a model gets: the same kernels, in the same order of sums, as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged
from nestpipe.kernels.route import mean_weights
from nestpipe.kernels.rows import NONE, ONES, gather, pool
from nestpipe.serve.rows import TableRows
from nestpipe.tables import Feature


def lookup(
    batch: Batch, features: Sequence[Feature], tables: Mapping[str, TableRows], device: torch.device
) -> dict[str, Any]:
    """rows[feature] as a model gets them; a streamed feature as a Jagged, all at once."""
    rows: dict[str, Any] = {}
    for feature in features:
        jagged, table = batch.keys[feature.name], tables[feature.table]
        keys = np.ascontiguousarray(jagged.values.numpy())
        located, dim = table.located(keys), table.stored.table.dim
        if feature.pooling is None:
            values = torch.empty(len(keys), dim)
            gather(located.rows, located.positions, NONE, values.numpy())
            rows[feature.name] = Jagged(values.to(device), jagged.offsets.to(device))
        else:
            values = torch.empty(len(jagged), dim)
            weights = _weights(feature, jagged)
            pool(located.rows, located.positions, jagged.offsets.numpy(), weights, NONE, values.numpy())
            rows[feature.name] = values.to(device)
    return rows


def _weights(feature: Feature, jagged: Jagged) -> np.ndarray:
    """What each key counts in the sum over its bag; empty: 1."""
    given = ONES if jagged.weights is None else _floats(jagged.weights)
    if feature.pooling != "mean":
        return given
    weights = np.empty(len(jagged.values), np.float32)
    mean_weights(jagged.offsets.numpy(), given, weights)
    return weights


def _floats(weights: Tensor) -> np.ndarray:
    return weights.detach().float().contiguous().numpy()

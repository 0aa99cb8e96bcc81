"""The best items for each sample out of a bundle's table: every item is scored, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe import inference
from nestpipe.batch import Jagged
from nestpipe.inference import Recommended
from nestpipe.serve import rows
from nestpipe.serve.rows import TableRows


def recommend(
    model: nn.Module,
    queries_BD: Tensor,
    table: TableRows,
    k: int,
    *,
    seen: Jagged | None,
    candidates: np.ndarray | None,
) -> Recommended:
    """See Bundle.recommend."""
    inference.check_k(k, len(table) if candidates is None else len(candidates))
    blocks = ((keys, torch.from_numpy(table.read(keys))) for keys in _blocks(table, candidates))
    return inference.recommend(model.score, queries_BD, blocks, k, seen=seen)  # type: ignore[arg-type]


def _blocks(table: TableRows, candidates: np.ndarray | None) -> Iterator[np.ndarray]:
    """Sorted keys."""
    if candidates is None:
        yield from (np.sort(keys) for keys, _ in table.blocks() if len(keys))
        return
    every = inference.unique_sorted(candidates)
    yield from (every[start : start + rows.BLOCK] for start in range(0, len(every), rows.BLOCK))

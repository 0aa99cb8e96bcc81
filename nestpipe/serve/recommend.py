"""The best items for each sample out of a whole catalogue: every item is scored, a block at a time.

Shape legend: B samples, N items of a block, k items that are wanted, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import Jagged
from nestpipe.serve import rows
from nestpipe.serve.rows import TableRows


class Recommended(NamedTuple):
    """keys, scores: [B, k], the best first; of equal scores the lower key first. A score of -inf: there were no more items for
    this sample."""

    keys: Tensor
    scores: Tensor


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
    num_items = len(table) if candidates is None else len(candidates)
    if not 1 <= k <= num_items:
        raise ValueError(f"recommend: k must be at least 1 and at most the {num_items:,} items there are, got {k}")
    best = Recommended(
        torch.zeros(len(queries_BD), 0, dtype=torch.int64), torch.zeros(len(queries_BD), 0, dtype=torch.float32)
    )
    for keys in _blocks(table, candidates):
        rows_ND = torch.from_numpy(table.read(keys)).to(queries_BD.device)
        scores_BN = model.score(queries_BD, rows_ND).cpu().float()  # type: ignore[operator]
        if torch.isnan(scores_BN).any():
            sample = int(torch.isnan(scores_BN).any(1).nonzero()[0])
            raise ValueError(f"scores of sample {sample} hold NaN, so nothing is best; look at the model's weights")
        if seen is not None:
            _leave_out(scores_BN, keys, seen)
        best = _better(best, torch.from_numpy(keys), scores_BN, k)
    return best


def _blocks(table: TableRows, candidates: np.ndarray | None) -> Iterator[np.ndarray]:
    """Sorted keys: the order in which equal scores are told."""
    if candidates is None:
        yield from (np.sort(keys) for keys, _ in table.blocks() if len(keys))
        return
    every = np.unique(candidates)
    if len(every) < len(candidates):
        raise ValueError("recommend: a candidate is given more than once; make them unique")
    yield from (every[start : start + rows.BLOCK] for start in range(0, len(every), rows.BLOCK))


def _leave_out(scores_BN: Tensor, keys: np.ndarray, seen: Jagged) -> None:
    values = seen.values.numpy()
    column = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
    known = np.flatnonzero(keys[column] == values)
    scores_BN[seen.sample_ids()[known], torch.from_numpy(column[known])] = -torch.inf


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

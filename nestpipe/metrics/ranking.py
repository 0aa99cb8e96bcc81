"""The rank of each sample's target among all candidates.

Shape legend: B samples, N candidates, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nestpipe.batch import Jagged

SEEN_TARGETS = ("rank", "miss", "skip")  # what becomes of a target that its user has had before


def target_ranks(
    scores_BN: Tensor, *, candidate_keys: Tensor, target_keys: Tensor, exclude: Jagged | None = None
) -> Tensor:
    """[B]: 1 + the candidates ahead of each sample's target: those with a higher score, or the same and a smaller key.

    `candidate_keys` [N] are all different and contain every one of `target_keys` [B]. Keys in `exclude` (a sample's
    history, say) are left out of its ranking, except the target itself.
    """
    if torch.isnan(scores_BN).any():
        sample = int(torch.isnan(scores_BN).any(1).nonzero()[0])
        raise ValueError(f"scores of sample {sample} hold NaN, so it has no ranking; look at the model's weights")
    column_of = _ColumnOf(candidate_keys)
    target_B, known = column_of(target_keys)
    if not known.all():
        key = int(target_keys[~known][0])
        raise ValueError(f"target key {key} is not among the {len(candidate_keys)} candidate_keys; add it")
    target_score_B1 = scores_BN.gather(1, target_B[:, None])
    ahead_BN = scores_BN > target_score_B1
    ahead_BN |= (scores_BN == target_score_B1) & (candidate_keys < target_keys[:, None])
    if exclude is not None:
        column, known = column_of(exclude.values)
        ahead_BN[exclude.sample_ids()[known], column[known]] = False
    return 1 + ahead_BN.sum(1)


def in_lists(keys_B: Tensor, lists: Jagged) -> Tensor:
    """[B] of bool: whether each sample's key stands in its list."""
    sample_ids = lists.sample_ids()
    inside_B = torch.zeros(len(lists), dtype=torch.bool, device=keys_B.device)
    inside_B[sample_ids[lists.values == keys_B[sample_ids]]] = True
    return inside_B


def rank_all(
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    queries_BD: Tensor,
    candidates_ND: Tensor,
    candidate_keys: Tensor,
    target_keys: Tensor,
    exclude: Jagged | None = None,
    chunk: int = 256,
) -> Tensor:
    """`target_ranks` of all samples, `chunk` of them at a time: never more than chunk x N scores exist.

    `score(queries, candidates)` gives [B, N], as `HSTU.score` does.
    """
    ranks = []
    for samples in torch.arange(len(queries_BD)).split(chunk):
        ranks.append(
            target_ranks(
                score(queries_BD[samples], candidates_ND),
                candidate_keys=candidate_keys,
                target_keys=target_keys[samples],
                exclude=None if exclude is None else exclude.select(samples),
            )
        )
    return torch.cat(ranks) if ranks else torch.empty(0, dtype=torch.int64)


class _ColumnOf:
    """Where a key stands among the candidates, and whether it does."""

    def __init__(self, candidate_keys: Tensor) -> None:
        self.sorted, self.order = candidate_keys.sort()
        twice = (self.sorted[1:] == self.sorted[:-1]).nonzero()
        if len(twice):
            raise ValueError(f"candidate key {int(self.sorted[twice[0, 0]])} is given more than once; make them unique")

    def __call__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.sorted):
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        place = torch.searchsorted(self.sorted, keys).clamp_(max=len(self.sorted) - 1)
        return self.order[place], self.sorted[place] == keys

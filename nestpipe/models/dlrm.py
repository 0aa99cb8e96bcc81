"""DLRM (arXiv 1906.00091): dense inputs through an MLP, products with the feature rows, another MLP, one logit.

Shape legend: B samples, F vectors that interact (one per feature, plus the bottom MLP's output), D row width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.models.arguments import check_widths
from nestpipe.models.clicks import MLP, ClickModel

INTERACTIONS = ("dot", "cat", "both")


class DLRM(ClickModel):
    """Click-through ranker: per-sample binary cross entropy; Output.predictions are probabilities [B].

    num_dense: columns of `batch.dense[dense]`; 0 for a model of keys only.
    features: pooled features; `rows[name]` is [B, dim] for each.
    bottom, top: hidden widths. The bottom MLP ends in `dim`, the top MLP in one logit; neither is to be listed.
    interaction: "dot" feeds the bottom's output and the products of all pairs of vectors to the top MLP (as the paper);
        "cat" the vectors themselves; "both" vectors and products.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Sequence[str],
        dim: int,
        bottom: Sequence[int] = (256, 128),
        top: Sequence[int] = (256, 128),
        interaction: str = "dot",
        dense: str = "dense",
    ) -> None:
        super().__init__(num_dense=num_dense, features=features, dim=dim, dense=dense)
        check_widths("DLRM", bottom=bottom, top=top)
        if interaction not in INTERACTIONS:
            raise ValueError(f"DLRM: interaction must be one of {INTERACTIONS}, got {interaction!r}")
        self.interaction = interaction
        self.bottom = MLP([num_dense, *bottom, dim], activate_last=True) if num_dense else None
        num_vectors = len(self.features) + bool(num_dense)
        i, j = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.pairs: Tensor
        self.register_buffer("pairs", i * num_vectors + j, persistent=False)
        vectors = dim * (bool(num_dense) if interaction == "dot" else num_vectors)
        width = vectors + (0 if interaction == "cat" else len(self.pairs))
        if not width:
            raise ValueError("DLRM: one feature and no dense inputs leave no pair to multiply; use interaction='cat'")
        self.top = MLP([width, *top, 1])

    def logits(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        dense_BC = self.dense_of(batch)
        vectors = [] if self.bottom is None else [self.bottom(dense_BC)]
        return self.top(self._interact([*vectors, *self.vectors_of(rows)])).squeeze(-1)

    def _interact(self, vectors: list[Tensor]) -> Tensor:
        if self.interaction == "cat":
            return torch.cat(vectors, dim=1)
        vectors_BFD = torch.stack(vectors, dim=1)
        products_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        parts = [products_BFF.flatten(1).index_select(1, self.pairs)]
        if self.interaction == "both":
            parts.insert(0, vectors_BFD.flatten(1))
        elif self.bottom is not None:
            parts.insert(0, vectors[0])
        return torch.cat(parts, dim=1)

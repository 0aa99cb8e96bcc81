"""DeepFM (arXiv 1703.04247): a factorisation machine and an MLP on the same vectors, added up to one logit.

logit = w_0 + sum_i w_i x_i + sum_{i < j} <v_i, v_j> x_i x_j + MLP(v_1 x_1, v_2 x_2, ...)

Choices: the weight w of a key is the first value of its row and the vector v the others, so that a key has one row, one lookup
and one optimizer state: a table of dim = 17 gives weights and vectors of 16. Of a list of keys the pooled row counts as one
x_i v_i. Dense inputs are fields like any other, x_i being the number; their weights and vectors are the model's.

Shape legend: B samples, F fields (dense columns and features), C dense columns, V = row width - 1: of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.models.arguments import check_whole, check_widths
from nestpipe.models.clicks import MLP, ClickModel

STD = 0.02  # of new vectors, as rows have it


class DeepFM(ClickModel):
    """Click-through model of linear terms, products of all pairs of fields and an MLP; per-sample binary cross entropy,
    Output.predictions are probabilities [B].

    num_dense: columns of `batch.dense[dense]`; 0 for a model of keys only.
    features: pooled features; `rows[name]` is [B, dim] for each.
    dim: row width. The first value of a row is its linear weight, the other dim - 1 its vector.
    deep: hidden widths of the MLP, which ends in one number that is not to be listed.
    dropout: behind each hidden layer of the MLP.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Sequence[str],
        dim: int,
        deep: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        dense: str = "dense",
    ) -> None:
        super().__init__(num_dense=num_dense, features=features, dim=dim, dense=dense)
        check_whole("DeepFM", 2, dim=dim)
        check_widths("DeepFM", deep=deep)
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense_rows = nn.Parameter(torch.empty(num_dense, dim).normal_(std=STD)) if num_dense else None
        num_fields = num_dense + len(self.features)
        self.deep = MLP([num_fields * (dim - 1), *deep, 1], dropout=dropout)

    def logits(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        fields = [torch.stack(self.vectors_of(rows), dim=1)]
        if self.dense_rows is not None:
            dense_BC = self.dense_of(batch)
            assert dense_BC is not None
            fields.insert(0, dense_BC.unsqueeze(-1) * self.dense_rows)
        linear_BF1, vectors_BFV = torch.cat(fields, dim=1).split([1, self.dim - 1], dim=-1)
        # The products of all pairs in one pass: (sum v)^2 - sum v^2 has each of them twice.
        twice_BV = vectors_BFV.sum(1).square() - vectors_BFV.square().sum(1)
        deep_B = self.deep(vectors_BFV.flatten(1)).squeeze(-1)
        return self.bias + linear_BF1.sum((1, 2)) + 0.5 * twice_BV.sum(1) + deep_B

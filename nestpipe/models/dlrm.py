"""DLRM (arXiv 1906.00091): dense inputs through an MLP, products with the feature rows, another MLP, one logit.

Shape legend: B samples, F vectors that interact (one per feature, plus the bottom MLP's output), D row width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.batch import Batch, Output
from nestpipe.models.arguments import check_names, check_rows, check_whole, check_widths

INTERACTIONS = ("dot", "cat", "both")


class DLRM(nn.Module):
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
        super().__init__()
        check_whole("DLRM", 0, num_dense=num_dense)
        check_whole("DLRM", 1, dim=dim)
        check_widths("DLRM", bottom=bottom, top=top)
        check_names("DLRM", dense=dense)
        if interaction not in INTERACTIONS:
            raise ValueError(f"DLRM: interaction must be one of {INTERACTIONS}, got {interaction!r}")
        if not isinstance(features, Iterable) or isinstance(features, str):
            raise ValueError(f"DLRM: features must be a list of names, got {features!r}")
        self.features = list(features)
        check_names("DLRM", **{f"features[{place}]": name for place, name in enumerate(self.features)})
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"DLRM: features must be one or more different names, got {self.features}")
        self.num_dense, self.dim, self.dense, self.interaction = num_dense, dim, dense, interaction
        self.bottom = _mlp([num_dense, *bottom, dim], last_relu=True) if num_dense else None
        num_vectors = len(self.features) + bool(num_dense)
        i, j = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.pairs: Tensor
        self.register_buffer("pairs", i * num_vectors + j, persistent=False)
        vectors = dim * (bool(num_dense) if interaction == "dot" else num_vectors)
        width = vectors + (0 if interaction == "cat" else len(self.pairs))
        if not width:
            raise ValueError("DLRM: one feature and no dense inputs leave no pair to multiply; use interaction='cat'")
        self.top = _mlp([width, *top, 1], last_relu=False)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
        labels_B = self._labels(batch)
        logits_B = self._logits(batch, rows)
        losses_B = F.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.dtype), reduction="none")
        return Output(losses=losses_B, predictions=torch.sigmoid(logits_B.detach()))

    def predict(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        """The probabilities alone; needs no labels."""
        return torch.sigmoid(self._logits(batch, rows).detach())

    def _logits(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return self.top(self._interact(self._vectors(batch, rows))).squeeze(-1)

    def _vectors(self, batch: Batch, rows: dict[str, Tensor]) -> list[Tensor]:
        vectors = []
        if self.bottom is not None:
            dense_BC = batch.dense.get(self.dense)
            if not isinstance(dense_BC, Tensor) or dense_BC.ndim != 2 or dense_BC.shape[1] != self.num_dense:
                got = tuple(dense_BC.shape) if isinstance(dense_BC, Tensor) else type(dense_BC).__name__
                raise ValueError(
                    f"dense input {self.dense!r} must be a tensor [B, {self.num_dense}], got {got}; "
                    f"set num_dense to the number of its columns"
                )
            vectors.append(self.bottom(dense_BC))
        check_rows("DLRM", rows, Tensor, **{f"features[{place}]": name for place, name in enumerate(self.features)})
        for name in self.features:
            rows_BD = rows[name]
            if rows_BD.shape[-1] != self.dim:
                raise ValueError(
                    f"feature {name!r} has rows of {rows_BD.shape[-1]} values, the model has dim={self.dim}; "
                    f"vectors that interact must be equally wide: give its table dim={self.dim}"
                )
            vectors.append(rows_BD)
        return vectors

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

    @staticmethod
    def _labels(batch: Batch) -> Tensor:
        labels = batch.labels
        if not isinstance(labels, Tensor) or labels.ndim != 1:
            got = (
                "none"
                if labels is None
                else f"shape {tuple(labels.shape)}"
                if isinstance(labels, Tensor)
                else "a Jagged"
            )
            raise ValueError(f"DLRM needs labels of shape [B], got {got}; set Batch.labels")
        wrong = ~((labels >= 0) & (labels <= 1))  # written so that NaN is wrong too
        if wrong.any():
            sample = int(wrong.nonzero()[0])
            raise ValueError(
                f"label {labels[sample].item()} of sample {sample} is outside [0, 1]; "
                f"clean the data or map the labels to click = 1, no click = 0"
            )
        return labels


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))

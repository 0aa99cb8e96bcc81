"""What models of clicks share: pooled features and dense inputs as vectors of a sample, layers on them, the loss of a click.

Shape legend: B samples, C columns of dense inputs, D row width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Output
from nestpipe.models.arguments import check_dropout, check_labels, check_names, check_rows, check_whole
from nestpipe.ops import dropout as drop


class FeatureModel(nn.Module):
    """Reads `rows[name]` [B, dim] of each of its pooled features and `batch.dense[dense]` [B, num_dense]."""

    def __init__(
        self, *, num_dense: int, features: Sequence[str], dim: int, dense: str, fewest_features: int = 1
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_whole(name, 0, num_dense=num_dense)
        check_whole(name, 1, dim=dim)
        check_names(name, dense=dense)
        if not isinstance(features, Iterable) or isinstance(features, str):
            raise ValueError(f"{name}: features must be a list of names, got {features!r}")
        self.features = list(features)
        check_names(name, **{f"features[{place}]": feature for place, feature in enumerate(self.features)})
        if len(self.features) < fewest_features or len(set(self.features)) != len(self.features):
            number = "one or more different names" if fewest_features else "different names"
            raise ValueError(f"{name}: features must be {number}, got {self.features}")
        self.num_dense, self.dim, self.dense = num_dense, dim, dense

    def dense_of(self, batch: Batch) -> Tensor | None:
        """[B, C]; None for a model of keys only."""
        if not self.num_dense:
            return None
        dense_BC = batch.dense.get(self.dense)
        if not isinstance(dense_BC, Tensor) or dense_BC.ndim != 2 or dense_BC.shape[1] != self.num_dense:
            got = tuple(dense_BC.shape) if isinstance(dense_BC, Tensor) else type(dense_BC).__name__
            raise ValueError(
                f"dense input {self.dense!r} must be a tensor [B, {self.num_dense}], got {got}; "
                f"set num_dense to the number of its columns"
            )
        return dense_BC

    def vectors_of(self, rows: Mapping[str, Any]) -> list[Tensor]:
        """[B, D] of each feature."""
        named = {f"features[{place}]": name for place, name in enumerate(self.features)}
        check_rows(type(self).__name__, rows, Tensor, **named)
        for name in self.features:
            self.check_width(name, rows[name])
        return [rows[name] for name in self.features]

    def inputs_of(self, batch: Batch, rows: Mapping[str, Any]) -> Tensor:
        """[B, `num_inputs`]: dense inputs and the rows of all features side by side."""
        dense_BC = self.dense_of(batch)
        return torch.cat([*([] if dense_BC is None else [dense_BC]), *self.vectors_of(rows)], dim=1)

    @property
    def num_inputs(self) -> int:
        return self.num_dense + len(self.features) * self.dim

    def check_width(self, feature: str, rows: Tensor) -> None:
        if rows.shape[-1] != self.dim:
            raise ValueError(
                f"feature {feature!r} has rows of {rows.shape[-1]} values, the model has dim={self.dim}; "
                f"{type(self).__name__} needs rows that are equally wide: give its table dim={self.dim}"
            )


class ClickModel(FeatureModel):
    """Per-sample binary cross entropy; Output.predictions are probabilities [B]. A child says what `logits` are."""

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
        labels_B = click_labels(type(self).__name__, batch.labels)
        logits_B = self.logits(batch, rows)
        losses_B = functional.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.dtype), reduction="none")
        return Output(losses=losses_B, predictions=torch.sigmoid(logits_B.detach()))

    def predict(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        """The probabilities alone; needs no labels."""
        return torch.sigmoid(self.logits(batch, rows).detach())

    def logits(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        """[B]"""
        raise NotImplementedError


def click_labels(model: str, labels: Any, task: str | None = None) -> Tensor:
    """[B], from 0 to 1. Raises ValueError for what are no labels of clicks."""
    what, where = ("labels", "Batch.labels") if task is None else (f"labels of {task!r}", f"Batch.labels[{task!r}]")
    if not isinstance(labels, Tensor) or labels.ndim != 1:
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"{model} needs {what} of shape [B], got {'none' if labels is None else got}; set {where}")
    check_labels(labels)
    return labels


class MLP(nn.Sequential):
    """Linear layers with an activation between them; and behind the last, if that is asked for.

    widths: of the input, the hidden layers and the output. dropout: behind each activation.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        activate_last: bool = False,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        check_dropout("MLP", dropout=dropout)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        super().__init__(*(layers if activate_last else layers[:-1]))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
            if not isinstance(layer, nn.Linear):
                x = drop(x, p=self.dropout, training=self.training)
        return x

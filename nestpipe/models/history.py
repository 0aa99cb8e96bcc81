"""HistoryModel: what next-item models and rankers share: items as states with a position, and the layers above.

Shape legend: T tokens, D row width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged
from nestpipe.models.arguments import check_dropout, check_names, check_whole
from nestpipe.models.layer import Layer
from nestpipe.ops import dropout as drop


class HistoryModel(nn.Module):
    """See SequenceModel and Ranker, whose children say what a layer is.

    more_positions: places behind the longest history that a token can stand at.
    """

    layer_class: type[Layer]
    layers: nn.ModuleList

    def __init__(
        self,
        *,
        dim: int,
        num_layers: int,
        num_heads: int,
        head_dim: int | None,
        max_length: int,
        more_positions: int,
        dropout: float,
        input_dropout: float,
        num_time_buckets: int,
        history: str,
        timestamps: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_whole(name, 1, dim=dim, num_heads=num_heads, max_length=max_length)
        check_whole(name, 0, num_layers=num_layers, num_time_buckets=num_time_buckets)
        check_dropout(name, dropout=dropout, input_dropout=input_dropout)
        check_names(name, history=history, timestamps=timestamps)
        if head_dim is not None:
            check_whole(name, 1, head_dim=head_dim)
        else:
            if dim % num_heads:
                raise ValueError(f"{name}: dim {dim} is not a multiple of num_heads {num_heads}; give head_dim")
            head_dim = dim // num_heads
        self.dim, self.max_length = dim, max_length
        self.dropout, self.input_dropout = dropout, input_dropout
        self.num_time_buckets = num_time_buckets
        self.history, self.timestamps = history, timestamps
        num_positions = max_length + more_positions
        self.position_embedding = nn.Parameter(torch.empty(num_positions, dim).normal_(std=dim**-0.5))
        self.layers = nn.ModuleList(
            self.layer_class(
                dim=dim,
                num_heads=num_heads,
                head_dim=head_dim,
                max_length=num_positions,
                num_time_buckets=num_time_buckets,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )

    def first_states(self, rows_TD: Tensor, place_T: Tensor) -> Tensor:
        """[T, D]: tokens before the first layer."""
        # Rows are born small (std 0.02): as HSTU's authors do, bring them to the scale of the position embedding.
        x_TD = rows_TD * math.sqrt(self.dim) + functional.embedding(place_T, self.position_embedding)
        return drop(x_TD, p=self.input_dropout, training=self.training)

    def check_lengths(self, lengths: Tensor) -> None:
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.max_length:
            raise ValueError(
                f"feature {self.history!r}: a history has {longest} keys, max_length is {self.max_length}; "
                f"keep the last {self.max_length} keys in the data, or raise max_length"
            )

    def check_width(self, feature: str, rows_TD: Tensor) -> None:
        if rows_TD.shape[-1] != self.dim:
            raise ValueError(
                f"feature {feature!r}: rows are {rows_TD.shape[-1]} wide, the model has dim={self.dim}; "
                f"give the table dim={self.dim}"
            )

    def times_of(self, batch: Batch) -> Jagged | None:
        """Of the items of the histories; None if the model looks at none."""
        if not self.num_time_buckets:
            return None
        times = batch.dense.get(self.timestamps)
        if not isinstance(times, Jagged):
            raise ValueError(
                f"num_time_buckets={self.num_time_buckets} needs batch.dense[{self.timestamps!r}], a Jagged of "
                f"seconds; add it or set num_time_buckets=0"
            )
        if not torch.equal(times.offsets, batch.keys[self.history].offsets):
            raise ValueError(f"batch.dense[{self.timestamps!r}] must have one time for each item of {self.history!r}")
        return times

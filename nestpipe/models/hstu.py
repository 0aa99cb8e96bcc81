"""HSTU, the sequential transducer of arXiv 2402.17152, trained to predict the next item of a history.

Layer: U, V, Q, K = split(SiLU(LN(X) W)); A = causal * SiLU(Q K^T + rab) / n, no softmax; Y = X + W_o(U * LN(A V)).

Choices: `n` is the number of keys a position sees (its index + 1), not a padded length, so that a sample's result
depends on nothing but the sample. `rab` is a learned bias per distance in positions plus, if `num_time_buckets` > 0,
one per logarithmic bucket of the time between the two items; both are shared by the heads.

Shape legend: B samples, T tokens of all histories, L longest history of a group, D row width, E = heads x head width,
K negatives per sample, N candidates.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_dropout, check_names, check_rows, check_whole, is_number
from nestpipe.models.hstu_ops import MASKED, Packing, attend, dropout, normalize, pick, sampled_softmax


class HSTU(nn.Module):
    """Predicts item i + 1 of a history from items 0..i: sampled softmax over the true item and the sample's negatives.

    Reads `rows[history]` (a Jagged [T, dim]), `rows[negatives]` (a Jagged with the same number K of rows for every
    sample, shared by its positions) and the keys of both; negatives that equal a position's target do not count there.
    With `num_time_buckets` > 0 also `batch.dense[timestamps]`, a Jagged of seconds, one per key of the history.

    Output.losses is the sum over a sample's positions, Output.weights the number of them (0 below two items).

    dim: width of the rows and of the states between layers.
    head_dim: width of q, k, v per head; dim / num_heads unless given.
    max_length: longest history; longer ones are refused, cut them in the data.
    dropout, input_dropout: inside each layer (before W_o), and on the input.
    normalize, temperature: score = cosine / temperature, or the plain dot product / temperature.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_layers: int = 2,
        num_heads: int = 1,
        head_dim: int | None = None,
        max_length: int = 50,
        dropout: float = 0.2,
        input_dropout: float = 0.2,
        normalize: bool = True,
        temperature: float = 0.05,
        num_time_buckets: int = 0,
        history: str = "history",
        negatives: str = "negatives",
        timestamps: str = "timestamps",
    ) -> None:
        super().__init__()
        check_whole("HSTU", 1, dim=dim, num_heads=num_heads, max_length=max_length)
        check_whole("HSTU", 0, num_layers=num_layers, num_time_buckets=num_time_buckets)
        check_dropout("HSTU", dropout=dropout, input_dropout=input_dropout)
        check_names("HSTU", history=history, negatives=negatives, timestamps=timestamps)
        if not isinstance(normalize, bool):
            raise ValueError(f"HSTU: normalize must be true or false, got {normalize!r}")
        if not is_number(temperature) or temperature <= 0:
            raise ValueError(f"HSTU: temperature must be a number above 0, got {temperature!r}")
        if head_dim is not None:
            check_whole("HSTU", 1, head_dim=head_dim)
        else:
            if dim % num_heads:
                raise ValueError(f"HSTU: dim {dim} is not a multiple of num_heads {num_heads}; give head_dim")
            head_dim = dim // num_heads
        self.dim, self.max_length = dim, max_length
        self.normalize, self.temperature = normalize, temperature
        self.num_time_buckets = num_time_buckets
        self.history, self.negatives, self.timestamps = history, negatives, timestamps
        self.position_embedding = nn.Parameter(torch.empty(max_length, dim).normal_(std=dim**-0.5))
        self.input_dropout = input_dropout
        self.layers = nn.ModuleList(
            HSTULayer(
                dim=dim,
                num_heads=num_heads,
                head_dim=head_dim,
                max_length=max_length,
                num_time_buckets=num_time_buckets,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )

    def forward(self, batch: Batch, rows: dict[str, Jagged]) -> Output:
        check_rows("HSTU", rows, Jagged, history=self.history, negatives=self.negatives)
        keys, negatives = batch.keys[self.history], rows[self.negatives]
        num_samples = len(keys)
        num_negatives = self._num_negatives(negatives)
        packing = Packing(keys.offsets)
        items_TD = packing.sort_tokens(rows[self.history].values)
        states_TD = self._scaled(self._encode(batch, items_TD, packing)) / self.temperature
        items_TD = self._scaled(items_TD)
        negatives_BKD = negatives.values.view(num_samples, num_negatives, self.dim)
        negatives_BKD = self._scaled(packing.sort_samples(negatives_BKD))
        keys_T = packing.sort_tokens(keys.values)
        negative_keys_BK = packing.sort_samples(batch.keys[self.negatives].values.view(num_samples, num_negatives))

        losses = []
        for group, states, items, item_keys, negs_BKD, neg_keys_BK in zip(
            packing.groups,
            packing.split_tokens(states_TD),
            packing.split_tokens(items_TD),
            packing.split_tokens(keys_T),
            packing.split_samples(negatives_BKD),
            packing.split_samples(negative_keys_BK),
            strict=True,
        ):
            states_BLD, targets_BLD = group.pad(states)[:, :-1], group.pad(items)[:, 1:]
            target_keys_BL = group.pad(item_keys)[:, 1:]
            hits_BLK = target_keys_BL[:, :, None] == neg_keys_BK[:, None, :]
            loss_BL = sampled_softmax(states_BLD, targets_BLD, negs_BKD, hits_BLK)
            counts_BL = torch.arange(1, max(group.length, 1)) < group.lengths[:, None]
            losses.append((loss_BL * counts_BL).sum(1))
        losses_B = packing.unsort_samples(torch.cat(losses))
        return Output(losses=losses_B, weights=(keys.lengths - 1).clamp(min=0).to(losses_B.dtype))

    def query(self, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
        """The state after the last item of each history, [B, D]; zeros where the history is empty."""
        check_rows("HSTU", rows, Jagged, history=self.history)
        packing = Packing(batch.keys[self.history].offsets)
        states_TD = self._encode(batch, packing.sort_tokens(rows[self.history].values), packing)
        query_BD = states_TD.new_zeros(len(packing.lengths), self.dim)
        filled = packing.lengths > 0
        query_BD[filled] = states_TD[packing.offsets[1:][filled] - 1]
        return packing.unsort_samples(query_BD)

    def score(self, query_BD: Tensor, candidates_ND: Tensor) -> Tensor:
        """[B, N]: the logits that training compares."""
        return (self._scaled(query_BD) / self.temperature) @ self._scaled(candidates_ND).T

    def _encode(self, batch: Batch, items_TD: Tensor, packing: Packing) -> Tensor:
        longest = max(group.length for group in packing.groups)
        if longest > self.max_length:
            raise ValueError(
                f"feature {self.history!r}: a history has {longest} keys, max_length is {self.max_length}; "
                f"keep the last {self.max_length} keys in the data, or raise max_length"
            )
        if items_TD.shape[-1] != self.dim:
            raise ValueError(
                f"feature {self.history!r}: rows are {items_TD.shape[-1]} wide, the model has dim={self.dim}; "
                f"give the table dim={self.dim}"
            )
        place_T = packing.place_in_sample()
        # Rows are born small (std 0.02): as the authors do, bring them to the scale of the position embedding.
        x_TD = items_TD * math.sqrt(self.dim) + F.embedding(place_T, self.position_embedding)
        x_TD = dropout(x_TD, p=self.input_dropout, training=self.training)
        buckets = self._time_buckets(batch, packing)
        seen_T1 = (place_T + 1).to(x_TD.dtype)[:, None]
        for layer in self.layers:
            x_TD = layer(x_TD, seen_T1, packing, buckets)
        return x_TD

    def _time_buckets(self, batch: Batch, packing: Packing) -> list[Tensor] | None:
        """Per group [B, L, L]: the bucket of the time from item j to item i."""
        if not self.num_time_buckets:
            return None
        times = batch.dense.get(self.timestamps)
        if not isinstance(times, Jagged):
            raise ValueError(
                f"num_time_buckets={self.num_time_buckets} needs batch.dense[{self.timestamps!r}], a Jagged of "
                f"seconds; add it or set num_time_buckets=0"
            )
        buckets = []
        for group, times_t in zip(packing.groups, packing.split_tokens(packing.sort_tokens(times.values)), strict=True):
            times_BL = group.pad(times_t)
            apart_BLL = (times_BL[:, :, None] - times_BL[:, None, :]).to(torch.float32).clamp_(min=1)
            # 0.301 = log10(2): as the authors, about 2.3 buckets per doubling; 64 buckets reach past seven years.
            buckets.append(apart_BLL.log_().div_(0.301).to(torch.int64).clamp_(max=self.num_time_buckets - 1))
        return buckets

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors) if self.normalize else vectors

    def _num_negatives(self, negatives: Jagged) -> int:
        lengths = negatives.lengths
        if not len(lengths):
            return 1  # no sample contradicts it, and no dimension that is reduced is empty
        if int(lengths.min()) != int(lengths.max()) or int(lengths[0]) == 0:
            raise ValueError(
                f"feature {self.negatives!r}: every sample needs the same number of negatives, at least 1; "
                f"got between {int(lengths.min())} and {int(lengths.max())}; draw K for each sample in the data"
            )
        return int(lengths[0])


class HSTULayer(nn.Module):
    """One layer on the tokens of a batch; only the attention itself sees padding."""

    def __init__(
        self, *, dim: int, num_heads: int, head_dim: int, max_length: int, num_time_buckets: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads, self.inner = num_heads, num_heads * head_dim
        self.gate = nn.Linear(dim, self.inner)
        self.qkv = nn.Linear(dim, 3 * self.inner)
        self.out = nn.Linear(self.inner, dim)
        self.position_bias = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets).normal_(std=0.02)) if num_time_buckets else None
        self.dropout = dropout

    def forward(self, x_TD: Tensor, seen_T1: Tensor, packing: Packing, buckets: list[Tensor] | None) -> Tensor:
        normed_TD = F.layer_norm(x_TD, x_TD.shape[-1:])
        gate_TE, qkv_TE = F.silu(self.gate(normed_TD)), F.silu(self.qkv(normed_TD))
        attended = []
        for i, (group, qkv) in enumerate(zip(packing.groups, packing.split_tokens(qkv_TE), strict=True)):
            # Padding lies behind a sample's last token, so the causal mask inside the bias hides it as well.
            bias = self._bias(group.length, None if buckets is None else buckets[i])
            attended.append(group.unpad(attend(group.pad(qkv), bias, num_heads=self.num_heads)))
        attended_TE = attended[0] if len(attended) == 1 else torch.cat(attended)
        gated_TE = gate_TE * F.layer_norm(attended_TE / seen_T1, (self.inner,))
        return x_TD + self.out(dropout(gated_TE, p=self.dropout, training=self.training))

    def _bias(self, length: int, buckets_BLL: Tensor | None) -> Tensor:
        place = torch.arange(length)
        distance_LL = place[:, None] - place
        bias = pick(self.position_bias, distance_LL.clamp(min=0)).masked_fill(distance_LL < 0, MASKED)
        if buckets_BLL is None or self.time_bias is None:
            return bias
        return bias + pick(self.time_bias, buckets_BLL)

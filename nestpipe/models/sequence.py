"""What next-item models share: the loss of the next item, queries and scores. HSTU and FuXi are their layers.

Shape legend: B samples, T tokens of all histories, P tokens that have a next one, D row width, N candidates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_rows, check_scores
from nestpipe.models.history import HistoryModel
from nestpipe.models.layer import Tokens
from nestpipe.models.negatives import Negatives, Positions
from nestpipe.ops import normalize


class SequenceModel(HistoryModel):
    """Predicts item i + 1 of a history from items 0..i: sampled softmax over the true item and negatives.

    Reads `rows[history]` (a Jagged [T, dim]), `rows[negatives]` (a Jagged, or Streamed if the feature is) and the keys of both;
    negatives that equal a position's target do not count there.
    With `num_time_buckets` > 0 also `batch.dense[timestamps]`, a Jagged of seconds, one per key of the history.

    Output.losses is the sum over a sample's positions, Output.weights the number of them (0 below two items).
    Everything works on tokens: no row is looked up, normalised or scored for padding.

    dim: width of the rows and of the states between layers.
    head_dim: width of q, k, v per head; dim / num_heads unless given.
    max_length: longest history; longer ones are refused, cut them in the data.
    dropout, input_dropout: inside each layer, and on the input.
    normalize, temperature: score = cosine / temperature, or the plain dot product / temperature.
    negatives: the feature whose rows are negatives, K for every sample or position; or "in-batch": the targets of all positions
        of the micro-batch, and no feature.
    negatives_per: "sample": K for each sample, shared by its positions. "position": K for each position that has a next item.
        What the data has under the same name; of no meaning to in-batch ones.
    negatives_dtype: "float16" (with a scale for each row) or "bfloat16" rounds the rows of negatives where they are read.
    share_negatives: a sample (or position) also uses the negatives of so many others of its micro-batch, chosen by a shuffle.
    log_q: of in-batch negatives: where the popularity comes from that logits are corrected for: "batch" (the default), the items'
        share of the micro-batch; "data", `batch.dense["log_q"]`; "none".

    With shared or in-batch negatives a loss depends on which samples share a micro-batch, and the model declares
    `mixes_samples = "micro-batch"`. With all others each sample is by itself.

    A child says what a layer is, by `layer_class`, a `Layer`.
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
        negatives_per: str = "sample",
        negatives_dtype: str = "float32",
        share_negatives: int = 0,
        log_q: str | None = None,
        timestamps: str = "timestamps",
    ) -> None:
        super().__init__(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            max_length=max_length,
            more_positions=0,
            dropout=dropout,
            input_dropout=input_dropout,
            num_time_buckets=num_time_buckets,
            history=history,
            timestamps=timestamps,
        )
        name = type(self).__name__
        check_scores(name, normalize=normalize, temperature=temperature)
        self.normalize, self.temperature = normalize, temperature
        self.negatives = Negatives(
            model=name,
            feature=negatives,
            per=negatives_per,
            dtype=negatives_dtype,
            share=share_negatives,
            log_q=log_q,
            normalize=normalize,
        )
        self.mixes_samples = self.negatives.mixes_samples

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        check_rows(type(self).__name__, rows, Jagged, history=self.history)
        self.negatives.check(rows)
        keys, items_TD = batch.keys[self.history], rows[self.history].values
        states_TD = self._scaled(self.encode(batch, rows)) / self.temperature
        # The last item of a history has no next one, and the first is nobody's.
        counts_B = (keys.lengths - 1).clamp(min=0)
        before_P = (keys.places() < keys.spread(counts_B)).nonzero().squeeze(1)
        losses_P = Jagged.from_lengths(before_P, counts_B)
        losses_P.values = self.negatives.losses(
            batch,
            rows,
            Positions(
                states_TD.index_select(0, before_P),
                self._scaled(items_TD.index_select(0, before_P + 1)),
                keys.values[before_P + 1],
                losses_P.offsets,
                before_P + 1,
                keys.offsets,
            ),
        )
        return Output(losses=losses_P.sum(), weights=counts_B.to(losses_P.values.dtype))

    def query(self, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
        """The state after the last item of each history, [B, D]; zeros where the history is empty."""
        check_rows(type(self).__name__, rows, Jagged, history=self.history)
        return Jagged(self.encode(batch, rows), batch.keys[self.history].offsets).last()

    def score(self, query_BD: Tensor, candidates_ND: Tensor) -> Tensor:
        """[B, N]: the logits that training compares."""
        return (self._scaled(query_BD) / self.temperature) @ self._scaled(candidates_ND).T

    def encode(self, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
        """[T, D]: the state after each item of each history."""
        keys, items_TD = batch.keys[self.history], rows[self.history].values
        self.check_lengths(keys.lengths)
        self.check_width(self.history, items_TD)
        place_T, times = keys.places(), self.times_of(batch)
        x_TD = self.first_states(items_TD, place_T)
        tokens = Tokens(keys.offsets, (place_T + 1).to(x_TD.dtype)[:, None], None if times is None else times.values)
        for layer in self.layers:
            x_TD = layer(x_TD, tokens)
        return x_TD

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors) if self.normalize else vectors

"""Rankers: HSTU and FuXi that score candidates for a user, trained on clicks, with a prefix of the history that can be kept.

Candidates are tokens: each sees the whole history and itself, not the others, and all stand at the place behind the history. So
a candidate's score does not depend on which others are asked for, nor in which order.

Nothing that an item of the history is made of depends on what follows it, on the request or on the batch: positions count from
the start, the normaliser is the number of items seen, times are between two items. So keys and values of the first items can be
computed once and used with any tail and any candidates: `prefix` and `rank`.

Shape legend: B samples, T items of all histories (or their tails), S items of prefixes and tails, C candidates of all samples,
P items of a prefix, D row width, E = heads x head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_names, check_rows
from nestpipe.models.fuxi import FuXiLayer
from nestpipe.models.history import HistoryModel
from nestpipe.models.hstu import HSTULayer
from nestpipe.models.layer import Candidates, Layer, Tokens
from nestpipe.models.prefix import Prefix, end_to_end


class Ranker(HistoryModel):
    """Predicts which candidates a user clicks: per-candidate binary cross entropy; Output.predictions are probabilities, a Jagged
    like the candidates.

    Reads `rows[history]` and `rows[candidates]`, Jagged [T, dim] and [C, dim], and `batch.labels`, a Jagged with a number from 0
    to 1 for each candidate. With `num_time_buckets` > 0 also `batch.dense[timestamps]`, a Jagged of seconds, one per key of the
    history, and `batch.dense[now]` [B], the seconds of the request.

    Output.losses is the sum over a sample's candidates, Output.weights the number of them. Each sample is by itself.

    dim: width of the rows and of the states between layers.
    head_dim: width of q, k, v per head; dim / num_heads unless given.
    max_length: longest history; longer ones are refused, cut them in the data.
    dropout, input_dropout: inside each layer, and on the input.

    In serving, `prefix` and `rank` score in two steps what `forward` does in one; `predict` needs no labels.
    """

    mixes_samples = False

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
        num_time_buckets: int = 0,
        history: str = "history",
        candidates: str = "candidates",
        timestamps: str = "timestamps",
        now: str = "now",
    ) -> None:
        super().__init__(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            max_length=max_length,
            more_positions=1,  # candidates stand behind the longest history
            dropout=dropout,
            input_dropout=input_dropout,
            num_time_buckets=num_time_buckets,
            history=history,
            timestamps=timestamps,
        )
        check_names(type(self).__name__, candidates=candidates, now=now)
        self.candidates, self.now = candidates, now
        self.score_weight = nn.Parameter(torch.empty(dim).normal_(std=0.02))
        self.score_bias = nn.Parameter(torch.zeros(()))

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        scores = self._of_batch(batch, rows)
        labels_C = self._labels(batch)
        losses_C = functional.binary_cross_entropy_with_logits(
            scores.values, labels_C.to(scores.values.dtype), reduction="none"
        )
        return Output(
            losses=scores.like(losses_C).sum(),
            weights=scores.lengths.to(losses_C.dtype),
            predictions=scores.like(torch.sigmoid(scores.values.detach())),
        )

    def predict(self, batch: Batch, rows: dict[str, Any]) -> Jagged:
        """The probabilities of `forward`; labels are not looked at."""
        scores = self._of_batch(batch, rows)
        return scores.like(torch.sigmoid(scores.values.detach()))

    def _of_batch(self, batch: Batch, rows: dict[str, Any]) -> Jagged:
        check_rows(type(self).__name__, rows, Jagged, history=self.history, candidates=self.candidates)
        now_B = batch.dense.get(self.now) if self.num_time_buckets else None
        if self.num_time_buckets and not isinstance(now_B, Tensor):
            raise ValueError(
                f"num_time_buckets={self.num_time_buckets} needs batch.dense[{self.now!r}], the seconds of each sample's request "
                f"[B]; add it or set num_time_buckets=0"
            )
        nothing = [None] * batch.size
        histories, times = rows[self.history], self.times_of(batch)
        return self._scores(nothing, histories, rows[self.candidates], times, now_B)  # type: ignore[arg-type]

    def _labels(self, batch: Batch) -> Tensor:
        labels, name = batch.labels, type(self).__name__
        if not isinstance(labels, Jagged):
            got = "none" if labels is None else f"a tensor of shape {tuple(labels.shape)}"
            raise ValueError(
                f"{name} needs labels, a Jagged with one for each of a sample's candidates, got {got}; set Batch.labels"
            )
        if not torch.equal(labels.offsets, batch.keys[self.candidates].offsets):
            raise ValueError(f"{name}: labels must be one for each key of {self.candidates!r}, sample by sample")
        wrong = ~((labels.values >= 0) & (labels.values <= 1))  # written so that NaN is wrong too
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"label {labels.values[place].item()} of sample {int(labels.sample_ids()[place])} is outside [0, 1]; "
                f"clean the data or map the labels to click = 1, no click = 0"
            )
        return labels.values

    # -- serving -------------------------------------------------------------------------------------------------------

    def relay_problem(self) -> str | None:
        """Why keeping a prefix would change scores, or None: it does not, with any options of this model."""
        return None

    @torch.no_grad()
    def prefix(self, rows: Jagged, times: Jagged | None = None) -> list[Prefix]:
        """What is to be kept of the first items of each user, in float32; see Prefix.to for half of it.

        rows: of the items, [T, dim]. times: seconds of each, if the model looks at times.
        """
        self._check_serving(rows, times)
        self.check_lengths(rows.lengths)
        times_T = times.values if times is not None and self.num_time_buckets else None
        place_T = rows.places()
        x_TD = self.first_states(rows.values, place_T)
        tokens = Tokens(rows.offsets, _seen(place_T + 1, x_TD), times_T)
        bounds = rows.offsets.tolist()
        users = list(zip(bounds[:-1], bounds[1:], strict=True))
        seconds = [None if times_T is None else times_T[a:z].clone() for a, z in users]
        made = [Prefix([], z - a, of_user) for (a, z), of_user in zip(users, seconds, strict=True)]
        for layer in self._layers():
            if layer is self.layers[-1]:  # whose states nobody asks for
                k_TE, v_TE = layer.keys(x_TD)
            else:
                projected = layer.project(x_TD)
                k_TE, v_TE = projected.k_TE, projected.v_TE
                x_TD = layer.finish(x_TD, projected, tokens.attend(k_TE, v_TE), tokens.seen_T1)
            for prefix, (a, z) in zip(made, users, strict=True):
                # Copies: views would keep queries, and other users, in memory.
                prefix.layers.append((_copied(k_TE[a:z]), _copied(v_TE[a:z])))
        return made

    @torch.no_grad()
    def rank(
        self,
        prefixes: Sequence[Prefix | None],
        tails: Jagged,
        candidates: Jagged,
        *,
        times: Jagged | None = None,
        now: Tensor | None = None,
    ) -> Jagged:
        """Scores [C] of candidates (logits), for users whose history is a prefix and a tail.

        prefixes: of each user; None: all of the history is in the tail. `rank([None, ...], histories, candidates)` computes what
            training's forward does.
        tails: rows of the items behind the prefix, [T, dim]; candidates: theirs, [C, dim].
        times, now: seconds of each item of the tails, and of each user's request [B], if the model looks at times.

        With a prefix scores are those of the full pass up to rounding (1e-5 of the largest), and to the bit where all matrix
        products have the same shapes: docs/sequences.md says when.
        """
        self._check_serving(tails, times)
        self.check_width(self.candidates, candidates.values)
        if not len(prefixes) == len(tails) == len(candidates):
            raise ValueError(
                f"rank: {len(prefixes)} prefixes, {len(tails)} tails and {len(candidates)} lists of candidates; give one of each "
                f"for every user (None for no prefix, an empty list for no tail)"
            )
        if self.num_time_buckets and (now is None or now.shape != (len(tails),)):
            raise ValueError(f"rank: the model looks at times: give now, the seconds of each request [{len(tails)}]")
        for place, prefix in enumerate(prefixes):
            if prefix is not None:
                self._check_prefix(place, prefix, tails.values.device)
        return self._scores(prefixes, tails, candidates, times, now)

    def _check_serving(self, rows: Jagged, times: Jagged | None) -> None:
        if self.training and (self.dropout or self.input_dropout):
            raise ValueError(
                f"{type(self).__name__} is in training mode, where dropout changes scores; call model.eval() first"
            )
        self.check_width(self.history, rows.values)
        if self.num_time_buckets and (times is None or not torch.equal(times.offsets, rows.offsets)):
            raise ValueError("the model looks at times: give the seconds of each item, a Jagged like the rows")

    def _check_prefix(self, place: int, prefix: Prefix, device: torch.device) -> None:
        problem = None
        if len(prefix.layers) != len(self.layers):
            problem = f"has {len(prefix.layers)} layers, the model {len(self.layers)}; it is of another model"
        elif self.num_time_buckets and prefix.times is None:
            problem = "has no times, which the model looks at; it is of another model"
        for layer, (k, v) in zip(self._layers(), prefix.layers, strict=False):
            shape = (prefix.length, layer.inner)
            if k is None or k.shape != shape or v.shape != shape:
                problem = (
                    problem or f"must have keys and values of shape {shape} for each layer; it is of another model"
                )
            elif k.device != device or v.device != device:
                problem = problem or f"is on {k.device}, the tails on {device}; use prefix.to(device=...)"
        if problem is not None:
            raise ValueError(f"rank: the prefix of user {place} {problem}")

    # -- both ----------------------------------------------------------------------------------------------------------

    def _scores(
        self,
        prefixes: Sequence[Prefix | None],
        tails: Jagged,
        candidates: Jagged,
        times: Jagged | None,
        now_B: Tensor | None,
    ) -> Jagged:
        place_T, lengths_B, key_offsets = tails.places(), tails.lengths, tails.offsets
        times_S = times.values if times is not None and self.num_time_buckets else None
        relayed = any(prefix is not None and prefix.length for prefix in prefixes)
        bounds = tails.offsets.tolist() if relayed else []
        if relayed:
            kept_B = torch.tensor([0 if prefix is None else prefix.length for prefix in prefixes]).to(lengths_B)
            place_T, lengths_B = place_T + tails.spread(kept_B), lengths_B + kept_B
            key_offsets = functional.pad(lengths_B.cumsum(0), (1, 0))
            if times_S is not None:
                times_S = end_to_end([None if p is None else p.times for p in prefixes], times_S, bounds)
        self.check_lengths(lengths_B)
        self.check_width(self.history, tails.values)
        self.check_width(self.candidates, candidates.values)
        x_TD = self.first_states(tails.values, place_T)
        c_CD = self.first_states(candidates.values, candidates.spread(lengths_B))
        tokens = Tokens(tails.offsets, _seen(place_T + 1, x_TD), times_S, key_offsets if relayed else None)
        asked = Candidates(
            candidates.offsets, _seen(candidates.spread(lengths_B + 1), c_CD), now_B, key_offsets, times_S
        )
        for place, layer in enumerate(self._layers()):
            last = layer is self.layers[-1]  # above it nobody asks for the states of items
            projected = None if last else layer.project(x_TD)
            k_SE, v_SE = layer.keys(x_TD) if projected is None else (projected.k_TE, projected.v_TE)
            if relayed:
                kept = [(None, None) if prefix is None else prefix.layers[place] for prefix in prefixes]
                k_SE, v_SE = (end_to_end([pair[i] for pair in kept], (k_SE, v_SE)[i], bounds) for i in range(2))
            if projected is not None:
                x_TD = layer.finish(x_TD, projected, tokens.attend(k_SE, v_SE), tokens.seen_T1)
            own = layer.project(c_CD)
            c_CD = layer.finish(c_CD, own, asked.attend(own, k_SE, v_SE), asked.seen_C1)
        # Not a matrix product: of one column, its rounding depends on the number of rows.
        normed_CD = functional.layer_norm(c_CD, (self.dim,))
        return candidates.like((normed_CD * self.score_weight).sum(-1) + self.score_bias)

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]


def _seen(count: Tensor, states: Tensor) -> Tensor:
    return count.to(states.dtype)[:, None]


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class HSTURanker(Ranker):
    """Ranker of HSTU layers; inputs, arguments and outputs as `Ranker` has them."""

    layer_class = HSTULayer


class FuXiRanker(Ranker):
    """Ranker of FuXi layers; inputs, arguments and outputs as `Ranker` has them."""

    layer_class = FuXiLayer

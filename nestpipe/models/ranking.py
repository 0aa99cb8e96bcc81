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

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_labels, check_names, check_rows
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
            got = f"a tensor of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else "none"
            got = "a dict by task" if isinstance(labels, dict) else got
            raise ValueError(
                f"{name} needs labels, a Jagged with one for each of a sample's candidates, got {got}; set Batch.labels"
            )
        if not torch.equal(labels.offsets, batch.keys[self.candidates].offsets):
            raise ValueError(f"{name}: labels must be one for each key of {self.candidates!r}, sample by sample")
        check_labels(labels)
        return labels.values

    # -- serving -------------------------------------------------------------------------------------------------------

    def relay_problem(self) -> str | None:
        """Why keeping a prefix would change scores, or None: it does not, with any options of this model."""
        return None  # keys and values of an item depend on no later one

    @torch.no_grad()
    def prefix(
        self, rows: Jagged, times: Jagged | None = None, behind: Sequence[Prefix | None] | None = None
    ) -> list[Prefix]:
        """What is to be kept of the first items of each user, in float32; see Prefix.to for half of it.

        rows: of the items, [T, dim]. times: seconds of each, if the model looks at times.
        behind: for each user the prefix of the items before these, None where there are none. Only `rows` are computed, and what
            is returned is the prefix of all: as if computed at once up to rounding (1e-5 of the largest), and to the bit where
            attention is cut into the same tiles. The prefixes given are not changed.
        """
        self._check_serving(rows, times)
        kept = [None] * len(rows) if behind is None else behind
        self._check_prefixes("prefix", kept, rows)
        histories = self._histories(kept, rows, times)
        x_TD, tokens = histories.x_TD, histories.tokens
        bounds = histories.key_offsets.tolist()
        users = list(zip(bounds[:-1], bounds[1:], strict=True))
        seconds = [None if tokens.times_S is None else tokens.times_S[a:z].clone() for a, z in users]
        made = [Prefix([], z - a, of_user) for (a, z), of_user in zip(users, seconds, strict=True)]
        for place, layer in enumerate(self._layers()):
            last = layer is self.layers[-1]  # whose states nobody asks for
            projected = None if last else layer.project(x_TD)
            k_SE, v_SE = histories.keys(place, *(layer.keys(x_TD) if projected is None else projected[2:]))
            if projected is not None:
                x_TD = layer.finish(x_TD, projected, tokens.attend(k_SE, v_SE), tokens.seen_T1)
            for prefix, (a, z) in zip(made, users, strict=True):
                prefix.layers.append((_own(k_SE[a:z]), _own(v_SE[a:z])))
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
        self._check_prefixes("rank", prefixes, tails)
        return self._scores(prefixes, tails, candidates, times, now)

    def _check_serving(self, rows: Jagged, times: Jagged | None) -> None:
        if self.training and (self.dropout or self.input_dropout):
            raise ValueError(
                f"{type(self).__name__} is in training mode, where dropout changes scores; call model.eval() first"
            )
        self.check_width(self.history, rows.values)
        if self.num_time_buckets and (times is None or not torch.equal(times.offsets, rows.offsets)):
            raise ValueError("the model looks at times: give the seconds of each item, a Jagged like the rows")

    def _check_prefixes(self, call: str, prefixes: Sequence[Prefix | None], rows: Jagged) -> None:
        if len(prefixes) != len(rows):
            raise ValueError(
                f"{call}: {len(prefixes)} prefixes for {len(rows)} users; give one for each, None for no prefix"
            )
        for place, prefix in enumerate(prefixes):
            problem = None if prefix is None else self._problem_of(prefix, rows.values.device)
            if problem is not None:
                raise ValueError(f"{call}: the prefix of user {place} {problem}")

    def _problem_of(self, prefix: Prefix, device: torch.device) -> str | None:
        if len(prefix.layers) != len(self.layers):
            return f"has {len(prefix.layers)} layers, the model {len(self.layers)}; it is of another model"
        if self.num_time_buckets and prefix.times is None:
            return "has no times, which the model looks at; it is of another model"
        for layer, (k, v) in zip(self._layers(), prefix.layers, strict=True):
            shape = (prefix.length, layer.inner)
            if k is None or k.shape != shape or v.shape != shape:
                return f"must have keys and values of shape {shape} for each layer; it is of another model"
            if k.device != device or v.device != device:
                return f"is on {k.device}, the tails on {device}; use prefix.to(device=...)"
        return None

    # -- both ----------------------------------------------------------------------------------------------------------

    def _scores(
        self,
        prefixes: Sequence[Prefix | None],
        tails: Jagged,
        candidates: Jagged,
        times: Jagged | None,
        now_B: Tensor | None,
    ) -> Jagged:
        self.check_width(self.history, tails.values)
        self.check_width(self.candidates, candidates.values)
        histories = self._histories(prefixes, tails, times)
        x_TD, tokens, lengths_B = histories.x_TD, histories.tokens, histories.lengths_B
        c_CD = self.first_states(candidates.values, candidates.spread(lengths_B))
        seen_C1 = _seen(candidates.spread(lengths_B + 1), c_CD)
        asked = Candidates(candidates.offsets, seen_C1, now_B, histories.key_offsets, tokens.times_S)
        for place, layer in enumerate(self._layers()):
            last = layer is self.layers[-1]  # above it nobody asks for the states of items
            projected = None if last else layer.project(x_TD)
            k_SE, v_SE = histories.keys(place, *(layer.keys(x_TD) if projected is None else projected[2:]))
            if projected is not None:
                x_TD = layer.finish(x_TD, projected, tokens.attend(k_SE, v_SE), tokens.seen_T1)
            own = layer.project(c_CD)
            c_CD = layer.finish(c_CD, own, asked.attend(own, k_SE, v_SE), asked.seen_C1)
        # Not a matrix product: of one column, its rounding depends on the number of rows.
        normed_CD = functional.layer_norm(c_CD, (self.dim,))
        return candidates.like((normed_CD * self.score_weight).sum(-1) + self.score_bias)

    def _histories(self, prefixes: Sequence[Prefix | None], tails: Jagged, times: Jagged | None) -> _Histories:
        place_T, lengths_B, key_offsets = tails.places(), tails.lengths, tails.offsets
        times_S = times.values if times is not None and self.num_time_buckets else None
        kept = any(prefix is not None and prefix.length for prefix in prefixes)
        bounds = tails.offsets.tolist() if kept else []
        if kept:
            kept_B = torch.tensor([0 if prefix is None else prefix.length for prefix in prefixes]).to(lengths_B)
            place_T, lengths_B = place_T + tails.spread(kept_B), lengths_B + kept_B
            key_offsets = functional.pad(lengths_B.cumsum(0), (1, 0))
            if times_S is not None:
                times_S = end_to_end([None if p is None else p.times for p in prefixes], times_S, bounds)
        self.check_lengths(lengths_B)
        x_TD = self.first_states(tails.values, place_T)
        tokens = Tokens(tails.offsets, _seen(place_T + 1, x_TD), times_S, key_offsets if kept else None)
        return _Histories(prefixes if kept else None, bounds, key_offsets, lengths_B, x_TD, tokens)

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class _Histories:
    """Of each user the items whose keys are kept, if any, and behind them those that are computed: the tail.

    prefixes: None: nothing is kept of anybody. bounds: of the tails; empty if nothing is kept. key_offsets, lengths_B: of both
    together. x_TD: of the tails, before the first layer.
    """

    prefixes: Sequence[Prefix | None] | None
    bounds: list[int]
    key_offsets: Tensor
    lengths_B: Tensor
    x_TD: Tensor
    tokens: Tokens

    def keys(self, place: int, k_TE: Tensor, v_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all items [S, E] in that layer, of those of the tails."""
        if self.prefixes is None:
            return k_TE, v_TE
        kept = [(None, None) if prefix is None else prefix.layers[place] for prefix in self.prefixes]
        ks, vs = ([pair[part] for pair in kept] for part in range(2))
        return end_to_end(ks, k_TE, self.bounds), end_to_end(vs, v_TE, self.bounds)


def _seen(count: Tensor, states: Tensor) -> Tensor:
    return count.to(states.dtype)[:, None]


def _own(x: Tensor) -> Tensor:
    """A copy, unless it is all there is in its memory: a view would keep queries, and other users, there."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


class HSTURanker(Ranker):
    """Ranker of HSTU layers; inputs, arguments and outputs as `Ranker` has them."""

    layer_class = HSTULayer


class FuXiRanker(Ranker):
    """Ranker of FuXi layers; inputs, arguments and outputs as `Ranker` has them."""

    layer_class = FuXiLayer

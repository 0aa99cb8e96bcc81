"""DIN (arXiv 1706.06978): of a user's history, a candidate sees what has to do with it.

interest(c) = sum over the items j of the history of a(j, c) * item_j, where a is an MLP of (item_j, c, c - item_j, c * item_j),
without a softmax: many items that fit weigh more than one. logit = MLP(dense inputs, features, interest(c), c).

Choices: PReLU where the paper has Dice, which normalises by the statistics of a batch and so would mix samples; no regulariser of
its own for rows (a table's weight_decay is one). The paper trains one candidate a sample; here a sample has one or a list.

Shape legend: B samples, C candidates of all samples, N pairs of a candidate and an item of its history, W width of an item: one
row, or several side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_labels, check_names, check_rows, check_widths
from nestpipe.models.clicks import MLP, FeatureModel


class DIN(FeatureModel):
    """Predicts which candidates a user clicks: per-candidate binary cross entropy; Output.predictions are probabilities.

    Reads `rows[history]`, a Jagged, and `rows[candidates]`: a Jagged if each sample has a list of candidates (then labels and
    predictions are Jagged like it, Output.losses are sums over a sample's candidates and Output.weights their number), or
    [B, dim] if it has one (a pooled feature; then labels and predictions are [B]).

    num_dense: columns of `batch.dense[dense]`; 0 without.
    features: pooled features of user and context, `rows[name]` [B, dim]. History and candidates are left out if they are listed.
    dim: width of all rows.
    history, candidates: a feature each; or lists of as many, such as item and category, whose rows make up an item side by side.
    attention, top: hidden widths of the two MLPs, which end in one number that is not to be listed.
    dropout: behind each hidden layer of the top MLP.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_dense: int = 0,
        features: Sequence[str] = (),
        history: str | Sequence[str] = "history",
        candidates: str | Sequence[str] = "candidates",
        attention: Sequence[int] = (80, 40),
        top: Sequence[int] = (200, 80),
        dropout: float = 0.0,
        dense: str = "dense",
    ) -> None:
        names = _names(history=history), _names(candidates=candidates)
        if isinstance(features, Iterable) and not isinstance(features, str):
            features = [name for name in features if name not in (*names[0], *names[1])]
        super().__init__(num_dense=num_dense, features=features, dim=dim, dense=dense, fewest_features=0)
        check_widths("DIN", attention=attention, top=top)
        self.history, self.candidates = names
        if len(self.history) != len(self.candidates):
            raise ValueError(
                f"DIN: history is {self.history}, candidates {self.candidates}; give as many, in the same order: what an item of "
                f"the history is made of, a candidate must be, too"
            )
        width = dim * len(self.history)
        self.attention = MLP([4 * width, *attention, 1], activation=nn.PReLU)
        self.top = MLP([self.num_inputs + 2 * width, *top, 1], activation=nn.PReLU, dropout=dropout)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        logits = self.logits(batch, rows)
        in_lists = isinstance(rows[self.candidates[0]], Jagged)
        labels_C = self._labels(batch, in_lists=in_lists).to(logits.values.dtype)
        losses_C = functional.binary_cross_entropy_with_logits(logits.values, labels_C, reduction="none")
        clicks_C = torch.sigmoid(logits.values.detach())
        if not in_lists:
            return Output(losses=losses_C, predictions=clicks_C)
        return Output(
            losses=logits.like(losses_C).sum(),
            weights=logits.lengths.to(losses_C.dtype),
            predictions=logits.like(clicks_C),
        )

    def predict(self, batch: Batch, rows: dict[str, Any]) -> Tensor | Jagged:
        """The probabilities of `forward`; labels are not looked at."""
        logits = self.logits(batch, rows)
        clicks_C = torch.sigmoid(logits.values.detach())
        return logits.like(clicks_C) if isinstance(rows[self.candidates[0]], Jagged) else clicks_C

    def logits(self, batch: Batch, rows: dict[str, Any]) -> Jagged:
        """Of each sample's candidates."""
        check_rows("DIN", rows, Jagged, **_numbered("history", self.history))
        check_rows("DIN", rows, (Jagged, Tensor), **_numbered("candidates", self.candidates))
        history, candidates = (self._items(rows, names) for names in (self.history, self.candidates))
        interest_CW = self._interest(history, candidates)
        parts = [interest_CW, candidates.values]
        if self.num_inputs:
            parts.insert(0, candidates.spread(self.inputs_of(batch, rows)))
        return candidates.like(self.top(torch.cat(parts, dim=1)).squeeze(-1))

    def _interest(self, history: Jagged, candidates: Jagged) -> Tensor:
        """[C, W]"""
        # The history of a candidate's sample, for each candidate: the list of its pairs.
        where_N, offsets = history.positions(candidates.sample_ids())
        items_NW = functional.embedding(where_N, history.values)  # a gather whose backward adds in a fixed order
        pairs = Jagged(items_NW, offsets)
        asked_NW = pairs.spread(candidates.values)
        seen = torch.cat([items_NW, asked_NW, asked_NW - items_NW, asked_NW * items_NW], dim=1)
        return pairs.like(self.attention(seen) * items_NW).sum()

    def _items(self, rows: dict[str, Any], names: list[str]) -> Jagged:
        """The rows of what an item is made of, side by side."""
        parts = [rows[name] if isinstance(rows[name], Jagged) else _one_each(rows[name]) for name in names]
        for name, part in zip(names, parts, strict=True):
            self.check_width(name, part.values)
            if part is not parts[0] and not torch.equal(part.offsets, parts[0].offsets):
                raise ValueError(
                    f"DIN: {names[0]!r} and {name!r} make up an item together, so every sample needs as many keys of the one as "
                    f"of the other"
                )
        return parts[0].like(torch.cat([part.values for part in parts], dim=1))

    def _labels(self, batch: Batch, *, in_lists: bool) -> Tensor:
        labels, name = batch.labels, self.candidates[0]
        if not isinstance(labels, Jagged if in_lists else Tensor):
            wanted = "a Jagged with one for each of a sample's candidates" if in_lists else "a tensor [B]"
            got = "none" if labels is None else f"a {type(labels).__name__}"
            raise ValueError(f"DIN needs labels, {wanted}, got {got}; set Batch.labels")
        if isinstance(labels, Jagged) and not torch.equal(labels.offsets, batch.keys[name].offsets):
            raise ValueError(f"DIN: labels must be one for each key of {name!r}, sample by sample")
        check_labels(labels)
        return labels.values if isinstance(labels, Jagged) else labels


def _names(**argument: str | Sequence[str]) -> list[str]:
    ((argument_name, given),) = argument.items()
    names = [given] if isinstance(given, str) else list(given)
    check_names("DIN", **_numbered(argument_name, names))
    if not names or len(set(names)) != len(names):
        raise ValueError(f"DIN: {argument_name} must be a feature, or a list of different ones, got {given!r}")
    return names


def _numbered(argument: str, names: Sequence[str]) -> dict[str, str]:
    return {argument if len(names) == 1 else f"{argument}[{place}]": name for place, name in enumerate(names)}


def _one_each(rows_BD: Tensor) -> Jagged:
    return Jagged(rows_BD, torch.arange(len(rows_BD) + 1, device=rows_BD.device))

"""Two towers (Yi et al. 2019): one makes a vector of a user, one of an item; their product says how well both fit.

Items of the other samples are negatives, so none is looked up for it: of all workers, whatever the split of the batch.

Shape legend: B samples, N samples of all workers, C candidates, D row width, E width of the vectors that are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_dropout, check_names, check_rows, check_scores, check_whole, check_widths
from nestpipe.models.clicks import MLP
from nestpipe.models.negatives import LOG_Q
from nestpipe.ops import dropout as drop
from nestpipe.ops import in_batch_softmax, log_frequencies, normalize

IN_BATCH = ("global", "micro-batch")


class TwoTower(nn.Module):
    """Retrieval: what a user takes next, of all items. In-batch softmax with log-q correction; `query` and `score` for ranking.

    Reads the rows of the user's features, of the item, and the item's keys, one for each sample. With `batch.dense["user"]` [B],
    who it is, other items of the same user are no negatives.

    dim: width of all rows.
    users: features of the user's side; a pooled one gives its row, a sequence the mean of its rows.
    item: the feature with the item that the user has taken: one key for each sample (a sample without one counts nothing). Its
        table's rows are what `score` gets of candidates.
    hidden: widths of the layers of each tower before its last one, of `width`.
    width: of the vectors that are compared; as the rows, unless given.
    dropout: on the input of the user's tower.
    normalize, temperature: score = cosine / temperature, or the plain product / temperature.
    in_batch: whose items a sample is compared with: "global", those of the samples of all workers, exact whatever the split;
        "micro-batch", those of its micro-batch, with no exchange: then the result depends on the split.
    log_q: where the popularity comes from that logits are corrected for: "batch" (the items' share of those compared with),
        "data" (`batch.dense["log_q"]` [B], the logarithm of the item's share of all), "none".
    """

    def __init__(
        self,
        *,
        dim: int,
        users: Sequence[str] = ("history",),
        item: str = "target",
        hidden: Sequence[int] = (),
        width: int | None = None,
        dropout: float = 0.0,
        normalize: bool = True,
        temperature: float = 0.05,
        in_batch: str = "global",
        log_q: str = "batch",
    ) -> None:
        super().__init__()
        check_whole("TwoTower", 1, dim=dim, **({} if width is None else {"width": width}))
        check_widths("TwoTower", hidden=hidden)
        check_dropout("TwoTower", dropout=dropout)
        if not isinstance(users, Iterable) or isinstance(users, str) or not users:
            raise ValueError(f"TwoTower: users must be a list of one or more features, got {users!r}")
        check_names("TwoTower", item=item, **{f"users[{place}]": name for place, name in enumerate(users)})
        for name, value, known in (("in_batch", in_batch, IN_BATCH), ("log_q", log_q, LOG_Q)):
            if value not in known:
                raise ValueError(f"TwoTower: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        check_scores("TwoTower", normalize=normalize, temperature=temperature)
        self.users, self.item, self.dim, self.log_q = list(users), item, dim, log_q
        self.dropout, self.normalize, self.temperature = dropout, normalize, temperature
        self.mixes_samples = in_batch
        ends = [*hidden, dim if width is None else width]
        self.user_tower, self.item_tower = MLP([dim * len(self.users), *ends]), MLP([dim, *ends])

    def forward(self, batch: Batch, rows: dict[str, Tensor | Jagged]) -> Output:
        """Losses among these samples alone, as evaluation has them."""
        return self.compare(*self.embed(batch, rows), 0)

    def embed(self, batch: Batch, rows: dict[str, Tensor | Jagged]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The user's vector and weight, which stay with the sample; the item's vector, key and popularity, which all see."""
        items_BD = self._row("item", self.item, rows)
        keys = batch.keys[self.item]
        has_item_B = keys.lengths == 1
        if (keys.lengths > 1).any():
            sample = int((keys.lengths > 1).nonzero()[0])
            raise ValueError(
                f"TwoTower: feature {self.item!r} has {int(keys.lengths[sample])} keys in sample {sample}; give each sample one "
                f"item, and each further item a sample of its own"
            )
        key_B = keys.values.new_full((batch.size,), -1).masked_scatter(has_item_B, keys.values)
        shared = {"item": self._scaled(self.item_tower(items_BD)), "key": key_B, "present": has_item_B}
        if self.log_q == "data":
            shared["log_q"] = self._given_log_q(batch)
        if "user" in batch.dense:
            shared["user"] = self._whose(batch)
        return {"user": self.query(batch, rows), "present": has_item_B}, shared

    def compare(self, own: dict[str, Tensor], shared: dict[str, Tensor], first: int) -> Output:
        """Losses of `own` samples, whose items begin at `first` of all that are shared."""
        present_N = shared["present"]
        taken_B = own["present"].nonzero().squeeze(1)
        items_ND, keys_N = shared["item"][present_N], shared["key"][present_N]
        log_q_N = log_frequencies(keys_N) if self.log_q == "batch" else None
        if self.log_q == "data":
            log_q_N = shared["log_q"][present_N]
        users_BE = self._scaled(own["user"][taken_B]) / self.temperature
        before = int(present_N[:first].sum())
        whose_N = shared["user"][present_N] if "user" in shared else None
        losses = in_batch_softmax(users_BE, items_ND, keys_N, log_q_N, users_N=whose_N, first=before)
        losses_B = losses.new_zeros(len(own["present"])).index_copy(0, taken_B, losses)
        return Output(losses_B, weights=own["present"].to(losses_B.dtype))

    def query(self, batch: Batch, rows: dict[str, Tensor | Jagged]) -> Tensor:
        """[B, E]: of the users."""
        parts = [self._row(f"users[{place}]", name, rows) for place, name in enumerate(self.users)]
        return self.user_tower(drop(torch.cat(parts, dim=1), p=self.dropout, training=self.training))

    def score(self, query_BE: Tensor, candidates_CD: Tensor) -> Tensor:
        """[B, C]: the logits that training compares, of the rows of candidates."""
        return (self._scaled(query_BE) / self.temperature) @ self._scaled(self.item_tower(candidates_CD)).T

    def _row(self, argument: str, name: str, rows: dict[str, Tensor | Jagged]) -> Tensor:
        check_rows("TwoTower", rows, (Jagged, Tensor), **{argument: name})
        given = rows[name]
        row_BD = given.mean() if isinstance(given, Jagged) else given
        if row_BD.shape[-1] != self.dim:
            raise ValueError(
                f"feature {name!r} has rows of {row_BD.shape[-1]} values, the model has dim={self.dim}; give its table "
                f"dim={self.dim}"
            )
        return row_BD

    def _whose(self, batch: Batch) -> Tensor:
        whose = batch.dense["user"]
        if not isinstance(whose, Tensor) or whose.ndim != 1 or whose.is_floating_point():
            got = f"{whose.dtype} of shape {tuple(whose.shape)}" if isinstance(whose, Tensor) else "a Jagged"
            raise ValueError(
                f"TwoTower: batch.dense['user'] must be whole numbers [B], who has taken each item, got {got}; leave it out, or "
                f"give it another name if it says something else"
            )
        return whose

    def _given_log_q(self, batch: Batch) -> Tensor:
        given = batch.dense.get("log_q")
        if not isinstance(given, Tensor) or given.ndim != 1:
            raise ValueError(
                "TwoTower: log_q='data' needs batch.dense['log_q'], a tensor [B] with the logarithm of each item's share of all; "
                "set log_q = true in the data, or log_q='batch' in the model"
            )
        return given

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors) if self.normalize else vectors

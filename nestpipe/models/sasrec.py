"""SASRec (arXiv 1808.09781): a causal transformer of softmax attention, trained to predict the next item of a history.

Block: Z = X + softmax(Q K^T / sqrt(d)) V, with Q, K, V = LN(X) W; Y = Z + W_2 ReLU(W_1 LN(Z) + b_1) + b_2; dropout behind the
attention and both linear maps. The states of the last block are normalised once more, and their dot products with item rows are
the logits.

Choices: both sub-layers are normalised and added as the paper writes it; the authors' code adds the normalised input instead, and
reads keys and values before they are normalised. Weights of the attention have no dropout of their own. Positions count from the
first item of a history, not from its end. Negatives may be items that the user has had, only not the target itself.

Shape legend: T tokens of all histories, P positions that have a next item, K negatives of each, D row width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Streamed
from nestpipe.models.arguments import check_rows
from nestpipe.models.layer import Layer, Tokens
from nestpipe.models.negatives import IN_BATCH, Negatives, Positions
from nestpipe.models.sequence import SequenceModel
from nestpipe.ops import dropout, normalize

LOSSES = ("bce", "softmax")


class SASRecLayer(Layer):
    def __init__(
        self, *, dim: int, num_heads: int, head_dim: int, max_length: int, num_time_buckets: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads, self.inner = num_heads, num_heads * head_dim
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * self.inner, bias=False)
        self.ffn_in, self.ffn_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scale, self.dropout = head_dim**-0.5, dropout

    def forward(self, x_TD: Tensor, tokens: Tokens) -> Tensor:
        q_TE, k_TE, v_TE = self.qkv(self.attention_norm(x_TD)).chunk(3, dim=-1)
        attend = tokens.attend(k_TE, v_TE)
        z_TD = x_TD + self._drop(attend(q_TE * self.scale, num_heads=self.num_heads, kind="softmax"))
        hidden_TD = self._drop(functional.relu(self.ffn_in(self.ffn_norm(z_TD))))
        return z_TD + self._drop(self.ffn_out(hidden_TD))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, p=self.dropout, training=self.training)


class SASRec(SequenceModel):
    """Next-item model of transformer blocks; inputs, outputs and the other arguments as `SequenceModel` has them.

    dim: width of the rows and of the states; a multiple of num_heads.
    dropout, input_dropout: inside each block, and on the input.
    loss: "bce": the target and each of its position's own negatives are judged by themselves, binary cross entropy of the target
        plus the mean of the negatives', with one negative the paper's loss. It needs negatives_per = "position", in the data too.
        "softmax": the target competes with the negatives, as in HSTU and FuXi, with all options of negatives.
    normalize, temperature: the paper's scores are plain dot products; for "softmax" true and 0.05 are worth a try.
    """

    layer_class = SASRecLayer

    def __init__(
        self,
        *,
        dim: int,
        num_layers: int = 2,
        num_heads: int = 1,
        max_length: int = 50,
        dropout: float = 0.2,
        input_dropout: float = 0.2,
        loss: str = "bce",
        normalize: bool = False,
        temperature: float = 1.0,
        history: str = "history",
        negatives: str = "negatives",
        negatives_per: str = "position",
        negatives_dtype: str = "float32",
        share_negatives: int = 0,
        log_q: str | None = None,
    ) -> None:
        super().__init__(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            max_length=max_length,
            dropout=dropout,
            input_dropout=input_dropout,
            normalize=normalize,
            temperature=temperature,
            history=history,
            negatives=negatives,
            negatives_per=negatives_per,
            negatives_dtype=negatives_dtype,
            share_negatives=share_negatives,
            log_q=log_q,
        )
        if loss not in LOSSES:
            raise ValueError(f"{type(self).__name__}: loss must be one of {LOSSES}, got {loss!r}")
        if loss == "bce":
            self.negatives = JudgedAlone(**dataclasses.asdict(self.negatives))
        self.last_norm = nn.LayerNorm(dim)

    def encode(self, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
        """[T, D]: the state after each item of each history."""
        return self.last_norm(super().encode(batch, rows))


class JudgedAlone(Negatives):
    """Negatives that do not compete with the target: each is a click that did not happen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = None
        if self.feature == IN_BATCH:
            problem = f"negatives={IN_BATCH!r} compete in a softmax"
        elif self.per != "position":
            problem = f"it takes negatives of each position, not negatives_per={self.per!r}"
        elif self.share or self.dtype != "float32":
            problem = "share_negatives and negatives_dtype are for negatives that compete in a softmax"
        if problem is not None:
            raise ValueError(
                f"{self.model}: loss='bce': {problem}; draw one for each position (data.negatives_per = 'position', "
                f"data.num_negatives = 1), or use loss='softmax'"
            )

    def check(self, rows: dict[str, Any]) -> None:
        check_rows(self.model, rows, Jagged, negatives=self.feature)

    def losses(self, batch: Batch, rows: dict[str, Jagged | Streamed], positions: Positions) -> Tensor:
        negatives, keys_N = rows[self.feature], batch.keys[self.feature].values
        assert isinstance(negatives, Jagged)
        num = self._num_negatives(negatives.lengths, positions.offsets)
        rows_ND = normalize(negatives.values) if self.normalize else negatives.values
        negatives_PKD = rows_ND.view(len(positions.states_PD), num, rows_ND.shape[-1])
        true_P = (positions.states_PD * positions.targets_PD).sum(-1)
        false_PK = (positions.states_PD.unsqueeze(1) * negatives_PKD).sum(-1)
        counts_PK = (keys_N.view(-1, num) != positions.target_keys_P.unsqueeze(1)).to(false_PK.dtype)
        of_negatives_P = (functional.softplus(false_PK) * counts_PK).sum(1) / counts_PK.sum(1).clamp(min=1)
        return functional.softplus(-true_P) + of_negatives_P

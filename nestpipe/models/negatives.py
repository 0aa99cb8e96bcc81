"""What the next item of a history competes with: negatives that the data draws, or the next items of others.

Shape legend: B samples, P positions that have a next item, K negatives per sample or position, N of all, D row width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged, Streamed
from nestpipe.models.arguments import check_names, check_rows, check_whole
from nestpipe.ops import in_batch_softmax, log_frequencies, normalize, sampled_softmax, segmented_softmax
from nestpipe.ops.segmented_softmax import negatives_each

IN_BATCH = "in-batch"
LOG_Q = ("batch", "data", "none")
PER = ("sample", "position")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(eq=False)
class Positions:
    """Tokens that have a next one, as the loss compares them."""

    states_PD: Tensor
    targets_PD: Tensor
    target_keys_P: Tensor
    offsets: Tensor  # which are whose, [B + 1]
    after_P: Tensor  # which token of all histories the target is
    histories: Tensor  # offsets of these, [B + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Negatives:
    """The arguments of a SequenceModel that say what its loss compares; see there."""

    model: str
    feature: str
    per: str
    dtype: str
    share: int
    log_q: str | None
    normalize: bool

    def __post_init__(self) -> None:
        check_names(self.model, negatives=self.feature)
        check_whole(self.model, 0, share_negatives=self.share)
        for name, value, known in (
            ("negatives_per", self.per, PER),
            ("negatives_dtype", self.dtype, tuple(DTYPES)),
            ("log_q", self.log_q, (None, *LOG_Q)),
        ):
            if value not in known:
                raise ValueError(f"{self.model}: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if self.feature != IN_BATCH:
            if self.log_q is not None:
                raise ValueError(
                    f"{self.model}: log_q={self.log_q!r} is for negatives={IN_BATCH!r}; the negatives of feature "
                    f"{self.feature!r} are drawn uniformly and need no correction: leave it out"
                )
            return
        given = {"negatives_dtype": self.dtype != "float32", "share_negatives": self.share != 0}
        for name, is_given in given.items():
            if is_given:
                raise ValueError(
                    f"{self.model}: {name} is for negatives of a feature, and negatives={IN_BATCH!r} looks none up; "
                    f"leave it out"
                )

    @property
    def mixes_samples(self) -> str | None:
        """What the model declares. None: nothing, each sample is by itself, and the engine tries whether that is so."""
        return "micro-batch" if self.share or self.feature == IN_BATCH else None

    def check(self, rows: dict[str, Jagged | Streamed]) -> None:
        if self.feature != IN_BATCH:
            check_rows(self.model, rows, (Jagged, Streamed), negatives=self.feature)

    def losses(self, batch: Batch, rows: dict[str, Jagged | Streamed], positions: Positions) -> Tensor:
        """[P]"""
        if self.feature == IN_BATCH:
            log_q_P = self._log_q(batch, positions)
            users_P = Jagged(positions.target_keys_P, positions.offsets).sample_ids()
            return in_batch_softmax(
                positions.states_PD, positions.targets_PD, positions.target_keys_P, log_q_P, users_N=users_P
            )
        negatives, keys_N = rows[self.feature], batch.keys[self.feature].values
        num = self._num_negatives(negatives.lengths, positions.offsets)
        compared = positions.states_PD, positions.targets_PD
        if isinstance(negatives, Jagged) and (self.per, self.share, self.dtype) == ("sample", 0, "float32"):
            # Faster while all fits: logits are kept for the backward.
            rows_BKD = negatives.values.view(len(negatives), num, negatives.values.shape[-1])
            rows_BKD = normalize(rows_BKD) if self.normalize else rows_BKD
            return sampled_softmax(
                *compared, rows_BKD, positions.target_keys_P, keys_N.view(len(negatives), num), positions.offsets
            )
        return segmented_softmax(
            *compared,
            negatives,
            positions.target_keys_P,
            keys_N,
            positions.offsets,
            per=self.per,
            share=self.share,
            normalize=self.normalize,
            dtype=DTYPES[self.dtype],
        )

    def _log_q(self, batch: Batch, positions: Positions) -> Tensor | None:
        if self.log_q == "none":
            return None
        if self.log_q != "data":
            return log_frequencies(positions.target_keys_P)
        given = batch.dense.get("log_q")
        if not isinstance(given, Jagged):
            raise ValueError(
                f"{self.model}: log_q='data' needs batch.dense['log_q'], a Jagged with the logarithm of each history item's "
                f"share of all; set log_q = true in the data, or log_q='batch' in the model"
            )
        if not torch.equal(given.offsets, positions.histories):
            raise ValueError(f"{self.model}: batch.dense['log_q'] must have one number for each item of the history")
        return given.values[positions.after_P]

    def _num_negatives(self, lengths_B: Tensor, offsets: Tensor) -> int:
        try:
            return negatives_each(lengths_B, offsets, per=self.per)
        except ValueError as error:
            raise ValueError(
                f"feature {self.feature!r}: {error}; draw as many for each in the data, and give model and data the same "
                f"negatives_per (here {self.per!r})"
            ) from None

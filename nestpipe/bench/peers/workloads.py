"""The workloads that peers are measured on: bags of several shapes into a DLRM, and item sequences into HSTU layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.dlrm import DLRM
from nestpipe.models.hstu import HSTU
from nestpipe.optim import RowwiseAdagrad
from nestpipe.tables import Feature, Table, Uniform

ZIPF_EXPONENT = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes, per worker where samples are meant.

    num_keys: of a sample in every table: the fewest and the most, all numbers in between alike.
    shardings: of TorchRec, those that may be its fastest on gloo. The first must train the same model as nestpipe does;
        column-wise tables keep an AdaGrad sum for each part of a row, so theirs is another, for the time it takes.
    whole: of nestpipe's tables of bags: one worker holds each, or all hold it by key.
    """

    name: str
    num_tables: int
    num_rows: int
    dim: int = 64
    num_samples: int
    num_keys: tuple[int, int]
    pooling: str | None = "sum"
    num_dense: int = 13
    shardings: tuple[str, ...] = ("table_wise",)
    whole: bool = True

    def tables(self, *, lr: float = 0.05) -> list[Table]:
        """What both sides declare."""
        table = Table("", self.dim, RowwiseAdagrad(lr=lr, eps=1e-10), Uniform(-0.05, 0.05))
        if self.pooling is not None and self.whole:
            table = dataclasses.replace(table, owners=1, pooled_at="owner")
        return [dataclasses.replace(table, name=f"t{t}") for t in range(self.num_tables)]

    def features(self) -> list[Feature]:
        return [Feature(f"f{t}", f"t{t}", self.pooling) for t in range(self.num_tables)]

    def rows_per_table(self) -> dict[str, int]:
        """The fixed sizes that peers need."""
        return {f"t{t}": self.num_rows for t in range(self.num_tables)}

    def model(self, *, seed: int = 0) -> nn.Module:
        """The dense module, alike at every call: give each contestant its own."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.pooling is None:
                return SequenceRanker(dim=self.dim, max_length=self.num_keys[1], history="f0")
            names = [feature.name for feature in self.features()]
            return DLRM(num_dense=self.num_dense, features=names, dim=self.dim, bottom=(512, 256), top=(512, 256))

    def batches(self, *, rank: int, count: int, keys: str = "uniform", seed: int = 0) -> list[Batch]:
        """`count` batches of the given worker; `keys` is "uniform" or "zipf" (exponent 1.05)."""
        if keys not in ("uniform", "zipf"):
            raise ValueError(f"workload {self.name!r}: keys must be 'uniform' or 'zipf', got {keys!r}")
        draw = np.random.default_rng([seed, rank])
        fewest, most = self.num_keys
        features: list[list[Jagged]] = []
        for t in range(self.num_tables):
            values = _keys(draw, self.num_rows, (count, self.num_samples * most), zipf=keys == "zipf", table=t)
            lengths = torch.from_numpy(draw.integers(fewest, most + 1, (count, self.num_samples)))
            features.append([Jagged.from_lengths(values[b, : lengths[b].sum()], lengths[b]) for b in range(count)])
        dense = draw.standard_normal((count, self.num_samples, self.num_dense), dtype=np.float32)
        labels = (draw.random((count, self.num_samples)) < 0.3).astype(np.float32)
        return [
            Batch(
                keys={f"f{t}": features[t][b] for t in range(self.num_tables)},
                dense={"dense": torch.from_numpy(dense[b])},
                labels=torch.from_numpy(labels[b]),
            )
            for b in range(count)
        ]


class SequenceRanker(nn.Module):
    """Two HSTU layers over the history and a logit from the last state. No dropout: runs stay comparable."""

    def __init__(self, *, dim: int, max_length: int, history: str) -> None:
        super().__init__()
        self.encoder = HSTU(
            dim=dim, num_layers=2, num_heads=4, max_length=max_length, dropout=0.0, input_dropout=0.0, history=history
        )
        self.logit = nn.Linear(dim, 1)

    def forward(self, batch: Batch, rows: dict[str, Jagged]) -> Output:
        assert isinstance(batch.labels, torch.Tensor)
        logits_B = self.logit(self.encoder.query(batch, rows)).squeeze(-1)
        return Output(F.binary_cross_entropy_with_logits(logits_B, batch.labels, reduction="none"))


BAGS = Workload(name="bags", num_tables=8, num_rows=1_000_000, num_samples=2048, num_keys=(10, 10))
SEQUENCES = Workload(
    name="sequences", num_tables=1, num_rows=2_000_000, num_samples=512, num_keys=(50, 50), pooling=None, num_dense=0,
    shardings=("row_wise",),
)  # fmt: skip
SHORT_BAGS = Workload(name="short bags", num_tables=26, num_rows=200_000, num_samples=2048, num_keys=(1, 2))
LONG_BAGS = Workload(
    name="long bags", num_tables=2, num_rows=200_000, num_samples=1024, num_keys=(100, 100),
    shardings=("table_wise", "column_wise"),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in (BAGS, SEQUENCES, SHORT_BAGS, LONG_BAGS)}


def _keys(draw: np.random.Generator, num_rows: int, shape: tuple[int, int], *, zipf: bool, table: int) -> Tensor:
    if not zipf:
        return torch.from_numpy(draw.integers(0, num_rows, shape))
    cumulative = np.cumsum(np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT)
    ranked = np.minimum(np.searchsorted(cumulative, draw.random(shape) * cumulative[-1]), num_rows - 1)
    # Popular keys lie anywhere: else sharding by ranges of rows would give all of them to worker 0.
    return torch.from_numpy(np.random.default_rng(table).permutation(num_rows)[ranked])

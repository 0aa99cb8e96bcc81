"""The two workloads that peers are measured on: bags into a DLRM, and item sequences into HSTU layers."""

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
    """Sizes, per worker where samples are meant; every sample has the same number of keys in every table."""

    name: str
    num_tables: int
    num_rows: int
    dim: int
    num_samples: int
    num_keys: int
    pooling: str | None
    num_dense: int

    def tables(self, *, lr: float = 0.05) -> list[Table]:
        """What both sides declare."""
        optimizer = RowwiseAdagrad(lr=lr, eps=1e-10)
        return [Table(f"t{t}", self.dim, optimizer, Uniform(-0.05, 0.05)) for t in range(self.num_tables)]

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
                return SequenceRanker(dim=self.dim, max_length=self.num_keys, history="f0")
            names = [feature.name for feature in self.features()]
            return DLRM(num_dense=self.num_dense, features=names, dim=self.dim, bottom=(512, 256), top=(512, 256))

    def batches(self, *, rank: int, count: int, keys: str = "uniform", seed: int = 0) -> list[Batch]:
        """`count` batches of the given worker; `keys` is "uniform" or "zipf" (exponent 1.05)."""
        if keys not in ("uniform", "zipf"):
            raise ValueError(f"workload {self.name!r}: keys must be 'uniform' or 'zipf', got {keys!r}")
        draw = np.random.default_rng([seed, rank])
        total = self.num_samples * self.num_keys
        offsets = torch.arange(0, total + 1, self.num_keys)
        values = [
            _keys(draw, self.num_rows, (count, total), zipf=keys == "zipf", table=t) for t in range(self.num_tables)
        ]
        return [
            Batch(
                keys={f"f{t}": Jagged(values[t][b], offsets) for t in range(self.num_tables)},
                dense={
                    "dense": torch.from_numpy(
                        draw.standard_normal((self.num_samples, self.num_dense), dtype=np.float32)
                    )
                },
                labels=torch.from_numpy((draw.random(self.num_samples) < 0.3).astype(np.float32)),
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
        assert batch.labels is not None
        logits_B = self.logit(self.encoder.query(batch, rows)).squeeze(-1)
        return Output(F.binary_cross_entropy_with_logits(logits_B, batch.labels, reduction="none"))


BAGS = Workload(
    name="bags", num_tables=8, num_rows=1_000_000, dim=64, num_samples=2048, num_keys=10, pooling="sum", num_dense=13
)
SEQUENCES = Workload(
    name="sequences", num_tables=1, num_rows=2_000_000, dim=64, num_samples=512, num_keys=50, pooling=None, num_dense=0
)
WORKLOADS = {workload.name: workload for workload in (BAGS, SEQUENCES)}


def _keys(draw: np.random.Generator, num_rows: int, shape: tuple[int, int], *, zipf: bool, table: int) -> Tensor:
    if not zipf:
        return torch.from_numpy(draw.integers(0, num_rows, shape))
    cumulative = np.cumsum(np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT)
    ranked = np.minimum(np.searchsorted(cumulative, draw.random(shape) * cumulative[-1]), num_rows - 1)
    # Popular keys lie anywhere: else sharding by ranges of rows would give all of them to worker 0.
    return torch.from_numpy(np.random.default_rng(table).permutation(num_rows)[ranked])

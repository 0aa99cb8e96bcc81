"""The floor under every contestant: the dense module alone (forward, backward, DDP, optimizer) on rows made once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.tables import Feature, Table


class DenseOnly:
    """One contestant: `step()` trains the dense module with row tensors that require gradients; no table, no lookup.

    The arguments are those of the Trainer; `model` is trained in place, so give each contestant a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        batches: Sequence[Batch],
        dense_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        if not batches:
            raise ValueError("batches is empty; give at least one batch")
        # Not static_graph=True: with it DDP sums nothing, and says nothing, where a model returns an object (an Output).
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        self._optimizer = dense_optimizer(model.parameters())
        self._batches = itertools.cycle(batches)
        dims = {table.name: table.dim for table in tables}
        self._rows = {
            feature.name: torch.empty(_num_rows(batches, feature), dims[feature.table])
            .uniform_(-0.05, 0.05)
            .requires_grad_()
            for feature in features
        }
        self._pooled = {feature.name: feature.pooling is not None for feature in features}

    def step(self) -> float:
        """One step; gives the loss of this worker's samples."""
        batch = next(self._batches)
        rows: dict[str, Tensor | Jagged] = {}
        for name, kept in self._rows.items():
            kept.grad = None
            offsets = batch.keys[name].offsets
            rows[name] = kept[: batch.size] if self._pooled[name] else Jagged(kept[: int(offsets[-1])], offsets)
        self._optimizer.zero_grad()
        output = self._model(batch, rows)
        if not isinstance(output, Output):
            output = Output(output)
        assert isinstance(output.losses, torch.Tensor) and not isinstance(output.weights, dict)
        weight = batch.size if output.weights is None else float(output.weights.detach().sum())
        loss = output.losses.sum() / weight
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def _num_rows(batches: Sequence[Batch], feature: Feature) -> int:
    if feature.pooling is not None:
        return max(batch.size for batch in batches)
    return max(len(batch.keys[feature.name].values) for batch in batches)

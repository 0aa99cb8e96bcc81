"""A workload: what one worker's step does, in numbers. From a config, by reading some of its data and building its model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nestpipe.batch import Batch, Jagged, labels_of
from nestpipe.config import Built, Config, build
from nestpipe.data.epoch import training_batches
from nestpipe.exchange.clustering import cluster
from nestpipe.exchange.plan import ExchangePlan, Holders
from nestpipe.exchange.requests import is_wide
from nestpipe.exchange.samples import token_feature
from nestpipe.kernels.keys import Deduplicator
from nestpipe.schedule.ops import AVERAGE, MERGE, SHARING
from nestpipe.simulate.keys import Growth, count
from nestpipe.tables import Feature, Table

BATCHES = 8  # that are read, to count keys
MODEL_SAMPLES = 8  # on which the model's operations are counted
PLACED = 8  # workers among whom clustering deals rows out; what it gains hardly depends on how many there are


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """One table, as a worker's batch uses it.

    keys: of the batch, repeated ones included. growth: how many distinct ones there are among so many.
    bags: pooled vectors that the batch needs of it; 0: its rows are used one by one.
    record: bytes of a row with its optimizer's state. key_bytes: of a key on its way to its owner.
    owners: workers that hold it, if not all of a group.
    memory: budget over all workers of a table on disk, its index included.
    sync, sync_every: how its replicas are kept together, where there are any.
    """

    name: str
    dim: int
    keys: float
    growth: Growth
    record: int
    key_bytes: int = 8
    bags: float = 0.0
    tier: str = "memory"
    pooled_at: str = "source"
    owners: int | None = None
    memory: int | str | None = None
    sync: str = "exact"
    sync_every: int = 1

    def travelling(self, workers: int) -> float:
        """Bytes of rows, or of pooled vectors where they are fewer, that a batch gets from all owners."""
        row_bytes = self.growth(self.keys) * self.dim * 4
        if not self.bags or self.pooled_at == "source":
            return row_bytes
        owners = min(workers, self.owners or workers)
        bag_bytes = self.bags * owners * (1 - (1 - 1 / owners) ** (self.keys / self.bags)) * self.dim * 4
        return bag_bytes if self.pooled_at == "owner" else min(row_bytes, bag_bytes)


@dataclasses.dataclass(frozen=True)
class Split:
    """What each micro-batch has, as a part of the batch in one piece: of the compute, of the rows that travel for it, of the
    gradients that leave after it. Rows that travel again add up to more than one."""

    compute: Sequence[float]
    rows: Sequence[float]
    grads: Sequence[float]


WHOLE = Split((1.0,), (1.0,), (1.0,))


@dataclasses.dataclass(frozen=True)
class Workload:
    """One worker's batch.

    input_bytes: keys, dense inputs and labels.
    forward_flops, backward_flops: of the model. dense_bytes: of its parameters.
    shared_bytes: of what its samples share with those of all workers, where the loss is over all of them.
    batches, plan: what micro-batches are cut from; see `split`.
    """

    name: str
    samples: int
    input_bytes: float
    tables: Sequence[TableLoad]
    dense_bytes: float
    forward_flops: float
    backward_flops: float
    shared_bytes: float = 0.0
    batches: Sequence[Batch] = ()
    plan: ExchangePlan | None = None

    @property
    def keys(self) -> float:
        return sum(table.keys for table in self.tables)

    @property
    def keeping(self) -> list[str]:
        """The operations that keep replicas of its tables together."""
        syncs = {table.sync for table in self.tables}
        return [name for name, sync in ((MERGE, "exact"), (AVERAGE, "average")) if sync in syncs]

    @property
    def sharing(self) -> list[str]:
        """The operations of a loss over the samples of all workers."""
        return list(SHARING) if self.shared_bytes else []

    def averaged(self, every: int = 1) -> Workload:
        """With replicas that are averaged every so many steps."""
        tables = [dataclasses.replace(table, sync="average", sync_every=every) for table in self.tables]
        return dataclasses.replace(self, tables=tables)

    @functools.lru_cache(maxsize=256)  # noqa: B019  (a handful of workloads live as long as the program)
    def split(self, micro_batches: int, clustering: str = "none", window_cache: bool = True) -> Split:
        """Counted in the batches that were read, cut as the engine would cut them."""
        if micro_batches == 1:
            return WHOLE
        assert self.plan is not None, "a workload made by hand without batches has no micro-batches"
        splits = [_split(batch, self.plan, micro_batches, clustering, window_cache) for batch in self.batches[:4]]
        return Split(*(tuple(np.mean([getattr(split, name) for split in splits], axis=0).tolist()) for name in _SHARES))

    def __hash__(self) -> int:
        return id(self)


_SHARES = ("compute", "rows", "grads")


def of_config(config: Config, *, batches: int = BATCHES) -> Workload:
    """Reads the first training batches, counts their keys, and counts the operations of the model."""
    built = build(config)
    source = training_batches(
        built.data,
        batch_size=config.train.batch_size,
        batch_tokens=config.train.batch_tokens,
        tokens=token_feature(built.features),
        squares=None,
        rank=0,
        world=1,
        seed=config.train.seed,
    )
    read = [batch for batch in itertools.islice(source, batches) if batch.size]
    if not read:
        raise ValueError("config: the training data is empty, so there is nothing to count")
    return of_batches(str(config.model["kind"]), read, built)


def of_batches(name: str, batches: Sequence[Batch], built: Built) -> Workload:
    plan = ExchangePlan(built.tables, built.features, [Holders(owners) for owners in _owners(built.tables)])
    first = batches[0]
    few = first.slice(0, min(first.size, MODEL_SAMPLES))
    forward, backward = flops(built.model, few, built.features, built.tables)
    each = first.size / few.size
    return Workload(
        name=name,
        samples=first.size,
        input_bytes=float(np.mean([_bytes(batch) for batch in batches])),
        tables=[_load(table, built.features, batches) for table in built.tables],
        dense_bytes=float(sum(parameter.numel() * parameter.element_size() for parameter in built.model.parameters())),
        forward_flops=forward * each,
        backward_flops=backward * each,
        shared_bytes=_shared_bytes(built, few) * each,
        batches=list(batches),
        plan=plan,
    )


def _owners(tables: Sequence[Table]) -> list[np.ndarray]:
    return [np.arange(PLACED) for _ in tables]


def _bytes(batch: Batch) -> int:
    """Keys, dense inputs and labels, with their offsets and weights."""
    entries = [*batch.dense.values(), *labels_of(batch).values(), *batch.keys.values()]
    parts = [
        (entry.values, entry.offsets, entry.weights) if isinstance(entry, Jagged) else (entry,) for entry in entries
    ]
    tensors = [tensor for part in parts for tensor in part if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _load(table: Table, features: Sequence[Feature], batches: Sequence[Batch]) -> TableLoad:
    mine = [feature for feature in features if feature.table == table.name]
    keys = [np.concatenate([batch.keys[feature.name].values.numpy() for feature in mine]) for batch in batches]
    sequences = any(feature.pooling is None for feature in mine)
    bags = 0.0 if sequences else float(np.mean([batch.size * len(mine) for batch in batches]))
    element = torch.empty(0, dtype=table.dtype).element_size()
    return TableLoad(
        name=table.name,
        dim=table.dim,
        keys=float(np.mean([len(batch) for batch in keys])),
        growth=count(keys),
        record=table.dim * element + 4 * table.optimizer.state_floats(table.dim),
        key_bytes=8 if any(map(is_wide, keys)) else 4,
        bags=bags,
        tier=table.tier,
        pooled_at="source" if sequences or table.hot else table.pooled_at,
        owners=table.owners if isinstance(table.owners, int) else None,  # "auto" is simulated as all
        memory=table.memory,
        sync=table.sync,
        sync_every=table.sync_every,
    )


def flops(model: nn.Module, batch: Batch, features: Sequence[Feature], tables: Sequence[Table]) -> tuple[float, float]:
    """Floating-point operations of a forward and of a backward, as torch counts them."""
    rows = _zero_rows(batch, features, tables)
    with FlopCounterMode(display=False) as counter:
        output = model(batch, rows)
        forward = float(counter.get_total_flops())
        (output if isinstance(output, torch.Tensor) else output.losses).sum().backward()
    model.zero_grad(set_to_none=True)
    return forward, float(counter.get_total_flops()) - forward


def _shared_bytes(built: Built, batch: Batch) -> float:
    """Of a model whose loss is over the samples of all workers."""
    if getattr(built.model, "mixes_samples", None) != "global":
        return 0.0
    with torch.no_grad():
        _, shared = built.model.embed(batch, _zero_rows(batch, built.features, built.tables))  # type: ignore[operator]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in shared.values()))


def _zero_rows(batch: Batch, features: Sequence[Feature], tables: Sequence[Table]) -> dict[str, Any]:
    dims = {table.name: table.dim for table in tables}
    rows: dict[str, Any] = {}
    for feature in features:
        keys, dim = batch.keys[feature.name], dims[feature.table]
        num = len(keys.values) if feature.pooling is None else batch.size
        leaf = torch.zeros(num, dim).requires_grad_()
        rows[feature.name] = Jagged(leaf, keys.offsets) if feature.pooling is None else leaf
    return rows


def _split(batch: Batch, plan: ExchangePlan, micro_batches: int, clustering: str, window_cache: bool) -> Split:
    order, bounds = cluster(batch, plan, micro_batches, clustering, Deduplicator(), rank=0, world=PLACED)
    home = np.empty(batch.size, np.int64)
    home[np.arange(batch.size) if order is None else order] = np.repeat(np.arange(micro_batches), np.diff(bounds))
    rows, grads, whole = np.zeros(micro_batches), np.zeros(micro_batches), 0.0
    tokens = np.zeros(micro_batches)
    for table, features in zip(plan.tables, plan.features_of, strict=True):
        parts = [batch.keys[feature.name] for feature in features]
        keys = np.concatenate([part.values.numpy() for part in parts])
        where = np.concatenate([np.repeat(home, np.diff(part.offsets.numpy())) for part in parts])
        tokens += np.bincount(where, minlength=micro_batches)
        _, distinct = np.unique(keys, return_inverse=True)
        num = int(distinct.max(initial=-1)) + 1
        whole += table.dim * num
        if not window_cache:
            pairs = np.unique(distinct * micro_batches + where) % micro_batches
            again = table.dim * np.bincount(pairs, minlength=micro_batches)
            rows += again
            grads += again
            continue
        first, last = np.full(num, micro_batches), np.full(num, -1)
        np.minimum.at(first, distinct, where)
        np.maximum.at(last, distinct, where)
        rows += table.dim * np.bincount(first, minlength=micro_batches)
        grads += table.dim * np.bincount(last, minlength=micro_batches)
    whole = whole or 1.0
    compute = tokens / tokens.sum() if tokens.sum() else np.diff(bounds) / max(1, batch.size)
    return Split(compute.tolist(), (rows / whole).tolist(), (grads / whole).tolist())

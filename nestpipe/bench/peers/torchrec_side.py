"""TorchRec at its best on CPUs and gloo: the same tables, the same dense module, the same loss as nestpipe's Trainer.

TorchRec averages every gradient over the workers: DDP does it for the dense module, the backward of its all-to-alls
for the tables. So each worker's loss is scaled by workers / global weight, and the update is the one of the mean over
the global batch.

What fails without CUDA, in TorchRec 1.8 itself: the pipelines "fused_sparse_dist" and "semi_sync" call `record_stream`
with a CPU stream ("unknown parameter type"); in "prefetch_sparse_dist" no module is ever prefetched ("Invalid
PrefetchPipelinedForward usage"). They stay in PIPELINES so that a later version can be tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.optim import RowwiseAdagrad
from nestpipe.tables import Feature, Table, Uniform, check_declarations

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable
except ImportError as error:
    raise ImportError(
        "TorchRec is not installed here; in an environment of its own, `pip install -r` the two files "
        "nestpipe/bench/peers/requirements.txt and (with --no-deps) requirements-nodeps.txt"
    ) from error

PIPELINES = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "sparse_dist_lite": "TrainPipelineSparseDistLite",
    "fused_sparse_dist": "TrainPipelineFusedSparseDist",
    "prefetch_sparse_dist": "PrefetchTrainPipelineSparseDist",
    "semi_sync": "TrainPipelineSemiSync",
}
SHARDINGS = ("table_wise", "column_wise", "row_wise", "planner")


class TorchRecSide:
    """One contestant: `step()` trains on the next of the given batches, around and around.

    model: what nestpipe's Trainer would get, `forward(batch, rows)`; trained in place: give each contestant a copy.
    tables, features: as for the Trainer; every table needs the same RowwiseAdagrad, without clip or decay.
    rows_per_table: TorchRec's tables have a fixed number of rows; keys must lie below it.
    batches: this worker's batches; every worker needs the same number of them.
    dense_optimizer: as for the Trainer, a callable that gets the dense parameters.
    pipeline: one of PIPELINES.
    sharding: "table_wise", "column_wise", "row_wise" for all tables, or "planner" for what TorchRec's planner takes.
        Column-wise keeps one AdaGrad sum per row *and shard*: a different optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        rows_per_table: Mapping[str, int],
        batches: Sequence[Batch],
        dense_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        pipeline: str = "sparse_dist",
        sharding: str = "table_wise",
    ) -> None:
        check_declarations(tables, features)
        if pipeline not in PIPELINES:
            raise ValueError(f"pipeline must be one of {list(PIPELINES)}, got {pipeline!r}")
        if sharding not in SHARDINGS:
            raise ValueError(f"sharding must be one of {SHARDINGS}, got {sharding!r}")
        if not batches:
            raise ValueError("batches is empty; give at least one batch")
        _quiet()
        fused_params = _fused_params(tables)
        network = _Network(model, tables, features, rows_per_table)
        sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params), EmbeddingCollectionSharder(fused_params)]
        self.module = DistributedModelParallel(
            network,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=_plan(network, sharders, sharding),
            sharders=sharders,
        )
        self._weights = self._local_weights()
        self._sums = self._local_sums()
        parameters = (parameter for name, parameter in self.module.named_parameters() if name.startswith("tail."))
        self._pipeline = getattr(train_pipelines, PIPELINES[pipeline])(
            self.module, dense_optimizer(parameters), torch.device("cpu")
        )
        self._batches = itertools.cycle(_peer_batches(batches, features))

    def step(self) -> float:
        """One training step. Gives this worker's loss; its mean over the workers is the mean over the global batch."""
        return float(self._pipeline.progress(self._batches))

    def rows(self, table: str, keys: Tensor) -> Tensor:
        """Reads rows [len(keys), dim]. Collective: every worker asks for the same keys and gets the same rows."""
        shards = self._shards(table)
        width = torch.tensor([max((column + weight.shape[1] for _, column, weight in shards), default=1)])
        dist.all_reduce(width, dist.ReduceOp.MAX)
        rows = torch.zeros(len(keys), int(width))
        for first, column, weight in shards:
            mine = (keys >= first) & (keys < first + len(weight))
            rows[mine, column : column + weight.shape[1]] = weight[keys[mine] - first]
        dist.all_reduce(rows)
        return rows

    def set_rows(self, table: str, keys: Tensor, values: Tensor) -> None:
        """Writes rows. Every worker must be given the same keys and values and keeps those that it owns."""
        for first, column, weight in self._shards(table):
            mine = (keys >= first) & (keys < first + len(weight))
            weight[keys[mine] - first] = values[mine, column : column + weight.shape[1]]

    def facts(self) -> dict[str, Any]:
        """Bytes of rows and their optimizer state, on all workers. Collective."""
        weights = [weight for shards in self._weights.values() for _, _, weight in shards]
        total = torch.tensor(sum(part.nbytes for part in (*weights, *self._sums)))
        dist.all_reduce(total)
        return {"table_bytes": int(total)}

    def _shards(self, table: str) -> list[tuple[int, int, Tensor]]:
        if table not in self._weights:
            raise ValueError(f"no table {table!r}; there are {sorted(self._weights)}")
        return self._weights[table]

    def _local_weights(self) -> dict[str, list[tuple[int, int, Tensor]]]:
        """Per table: first row, first column and the memory itself of each shard on this worker."""
        return {
            name.split(".")[-2]: [
                (*shard.metadata.shard_offsets, shard.tensor.detach()) for shard in tensor.local_shards()
            ]
            for name, tensor in self.module.state_dict().items()
            if name.startswith(("bags.", "lists."))
        }

    def _local_sums(self) -> list[Tensor]:
        """The AdaGrad sums beside the rows of this worker."""
        states = self.module.fused_optimizer.state_dict()["state"].values()
        sums = {name: tensor for state in states for name, tensor in state.items() if name.endswith(".momentum1")}
        return [shard.tensor for tensor in sums.values() for shard in tensor.local_shards()]


@dataclasses.dataclass(eq=False)
class _PeerBatch(Pipelineable):
    """A batch in both forms: `bags` and `lists` for TorchRec's lookups, `batch` for the model."""

    batch: Batch
    bags: KeyedJaggedTensor | None
    lists: KeyedJaggedTensor | None
    global_samples: int
    global_weight: float | None = None  # filled in at the first visit, if the model weighs its samples

    def to(self, device: torch.device, non_blocking: bool = False) -> _PeerBatch:
        return self

    def record_stream(self, stream: Any) -> None:
        return None

    def pin_memory(self) -> _PeerBatch:
        return self


class _Rows(Mapping[str, "Tensor | Jagged"]):
    """What the model reads rows from. Waits for TorchRec's all-to-all at the first read, so that whatever the model
    computes before that overlaps with it."""

    def __init__(self, batch: Batch, pooled: Any, lists: Any) -> None:
        self._batch, self._pooled, self._lists = batch, pooled, lists
        self._arrived: dict[str, Tensor | Jagged] | None = None

    def _all(self) -> dict[str, Tensor | Jagged]:
        if self._arrived is None:
            self._arrived = {}
            if self._pooled is not None:
                self._arrived |= _wait(self._pooled).to_dict()
            if self._lists is not None:
                for name, jagged in _wait(self._lists).items():
                    self._arrived[name] = Jagged(jagged.values(), self._batch.keys[name].offsets)
        return self._arrived

    def __getitem__(self, name: str) -> Tensor | Jagged:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class _Tail(nn.Module):
    """Everything after the lookups; a module of its own, which TorchRec's tracer takes as a leaf."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, peer: _PeerBatch, pooled: Any, lists: Any) -> tuple[Tensor, Tensor]:
        output = self.model(peer.batch, _Rows(peer.batch, pooled, lists))
        if not isinstance(output, Output):
            output = Output(output)
        assert isinstance(output.losses, Tensor) and not isinstance(output.weights, dict)
        if peer.global_weight is None:
            peer.global_weight = float(peer.global_samples)
            if output.weights is not None:
                weight = output.weights.detach().sum(dtype=torch.float64)
                dist.all_reduce(weight)
                peer.global_weight = float(weight)
        loss = output.losses.sum() * (dist.get_world_size() / peer.global_weight)
        return loss, loss.detach()


class _Network(nn.Module):
    """The lookups, then the model. TorchRec traces this forward: it must do nothing but pass things on."""

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], features: Sequence[Feature], rows_per_table: Mapping[str, int]
    ) -> None:
        super().__init__()
        bags, lists = [], []
        for table in tables:
            if not isinstance(table.init, Uniform) or table.dtype != torch.float32:
                raise ValueError(
                    f"table {table.name!r}: TorchRec needs init=Uniform(...) and float32 rows to be comparable"
                )
            readers = [feature for feature in features if feature.table == table.name]
            poolings = {feature.pooling for feature in readers}
            if len(poolings) > 1:
                raise ValueError(
                    f"table {table.name!r} is read with poolings {poolings}, which TorchRec cannot do; "
                    f"give each feature a table of its own"
                )
            shape: dict[str, Any] = {
                "name": table.name,
                "embedding_dim": table.dim,
                "num_embeddings": rows_per_table[table.name],
                "feature_names": [feature.name for feature in readers],
                "weight_init_min": table.init.low,
                "weight_init_max": table.init.high,
            }
            pooling = poolings.pop()
            if pooling is None:
                lists.append(EmbeddingConfig(**shape))
            else:
                bags.append(EmbeddingBagConfig(**shape, pooling=PoolingType[pooling.upper()]))
        # On "meta" no worker holds a whole table, not even while starting.
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device("meta")) if bags else None
        self.lists = EmbeddingCollection(tables=lists, device=torch.device("meta")) if lists else None
        self.tail = _Tail(model)

    def forward(self, peer: _PeerBatch) -> tuple[Tensor, Tensor]:
        pooled = None if self.bags is None else self.bags(peer.bags)
        lists = None if self.lists is None else self.lists(peer.lists)
        return self.tail(peer, pooled, lists)


def _wait(awaitable: Any) -> Any:
    return awaitable.wait() if isinstance(awaitable, LazyAwaitable) else awaitable


def _fused_params(tables: Sequence[Table]) -> dict[str, Any]:
    optimizers = {table.optimizer for table in tables}
    if len(optimizers) > 1:
        raise ValueError(f"all tables must have the same row optimizer here, got {optimizers}")
    optimizer = optimizers.pop()
    if not isinstance(optimizer, RowwiseAdagrad) or optimizer.weight_decay or optimizer.clip or optimizer.initial:
        raise ValueError(f"the row optimizer must be RowwiseAdagrad(lr=..., eps=...) and nothing more, got {optimizer}")
    return {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": optimizer.lr, "eps": optimizer.eps}


def _plan(network: _Network, sharders: list[Any], sharding: str) -> ShardingPlan:
    workers = dist.get_world_size()
    if sharding == "planner":
        names = [config.name for config in _configs(network)]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=workers, local_world_size=workers, compute_device="cpu"),
            constraints={name: ParameterConstraints(compute_kernels=["fused"]) for name in names},
        )
        return planner.collective_plan(network, sharders, dist.group.WORLD)
    parts = {}
    for name, sharder in (("bags", sharders[0]), ("lists", sharders[1])):
        collection = getattr(network, name)
        if collection is None:
            continue
        per_table: dict[str, Any] = {}
        for index, config in enumerate(_configs(network, name)):
            if sharding == "table_wise":
                per_table[config.name] = table_wise(rank=index % workers, compute_kernel="fused")
            elif sharding == "column_wise":
                per_table[config.name] = column_wise(ranks=list(range(workers)), compute_kernel="fused")
            else:
                per_table[config.name] = row_wise(compute_kernel="fused")
        parts[name] = construct_module_sharding_plan(
            collection, per_table, sharder=sharder, local_size=workers, world_size=workers, device_type="cpu"
        )
    return ShardingPlan(plan=parts)


def _configs(network: _Network, name: str | None = None) -> list[Any]:
    configs: list[Any] = []
    if network.bags is not None and name in (None, "bags"):
        configs += network.bags.embedding_bag_configs()
    if network.lists is not None and name in (None, "lists"):
        configs += network.lists.embedding_configs()
    return configs


def _peer_batches(batches: Sequence[Batch], features: Sequence[Feature]) -> list[_PeerBatch]:
    counts = torch.tensor([len(batches), -len(batches)])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    if int(counts[0]) != -int(counts[1]):
        raise ValueError(f"this worker has {len(batches)} batches, another {int(counts[0])}; give every worker as many")
    samples = torch.tensor([batch.size for batch in batches])
    dist.all_reduce(samples)
    bags = [feature.name for feature in features if feature.pooling is not None]
    lists = [feature.name for feature in features if feature.pooling is None]
    return [
        _PeerBatch(batch, _keyed(batch, bags), _keyed(batch, lists), int(total))
        for batch, total in zip(batches, samples, strict=True)
    ]


def _keyed(batch: Batch, names: Sequence[str]) -> KeyedJaggedTensor | None:
    if not names:
        return None
    parts = [batch.keys[name] for name in names]
    if any(part.weights is not None for part in parts):
        raise ValueError("keys with weights are not supported on the TorchRec side; leave them out")
    values = torch.cat([part.values for part in parts])
    lengths = torch.cat([part.lengths for part in parts]).to(torch.int32)
    return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)


def _quiet() -> None:
    """TorchRec logs each construction at INFO and warns of its own deprecated calls."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"torchrec\..*|torch\.distributed\..*")

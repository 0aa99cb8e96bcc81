"""From TorchRec and plain torch to nestpipe and back. Stand-ins have the attributes of TorchRec's objects; where it is installed,
its own are tried too."""

from __future__ import annotations

import dataclasses
import enum
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nestpipe import Adagrad, Adam, Batch, Jagged, Normal, RowwiseAdagrad, Trainer, TrainingError, Uniform
from nestpipe.migration import declare, load_weights, optimizer_state, state_dict
from tests.cluster import Cluster


class Pooling(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class DataType(enum.Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@dataclasses.dataclass
class Config:
    """As EmbeddingConfig."""

    name: str
    num_embeddings: int = 50
    embedding_dim: int = 4
    feature_names: list[str] = dataclasses.field(default_factory=list)
    data_type: DataType = DataType.FP32
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    init_fn: Any = None
    need_pos: bool = False
    num_embeddings_post_pruning: int | None = None


@dataclasses.dataclass
class BagConfig(Config):
    pooling: Pooling = Pooling.SUM


CONFIGS = [
    BagConfig("item", 50, feature_names=["liked", "seen"]),
    BagConfig("user", 30, feature_names=["user"], pooling=Pooling.MEAN),
    Config("word", 20, feature_names=["title"]),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        together = rows["liked"] + rows["seen"] + rows["user"] + rows["title"].sum()
        return (self.out(together)[:, 0] - 1) ** 2


def make(optimizer: Any = None) -> Trainer:
    torch.manual_seed(0)
    tables, features = declare(CONFIGS, optimizer=optimizer or RowwiseAdagrad(lr=0.1))
    return Trainer(Model(), tables, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))


def batch(seed: int, size: int = 8) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    sizes = {"liked": 50, "seen": 50, "user": 30, "title": 20}
    lengths = torch.full((size,), 2)
    return Batch(
        {n: Jagged.from_lengths(torch.randint(0, k, (2 * size,), generator=draw), lengths) for n, k in sizes.items()}
    )


def weights(prefix: str = "") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    kinds = {"item": "embedding_bags", "user": "embedding_bags", "word": "embeddings"}
    return {
        f"{prefix}{kinds[c.name]}.{c.name}.weight": torch.randn(c.num_embeddings, 4, generator=draw) for c in CONFIGS
    }


# -- declarations ------------------------------------------------------------------------------------------------------


def test_configs_become_tables_and_features_with_their_pooling_and_first_values() -> None:
    tables, features = declare(CONFIGS, optimizer=Adagrad(lr=0.3), tier="disk")
    assert [(t.name, t.dim, t.optimizer, t.tier) for t in tables] == [
        (name, 4, Adagrad(lr=0.3), "disk") for name in ("item", "user", "word")
    ]
    assert tables[0].init == Uniform(-(50**-0.5), 50**-0.5)
    assert [(f.name, f.table, f.pooling) for f in features] == [
        ("liked", "item", "sum"), ("seen", "item", "sum"), ("user", "user", "mean"), ("title", "word", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"weight_init_min": -1.0, "weight_init_max": 2.0}, "init", Uniform(-1.0, 2.0)),
        ({"init_fn": functools.partial(nn.init.normal_, std=0.5)}, "init", Normal(0.5)),
        ({"init_fn": functools.partial(nn.init.uniform_, a=-3.0, b=3.0)}, "init", Uniform(-3.0, 3.0)),
        ({"data_type": DataType.BF16}, "dtype", torch.bfloat16),
    ],
)
def test_what_a_config_says_of_its_rows_is_kept(changes: dict[str, Any], attribute: str, value: Any) -> None:
    tables, _ = declare([BagConfig("t", feature_names=["f"], **changes)], optimizer=RowwiseAdagrad())
    assert getattr(tables[0], attribute) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_type": DataType.FP16}, "table 't': rows of FP16 are not trained here; say dtype="),
        ({"init_fn": nn.init.zeros_}, "what its init_fn draws is not known; say init="),
        ({"init_fn": functools.partial(nn.init.normal_, mean=1.0)}, "what its init_fn draws is not known"),
        ({"need_pos": True}, "nothing like need_pos"),
        ({"num_embeddings_post_pruning": 5}, "nothing like num_embeddings_post_pruning"),
    ],
)
def test_what_nestpipe_has_not_is_refused_unless_it_is_said_otherwise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare([BagConfig("t", feature_names=["f"], **changes)], optimizer=RowwiseAdagrad())
    if "say" in message:
        declare(
            [BagConfig("t", feature_names=["f"], **changes)],
            optimizer=RowwiseAdagrad(),
            init=Normal(),
            dtype=torch.float32,
        )


def test_collections_are_taken_alone_and_in_lists_and_what_is_neither_is_refused() -> None:
    bags = SimpleNamespace(embedding_bag_configs=lambda: CONFIGS[:2])
    sequences = SimpleNamespace(embedding_configs=lambda: CONFIGS[2:])
    assert declare([bags, sequences], optimizer=RowwiseAdagrad()) == declare(CONFIGS, optimizer=RowwiseAdagrad())
    assert [table.name for table in declare(bags, optimizer=RowwiseAdagrad())[0]] == ["item", "user"]
    with pytest.raises(ValueError, match="'item' is neither an EmbeddingBagConfig"):
        declare(["item"], optimizer=RowwiseAdagrad())


def test_a_feature_of_two_tables_has_a_name_for_each_as_in_torchrec() -> None:
    shared = [BagConfig("a", feature_names=["f", "g"]), BagConfig("b", feature_names=["f"])]
    _, features = declare(shared, optimizer=RowwiseAdagrad())
    assert [(f.name, f.table) for f in features] == [("f@a", "a"), ("g", "a"), ("f@b", "b")]
    with pytest.raises(ValueError, match="table 'a' is declared more than once"):
        declare([shared[0], BagConfig("a", feature_names=["h"])], optimizer=RowwiseAdagrad())


# -- weights in and out ------------------------------------------------------------------------------------------------


def round_trip(folder: str, suffix: str) -> tuple[dict[str, int], dict[str, Tensor], dict[str, Any], str]:
    path = Path(folder) / f"weights{suffix}"
    moments = {
        "state": {e: {f"{e.split('.')[-2]}.momentum1": torch.arange(len(w)).float()} for e, w in weights("m.").items()}
    }
    with make() as trainer:
        given = load_weights(trainer, path if suffix else weights("m."), optimizer=moments)
        return given, state_dict(trainer, CONFIGS), optimizer_state(trainer, CONFIGS), trainer.digest()


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"])
def test_a_state_dict_comes_back_to_the_bit_with_its_optimizer_state(
    tmp_path: Path, cluster: Cluster, suffix: str
) -> None:
    save_file(weights("m."), tmp_path / "weights.safetensors")
    torch.save(weights("m."), tmp_path / "weights.pt")
    alone = round_trip(str(tmp_path), suffix)
    first, second = cluster.run(2, round_trip, str(tmp_path), suffix)
    assert first[0] == {"item": 50, "user": 30, "word": 20} and first[3] == alone[3]
    for given, back, moments, _ in (alone, first):
        assert given == {"item": 50, "user": 30, "word": 20}
        assert {name: rows.tolist() for name, rows in back.items()} == {n: w.tolist() for n, w in weights().items()}
        assert moments["state"]["embedding_bags.user.weight"]["user.momentum1"].tolist() == list(range(30))
    assert second[1:3] == ({}, {})  # the first worker has it all


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.01)])
def test_training_goes_on_with_what_came_out_of_another_trainer(optimizer: Any) -> None:
    with make(optimizer) as before:
        before.fit([batch(1), batch(2)])
        rows, moments = state_dict(before, CONFIGS), optimizer_state(before, CONFIGS)
        dense = {name: value.clone() for name, value in before.model.state_dict().items()}
        before.fit([batch(3)])
        expected = state_dict(before, CONFIGS)
    with make(optimizer) as after:
        after.model.load_state_dict(dense)
        load_weights(after, rows, optimizer=moments, updates=2)
        after.fit([batch(3)])
        for entry, values in state_dict(after, CONFIGS).items():
            assert torch.equal(values, expected[entry]), entry


def test_plain_embeddings_are_loaded_by_name_and_written_under_any() -> None:
    plain = nn.ModuleDict({"item_emb": nn.Embedding(50, 4), "other": nn.Embedding(7, 3)})
    with make() as trainer:
        assert load_weights(trainer, plain.state_dict(), names={"item": "item_emb.weight"}) == {"item": 50}
        back = state_dict(trainer, {"item": 50}, names={"item": "item_emb.weight"})
        assert torch.equal(back["item_emb.weight"], plain["item_emb"].weight)
        assert list(state_dict(trainer, {"user": 3})) == ["user.weight"]


class Sharded:
    """As ShardedTensor: this worker's shards."""

    def __init__(self, full: Tensor, parts: list[tuple[int, int]], columns: int | None = None) -> None:
        self._full, self._parts, self._columns = full, parts, columns

    def size(self) -> torch.Size:
        return self._full.shape

    def local_shards(self) -> list[Any]:
        cut = [self._full[a:b, : self._columns] if self._columns else self._full[a:b] for a, b in self._parts]
        offsets = [[a] + [0] * (self._full.ndim - 1) for a, _ in self._parts]
        return [
            SimpleNamespace(metadata=SimpleNamespace(shard_offsets=o), tensor=t)
            for o, t in zip(offsets, cut, strict=True)
        ]


def from_shards() -> dict[str, Tensor]:
    with make() as trainer:
        parts = [[(0, 10), (30, 50)], [(10, 30)]][trainer.rank]
        state = {
            name: Sharded(full, parts if "item" in name else [(0, len(full))][trainer.rank :])
            for name, full in weights().items()
        }
        moments = {
            name: {f"{name.split('.')[-2]}.momentum1": Sharded(torch.arange(len(full)).float(), sharded._parts)}
            for (name, full), sharded in zip(weights().items(), state.values(), strict=True)
        }
        load_weights(trainer, state, optimizer={"state": moments})
        assert trainer.row_state("item", [49])[0, 0] == 49
        return state_dict(trainer, CONFIGS)


def test_every_worker_gives_the_shards_that_it_has(cluster: Cluster) -> None:
    back, _ = cluster.run(2, from_shards)
    assert all(torch.equal(back[name], full) for name, full in weights().items())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"item.weight": torch.zeros(3, 4)}}, "table 'user': no entry is named after it; .*names={'user'"),
    ({"weights": {"a.embeddings.item.weight": 0, "item.weight": 0}}, "both fit"),
    ({"weights": weights(), "names": {"itme": "x"}}, "table 'itme'.*did you mean 'item'"),
    (
        {"weights": weights(), "names": {"item": "embedding_bags.itm.weight"}},
        "did you mean 'embedding_bags.item.weight'",
    ),
    ({"weights": weights(), "optimizer": {}}, "the optimizer has no state of 'embedding_bags.item.weight'"),
    (
        {"weights": weights(), "optimizer": {"embedding_bags.item.weight": {"item.exp_avg": 0}}},
        "it has item.exp_avg: declare",
    ),
    ({"weights": "nowhere.pt"}, "there is no file nowhere.pt"),
    ({"weights": "."}, "is a folder; a checkpoint of torch.distributed.checkpoint becomes a file with"),
    (
        {"weights": {"model": weights(), "epoch": 3}},
        r"dicts of dicts, model; give the one with the weights, .*\['model'\]",
    ),
    ({"weights": {"i": Sharded(torch.zeros(50, 4), [(0, 50)], 2)}, "names": {"item": "i"}}, "sharded by column"),
    ({"weights": {"i": torch.zeros(50, 5)}, "names": {"item": "i"}}, r"rows of shape \(50, 4\)"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_cannot_be_loaded_is_named_with_what_to_do(arguments: dict[str, Any], message: str) -> None:
    with make() as trainer, pytest.raises(TrainingError, match=message):
        load_weights(trainer, **arguments)


def test_a_file_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    torch.save({"item.weight": Config("x")}, tmp_path / "evil.pt")
    with make() as trainer, pytest.raises(TrainingError, match="weights"):
        load_weights(trainer, tmp_path / "evil.pt")


def test_a_key_beyond_the_matrix_is_not_left_out_in_silence() -> None:
    with make() as trainer:
        trainer.put_rows("item", [50, -7], torch.zeros(2, 4))
        with pytest.raises(ValueError, match="table 'item': key -7 has a row, but a matrix of 50 rows"):
            state_dict(trainer, CONFIGS)


def each_its_own(what: str) -> str:
    """Workers that have different matrices under one name."""
    full = torch.arange(200.0).reshape(50, 4)
    with make() as trainer:
        own = {"shards": full.chunk(2)[trainer.rank], "sizes": full[: 40 + 10 * trainer.rank]}[what]
        with pytest.raises(ValueError, match="table 'item': rank 1 has another matrix than rank 0; give every worker"):
            load_weights(trainer, {"item": own}, names={"item": "item"})
        return trainer.digest()


@pytest.mark.parametrize("what", ["shards", "sizes"])
def test_plain_tensors_that_differ_between_workers_are_not_taken_for_one_matrix(cluster: Cluster, what: str) -> None:
    with make() as untouched:
        assert set(cluster.run(2, each_its_own, what)) == {untouched.digest()}


def test_names_of_what_comes_out_are_checked() -> None:
    with make() as trainer:
        with pytest.raises(TrainingError, match=r"names: table 'itme'.*did you mean 'item'"):
            state_dict(trainer, {"item": 5}, names={"itme": "x"})
        with pytest.raises(TrainingError, match="tables 'item' and 'user' have the same entry 'x'"):
            state_dict(trainer, {"item": 5, "user": 5}, names={"item": "x", "user": "x"})


# -- TorchRec itself, where it is installed ----------------------------------------------------------------------------


def test_torchrecs_own_collection_batch_and_weights_give_the_same_vectors_here() -> None:
    torchrec = pytest.importorskip("torchrec")
    configs = [
        torchrec.EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=50, feature_names=["liked", "seen"]),
        torchrec.EmbeddingBagConfig(
            name="user", embedding_dim=4, num_embeddings=30, feature_names=["user"], pooling=torchrec.PoolingType.MEAN
        ),
    ]
    theirs = torchrec.EmbeddingBagCollection(tables=configs)
    kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["liked", "seen", "user"],
        values=torch.tensor([1, 2, 3, 49, 4, 5, 29]),
        lengths=torch.tensor([2, 1, 0, 1, 2, 1]),
    )
    seen: dict[str, Tensor] = {}

    class Look(nn.Module):
        def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
            seen.update({name: vectors.detach().clone() for name, vectors in rows.items()})
            return sum(vectors.sum(1) for vectors in rows.values())  # type: ignore[return-value]

    tables, features = declare(theirs, optimizer=RowwiseAdagrad())
    with Trainer(Look(), tables, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)) as trainer:
        assert load_weights(trainer, theirs.state_dict()) == {"item": 50, "user": 30}
        assert {n: w.tolist() for n, w in state_dict(trainer, theirs).items()} == {
            n: w.tolist() for n, w in theirs.state_dict().items()
        }
        trainer.evaluate([Batch.from_kjt(kjt)], {})
    for name, vectors in theirs(kjt).to_dict().items():
        assert torch.equal(seen[name], vectors), name

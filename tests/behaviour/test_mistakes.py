"""Mistakes of a user's own program, and the words with which each is told."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Feature, Jagged, Output, Table, Trainer, config, fields
from nestpipe.batch import check_batch
from nestpipe.checkpoint import Damaged
from nestpipe.data import DATASETS
from nestpipe.errors import TrainingError
from nestpipe.metrics import AUC
from nestpipe.models import DLRM, HSTU, FuXi
from tests.cluster import Cluster

DIM = 4
FEATURES = [Feature("bag", "item", "sum")]


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(DIM, 1)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
        logits = self.out(rows["bag"]).squeeze(1)
        labels: Any = batch.labels
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return Output(losses, predictions=torch.sigmoid(logits))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def make_trainer(model: nn.Module | None = None, **options: Any) -> Trainer:
    return Trainer(
        model or Clicks(), [Table("item", DIM, optimizer=SGD(lr=0.1))], FEATURES, dense_optimizer=sgd, **options
    )


def batch_of(size: int, *, labels: Any = "ones") -> Batch:
    bags = Jagged.from_lists([[sample, sample + 1] for sample in range(size)])
    return Batch({"bag": bags}, {}, torch.ones(size) if isinstance(labels, str) else labels)


# -- batches -----------------------------------------------------------------------------------------------------------


def with_bag(**parts: Any) -> Batch:
    good = Jagged.from_lists([[1], [2], [3]])
    return Batch({"bag": Jagged(**{"values": good.values, "offsets": good.offsets, **parts})})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of(3, labels=np.ones(3)), r"labels must be a tensor, got ndarray; convert with torch.from_numpy"),
        (batch_of(3, labels=[1.0, 0.0, 1.0]), r"labels must be a tensor, got list; convert with torch.tensor"),
        (batch_of(3, labels=torch.tensor(1.0)), "labels: got a single number"),
        (Batch(batch_of(3).keys, {"age": np.ones((3, 1))}), "dense input 'age' must be a tensor, got ndarray"),  # type: ignore[dict-item]
        (Batch(batch_of(3).keys, {"age": [1, 2, 3]}), "dense input 'age' must be a tensor, got list"),  # type: ignore[dict-item]
        (with_bag(values=np.arange(3)), "feature 'bag': values must be a tensor, got ndarray"),
        (with_bag(offsets=np.arange(4)), "feature 'bag': offsets must be a tensor, got ndarray"),
        (with_bag(weights=[1.0, 1.0, 1.0]), "feature 'bag': weights must be a tensor, got list"),
        (Batch({"bag": [[1], [2]]}), "feature 'bag' must be a Jagged, got list"),  # type: ignore[dict-item]
        (Batch({**batch_of(3).keys, "more": [[1]] * 3}), "feature 'more' must be a Jagged, got list"),  # type: ignore[dict-item]
        (
            Batch({**batch_of(3).keys, "more": Jagged.from_lists([[1]])}),
            "feature 'more' has 1 samples, the batch has 3",
        ),
        (Batch([Jagged.from_lists([[1]])]), "Batch.keys must be a dict by name, got list"),  # type: ignore[arg-type]
        (Batch(batch_of(3).keys, None), "Batch.dense must be a dict by name, got NoneType"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_tensor_is_refused_by_name_with_the_conversion(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_batch(batch, ["bag"])


def test_lengths_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths of a Jagged must be a tensor, got ndarray"):
        Jagged.from_lengths(torch.arange(3), np.array([1, 2]))  # type: ignore[arg-type]


def test_numpy_labels_end_a_fit_with_the_name_of_the_batch() -> None:
    with pytest.raises(TrainingError, match="batch 1: labels must be a tensor, got ndarray"):
        make_trainer().fit([batch_of(3), batch_of(3, labels=np.ones(3))])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_model_that_reads_labels_which_are_not_there_is_told_so(micro_batches: int) -> None:
    trainer = make_trainer(micro_batches=micro_batches)
    with pytest.raises(
        TrainingError, match=r"batch 0: AttributeError: .*NoneType.*; the batch has no labels: set Batch.labels"
    ):
        trainer.fit([batch_of(4, labels=None)])
    with pytest.raises(TrainingError, match=r"the batch has no labels: set Batch\.labels"):
        make_trainer().evaluate([batch_of(4, labels=None)], {"AUC": AUC()})


def test_an_error_that_has_nothing_to_do_with_labels_is_left_as_it_is() -> None:
    class Other(Clicks):
        def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
            raise TypeError("of another kind")

    with pytest.raises(TrainingError) as raised:
        make_trainer(Other()).fit([batch_of(4, labels=None)])
    text = str(raised.value)
    assert (
        text.startswith("rank 0, batch 0: TypeError: of another kind (at ") and "labels" not in text.split(" (at ")[0]
    )


def test_a_metric_says_whether_labels_or_predictions_are_missing() -> None:
    class Given(Clicks):
        def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
            return Output(rows["bag"].sum(1), predictions=torch.zeros(batch.size))

    with pytest.raises(TrainingError, match="metric 'AUC' needs labels in the batch"):
        make_trainer(Given()).evaluate([batch_of(4, labels=None)], {"AUC": AUC()})


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[3, 1, 3], (3, 1, 3), np.array([3, 1, 3])], ids=["list", "tuple", "array"])
def test_rows_of_a_list_or_an_array_are_those_of_the_tensor(keys: Any) -> None:
    trainer = make_trainer()
    assert torch.equal(trainer.rows("item", keys), trainer.rows("item", torch.tensor([3, 1, 3])))
    assert trainer.rows("item", []).shape == (0, DIM)


def ask_for_rows(keys: Any) -> None:
    trainer = make_trainer()
    trainer.rows("item", keys if trainer.rank == 1 else [0, 1])


NO_KEYS: list[Any] = [
    [1.5, 2.0], ["a"], [[1], [2, 3]], [[1, 2]], np.arange(3, dtype=np.int32), np.arange(3, dtype=np.uint64),
    torch.arange(3, dtype=torch.int32), [2**70], 7, None, "abc", [True, False],
]  # fmt: skip


@pytest.mark.parametrize("keys", NO_KEYS, ids=repr)
def test_what_are_no_keys_is_refused(keys: Any) -> None:
    with pytest.raises(TrainingError, match=r"keys must be whole numbers of 64 bits \(int64\)"):
        make_trainer().rows("item", keys)


def test_what_are_no_keys_is_refused_on_every_rank(cluster: Cluster) -> None:
    for outcome, (kind, message, _) in cluster.outcomes(2, ask_for_rows, np.arange(3, dtype=np.int32)):
        assert (outcome, kind) == ("failed", "TrainingError")
        assert message.startswith("rank 1, batch 0: keys must be whole numbers of 64 bits")


# -- a trainer without tables ------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(3, 1)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        assert rows == {}
        return (self.out(batch.dense["x"]).squeeze(1) - batch.labels) ** 2


def plain_batch(samples: Sequence[int]) -> Batch:
    x = torch.tensor([[sample, sample % 3, 1.0] for sample in samples]) / 10
    return Batch({}, {"x": x}, x[:, 0] * 2)


def train_plain(schedule: str, micro_batches: int, folder: str) -> list[float]:
    def make() -> Trainer:
        return Trainer(Plain(), [], [], dense_optimizer=sgd, schedule=schedule, micro_batches=micro_batches)

    trainer = make()
    mine = [range(8 * step, 8 * step + 8)[trainer.rank :: trainer.world] for step in range(4)]
    fitted = trainer.fit([plain_batch(share) for share in mine])
    assert (fitted.steps, fitted.samples) == (4, 32)
    assert trainer.table_stats() == {}
    path = Path(folder) / f"{schedule}-{micro_batches}-{trainer.world}"
    trainer.save(path)
    again = make()
    again.load(path)
    assert again.digest() == trainer.digest()
    loss = trainer.evaluate([plain_batch(range(4))], {})["loss"]
    return [loss, *trainer.model.out.weight.flatten().tolist()]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("schedule", "micro_batches"), [("serial", 1), ("dbp", 1), ("nested", 2)])
def test_a_trainer_without_tables_is_plain_data_parallel_training(
    cluster: Cluster, tmp_path: Path, schedule: str, micro_batches: int
) -> None:
    model = Plain()
    optimizer = sgd(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(plain_batch(range(8 * step, 8 * step + 8)), {}).mean().backward()
        optimizer.step()
    expected = [model(plain_batch(range(4)), {}).mean().item(), *model.out.weight.flatten().tolist()]
    for world in (1, 2):
        for result in cluster.run(world, train_plain, schedule, micro_batches, str(tmp_path)):
            assert result == pytest.approx(expected, rel=1e-5)


# -- what is given to a trainer, a model, a checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1.0, 0, 1e12, "5", True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="data_timeout must be a number of seconds above 0"):
        make_trainer(data_timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"num_heads": -2}, "num_heads must be"),
        ({"num_heads": 3}, "dim 8 is not a multiple of num_heads 3"),
        ({"num_layers": -1}, "num_layers must be a whole number of at least 0, got -1"),
        ({"num_layers": 1.5}, "num_layers must be"),
        ({"num_layers": True}, "num_layers must be"),
        ({"dim": 0}, "dim must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"max_length": 0}, "max_length must be"),
        ({"dropout": 2}, "dropout must be at least 0 and below 1, got 2"),
        ({"dropout": -0.1}, "dropout must be"),
        ({"dropout": float("nan")}, "dropout must be"),
        ({"dropout": "none"}, "dropout must be"),
        ({"input_dropout": 1}, "input_dropout must be"),
        ({"normalize": "no"}, "normalize must be true or false"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"num_time_buckets": -1}, "num_time_buckets must be"),
        ({"history": ""}, "history must be a name"),
        ({"negatives": 3}, "negatives must be a name"),
    ],
)
def test_an_argument_of_a_sequence_model_out_of_its_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    for kind in (HSTU, FuXi):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
            kind(**{"dim": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bottom": [-3]}, r"bottom\[0\] must be a whole number of at least 1, got -3"),
        ({"top": [8, 0]}, r"top\[1\] must be"),
        ({"top": [True]}, r"top\[0\] must be"),
        ({"top": [1.5]}, r"top\[0\] must be"),
        ({"bottom": 8}, "bottom must be a list of hidden widths, got 8"),
        ({"bottom": "88"}, "bottom must be a list"),
        ({"num_dense": 2**40}, "num_dense must be at most 2,147,483,647"),
        ({"num_dense": -1}, "num_dense must be a whole number of at least 0"),
        ({"dim": 0}, "dim must be"),
        ({"features": "ab"}, "features must be a list of names"),
        ({"features": ["a", 1]}, r"features\[1\] must be a name, got 1"),
        ({"features": 3}, "features must be a list of names"),
        ({"dense": None}, "dense must be a name"),
        ({"interaction": []}, "interaction must be one of"),
    ],
)
def test_an_argument_of_dlrm_out_of_its_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"DLRM: {message}"):
        DLRM(**{"num_dense": 2, "features": ["a", "b"], "dim": 4, **arguments})


def test_a_model_that_reads_a_feature_that_is_not_there_names_those_that_are() -> None:
    rows = {"history": Jagged.from_lists([[1]]), "bag": torch.zeros(1, 4)}
    batch = Batch({"history": Jagged.from_lists([[1]])}, {"dense": torch.zeros(1, 2)}, torch.ones(1))
    for names, message in (
        ({"history": "histroy"}, r"history is 'histroy', which is no feature; there are history, bag"),
        ({"negatives": "bag"}, r"feature 'bag' must have one row per key: pooling=None"),
    ):
        with pytest.raises(ValueError, match=f"HSTU: {message}"):
            HSTU(dim=4, **{"negatives": "history", **names})(batch, rows)
    for name, message in (
        ("no", r"features\[1\] is 'no', which is no feature"),
        ("history", "must have one row per sample: pooling='sum'"),
    ):
        with pytest.raises(ValueError, match=f"DLRM: .*{message}"):
            DLRM(num_dense=2, features=["bag", name], dim=4)(batch, rows)


def test_a_checkpoint_that_does_not_exist_is_not_called_cut_off(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="nothing does not exist"):
        make_trainer().load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Damaged, match=r"empty is not a checkpoint: .* cut off"):
        make_trainer().load(tmp_path / "empty")


# -- configs -----------------------------------------------------------------------------------------------------------

CLICKS: dict[str, Any] = {
    "data": {"kind": "synthetic_clicks", "num_features": 2, "keys_per_table": 20, "num_dense": 2},
    "model": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "tables": {"f*": {"dim": 4, "pooling": "sum"}},
}


def changed(*overrides: str) -> dict[str, Any]:
    values = copy.deepcopy(CLICKS)
    for text in overrides:
        config.override(values, text)
    return values


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("train.rank_at=[true]", r"train.rank_at must be a list of whole numbers, got \[True\]"),
        ("train.rank_at=[1e3]", "train.rank_at must be a list of whole numbers"),
        ("train.rank_at=[1000000000000]", "train.rank_at must be at most 1,000,000"),
        ("train.timeout=inf", "train.timeout must be a finite number, got inf"),
        ("train.timeout=nan", "train.timeout must be a finite number, got nan"),
        ("train.timeout=-5", "train.timeout must be at least 1"),
        ("train.timeout=1e11", "train.timeout must be at most 10,000,000"),
        ("train.dense_lr=inf", "train.dense_lr must be a finite number, got inf"),
        ("model.bottom=[true]", "model.bottom must be a list of whole numbers"),
        ("model.dense=3", "model.dense must be text, got 3"),
        ("data.num_samples=10000000000000000000000000", "data.num_samples must be a whole number, got 1000"),
        ("data.num_features=2.5", "data.num_features must be a whole number, got 2.5"),
        ("train.seed=-1", "train.seed must be at least 0"),
        ("train.eval_every=-1", "train.eval_every must be at least 0"),
        ("train.dense_lr=-0.1", "train.dense_lr must be at least 0, got -0.1"),
        ("train.dense_lr=1e300", "train.dense_lr must be at most"),
        ("tables.f*.lr=inf", "lr must be a finite number >= 0, got inf"),
        ("tables.f*.init={normal = inf}", "std must be at least 0 and finite"),
        ("data.keys_per_bag=[1, 2, 3]", None),
        ("model.kind=os:path", "model.kind 'os:path' is a module; it must be a class of torch.nn.Module"),
        ("model.kind=os:getcwd", "is a builtin_function_or_method; it must be a class of torch.nn.Module"),
        ("model.kind=pathlib:Path", "is the class Path; it must be a class of torch.nn.Module"),
        ("model.kind=..torch:nn", "cannot be imported: write MODULE:CLASS"),
        ("model.kind=torch.nn:Linear.weight", "cannot be imported: write MODULE:CLASS"),
    ],
)
def test_a_mistake_in_a_config_is_told_when_it_is_read(mistake: str, message: str | None) -> None:
    if message is None:
        with pytest.raises(ValueError, match=r"keys_per_bag is .*; give one number, or the fewest and the most"):
            config.build(config.parse(changed(mistake)))
        return
    with pytest.raises(ValueError, match=message):
        config.parse(changed(mistake))


def test_every_argument_of_our_data_sets_and_models_has_a_type_that_configs_check() -> None:
    for kind in (*DATASETS.values(), *config.MODELS.values()):
        for name, hint in fields.hints(kind.__init__).items():
            assert name == "return" or fields.in_words(hint), f"{kind.__name__}.{name}"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_model_of_mistakes.py").write_text(
        "from torch import nn\n"
        "class Ranker(nn.Module):\n"
        "    def __init__(self, *, width: int = 3) -> None:\n"
        "        super().__init__()\n"
        "        len(width)  # my own mistake\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_model_of_mistakes:Ranker"
    sys.modules.pop("own_model_of_mistakes", None)


def test_a_type_error_inside_a_model_of_ones_own_is_not_blamed_on_the_config(own_module: str) -> None:
    values = changed() | {"model": {"kind": own_module}}
    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)") as raised:
        config.build(config.parse(values))
    assert raised.traceback[-1].path.name == "own_model_of_mistakes.py"


@pytest.mark.parametrize(
    "content", ["[]", "null", "3", '"text"', "{", '{"data": []}', '{"data": {"kind": "x"}, "model": 3}']
)
def test_a_config_json_that_is_no_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="config"):
        config.read_json(path)
    if not content.startswith("{"):
        with pytest.raises(ValueError, match=r"config.json is not what nestpipe writes: a JSON object was expected"):
            config.read_json(path, ["train.steps=3"])

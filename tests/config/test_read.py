"""Configs: what TOML and --set give, and that every mistake is named together with the near right word."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import SGD, Adam, Eviction, Feature, Normal, ScaledRowwiseAdagrad, Uniform, config
from nestpipe.config import TrainSection
from nestpipe.models import DLRM, HSTU

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

CLICKS: dict[str, Any] = {
    "data": {"kind": "synthetic_clicks", "num_features": 3, "keys_per_table": 100, "num_dense": 2},
    "model": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "tables": {"f*": {"dim": 8, "pooling": "sum"}},
}
SEQUENCES: dict[str, Any] = {
    "data": {"kind": "synthetic_sequences", "num_items": 50},
    "model": {"kind": "hstu"},
    "tables": {"item": {"dim": 8, "features": ["history", "negatives"]}},
}


def changed(values: dict[str, Any], *overrides: str) -> dict[str, Any]:
    values = copy.deepcopy(values)
    for one in overrides:
        config.override(values, one)
    return values


def built(values: dict[str, Any], *overrides: str) -> config.Built:
    return config.build(config.parse(changed(values, *overrides)))


# -- what one gets -----------------------------------------------------------------------------------------------------


def test_a_streamed_feature_and_negatives_as_the_data_draws_them() -> None:
    made = built(
        SEQUENCES,
        'tables.item.features={history = "sequence", negatives = "streamed"}',
        'data.negatives_per="position"',
    )
    assert made.features == [Feature("history", "item"), Feature("negatives", "item", streamed=True)]
    assert made.model.negatives.per == "position"
    assert built(SEQUENCES).model.negatives.per == "sample"
    with pytest.raises(ValueError, match=r"model.negatives_per is 'sample', data.negatives_per 'position'; leave"):
        built(SEQUENCES, 'data.negatives_per="position"', 'model.negatives_per="sample"')


def test_a_wildcard_gives_every_feature_a_table_of_its_own() -> None:
    made = built(CLICKS)
    assert [table.name for table in made.tables] == ["f0", "f1", "f2"]
    assert made.features == [Feature(name, name, "sum") for name in ("f0", "f1", "f2")]
    assert isinstance(made.model, DLRM)
    assert (made.model.num_dense, made.model.dim, made.model.features) == (2, 8, ["f0", "f1", "f2"])


def test_one_table_may_serve_several_features_with_a_pooling_each() -> None:
    features = {"f0": "sum", "f1": "mean", "f2": "sequence"}
    made = built({**CLICKS, "tables": {"all": {"dim": 8, "features": features}}}, 'model.features=["f0", "f1"]')
    assert [table.name for table in made.tables] == ["all"]
    assert made.features == [Feature("f0", "all", "sum"), Feature("f1", "all", "mean"), Feature("f2", "all", None)]


def test_every_entry_of_a_table_arrives() -> None:
    made = built(
        SEQUENCES, "tables.item.optimizer=adam", "tables.item.lr=0.5", "tables.item.beta1=0.8", "tables.item.clip=2",
        "tables.item.weight_decay=0.25", "tables.item.dtype=bfloat16", "tables.item.admit_after=3", "tables.item.ttl=9",
        "tables.item.max_rows=70", "tables.item.evict=lfu", "tables.item.init={uniform=[-1, 2]}",
        "tables.item.pooled_at=source", "tables.item.max_rare_keys=900", "tables.item.owners=auto",
    )  # fmt: skip
    (table,) = made.tables
    assert table.optimizer == Adam(lr=0.5, beta1=0.8, clip=2, weight_decay=0.25)
    assert table.eviction == Eviction(max_rows=70, policy="lfu", ttl=9)
    assert (table.init, table.dtype, table.admit_after) == (Uniform(-1, 2), torch.bfloat16, 3)
    assert (table.pooled_at, table.max_rare_keys, table.owners) == ("source", 900, "auto")
    plain = built(SEQUENCES, "tables.item.init={normal=1}", "tables.item.optimizer=sgd").tables[0]
    assert (plain.init, plain.optimizer, plain.eviction) == (Normal(1), SGD(), None)
    assert [built(SEQUENCES, *more).tables[0].owners for more in ((), ("tables.item.owners=all",))] == [None, None]


def test_the_scale_of_an_optimizer_is_a_number_or_a_word() -> None:
    for text, scale in (("2.5", 2.5), ("row", "row")):
        made = built(SEQUENCES, "tables.item.optimizer=scaled_rowwise_adagrad", f"tables.item.scale={text}")
        assert made.tables[0].optimizer == ScaledRowwiseAdagrad(scale=scale)


def test_the_dense_optimizer_has_its_settings() -> None:
    made = built(CLICKS, "train.dense_optimizer=sgd", "train.dense_lr=0.5", "train.dense_weight_decay=0.1")
    optimizer = made.dense_optimizer(made.model.parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, 0.1)


def test_the_seed_decides_the_models_first_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([p.flatten() for p in built(CLICKS, f"train.seed={seed}").model.parameters()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_can_be_built(path: Path) -> None:
    read = config.read(path)
    files = read.data.get("path", [])
    if all(Path(one).exists() for one in ([files] if isinstance(files, str) else files)):
        assert config.build(read).tables


def test_there_is_an_example_for_the_demo() -> None:
    assert "demo.toml" in [path.name for path in EXAMPLES]


def test_a_config_survives_json() -> None:
    """As the run folder keeps it, for `nestpipe evaluate`."""
    parsed = config.parse(changed(SEQUENCES, "train.steps=5", "train.rank_at=[3, 7]"))
    again = config.parse(json.loads(json.dumps(parsed.to_dict())))
    assert again == parsed and again.train.rank_at == (3, 7) and again.train.epochs is None


# -- a model of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_ranker.py").write_text(
        "from torch import nn\n"
        "class Ranker(nn.Module):\n"
        "    def __init__(self, *, dim, width=3):\n"
        "        super().__init__()\n"
        "        self.dim, self.width, self.out = dim, width, nn.Linear(dim, width)\n"
        "class Anything(nn.Module):\n"
        "    def __init__(self, **options):\n"
        "        super().__init__()\n"
        "        self.options = options\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_ranker", raising=False)
    return "own_ranker"


def test_a_model_of_ones_own_is_named_by_module_and_class(own_module: str) -> None:
    values = {**SEQUENCES, "model": {"kind": f"{own_module}:Ranker", "width": 5}}
    model: Any = built(values).model
    assert (model.dim, model.width) == (8, 5)
    anything: Any = built({**SEQUENCES, "model": {"kind": f"{own_module}:Anything", "depth": 2}}).model
    assert anything.options == {"depth": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "own_ranker:Rankr"}, "model.kind 'own_ranker:Rankr' cannot be imported"),
        ({"kind": "no_such_module:Ranker"}, "cannot be imported: No module named 'no_such_module'"),
        ({"kind": ":Ranker"}, "cannot be imported"),
        ({"kind": "own_ranker:Ranker", "widht": 5}, "model.widht, .*did you mean 'width'"),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_is_refused(own_module: str, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.parse({**SEQUENCES, "model": model})


# -- --set -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=20", 20),
        ("a.b=1_000", 1000),
        ("a.b=0.1", 0.1),
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ("a.b=word", "word"),
        ('a.b="20"', "20"),
        ("a.b=some/path with=signs", "some/path with=signs"),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b={normal = 0.1}", {"normal": 0.1}),
        (" a.b = 3 ", 3),
        ("a.b=", ""),
    ],
)
def test_set_takes_toml_values_and_words_without_quotes(text: str, value: Any) -> None:
    values: dict[str, Any] = {"a": {"c": 1}}
    config.override(values, text)
    assert values == {"a": {"b": value, "c": 1}}
    assert type(values["a"]["b"]) is type(value)


def test_set_reaches_into_tables_and_makes_sections(tmp_path: Path) -> None:
    values: dict[str, Any] = {"tables": {"item": {"dim": 8}}}
    config.override(values, "tables.item.lr=0.1")
    config.override(values, "train.steps=3")
    assert values == {"tables": {"item": {"dim": 8, "lr": 0.1}}, "train": {"steps": 3}}


def test_read_applies_overrides_on_top_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nkind = "synthetic_sequences"\n[model]\nkind = "hstu"\n'
        '[tables.item]\ndim = 8\nfeatures = ["history", "negatives"]\n[train]\nsteps = 9\nbatch_size = 4\n'
    )
    read = config.read(path, ["train.steps=20", "schedule.micro_batches=8", "train.steps=21"])
    assert (read.train.steps, read.train.batch_size, read.setting.micro_batches) == (21, 4, 8)
    assert isinstance(config.build(read).model, HSTU)


@pytest.mark.parametrize("text", ["steps=20", "train.steps", "train.=3", ".steps=3", ""])
def test_set_that_is_not_section_entry_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it as section\.entry=value"):
        config.override({}, text)


def test_set_below_an_entry_that_is_no_section_is_refused() -> None:
    with pytest.raises(ValueError, match="'steps' is not a section"):
        config.override({"train": {"steps": 3}}, "train.steps.more=1")


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str]] = [
    ("trian.steps=3", r"section \[trian\], .*did you mean 'train'"),
    ("train.step=3", "train.step, .*did you mean 'steps'"),
    ("train.zzz=3", r"train.zzz, which is not known \(known: .*batch_size"),
    ("schedule.microbatches=3", "schedule.microbatches, .*did you mean 'micro_batches'"),
    ("schedule.name=seriell", "schedule.name 'seriell', .*did you mean 'serial'"),
    ("schedule.micro_batches=0", "schedule.micro_batches must be at least 1, got 0"),
    ("schedule.micro_batches=many", "schedule.micro_batches must be a whole number or 'auto', got 'many'"),
    ("schedule.clustering=windows", "schedule.clustering 'windows', .*did you mean 'window'"),
    ("schedule.window_cache=1", "schedule.window_cache must be true or false, got 1"),
    ("data.kind=synthetic_click", "data.kind 'synthetic_click', .*did you mean 'synthetic_clicks'"),
    ("data.kind=[1]", r"data.kind \[1\], which is not known"),
    ("data.num_feature=3", "data.num_feature, .*did you mean 'num_features'"),
    ("data.num_features=many", "data.num_features must be a whole number, got 'many'"),
    ("data.num_features=0", "num_features"),
    ("model.kind=dlmr", "model.kind 'dlmr', .*did you mean 'dlrm'"),
    ("model.botom=[1]", "model.botom, .*did you mean 'bottom'"),
    ("model.bottom=wide", "model.bottom must be a list of whole numbers, got 'wide'"),
    ("tables.f*.optimizer=adagrd", r"tables.f\*.optimizer 'adagrd', .*did you mean 'adagrad'"),
    ("tables.f*.optimizer=3", r"tables.f\*.optimizer 3, which is not known"),
    ("tables.f*.beta1=0.3", r"tables.f\*.beta1, which is not known"),  # an entry of Adam only
    ("tables.f*.poling=sum", r"tables.f\*.poling, .*did you mean 'pooling'"),
    ("tables.f*.pooling=summ", r"tables.f\*.pooling 'summ', .*did you mean 'sum'"),
    ("tables.f*.features={f0='summ'}", r"tables.f\*.features.f0 'summ', .*did you mean 'sum'"),
    ("tables.f*.dim=wide", r"tables.f\*.dim must be a whole number, got 'wide'"),
    ("tables.f*.dim=true", r"tables.f\*.dim must be a whole number, got True"),
    ("tables.f*.dim=0", "dim must be a whole number of at least 1, got 0"),
    ("tables.f*.lr=fast", "lr must be a finite number >= 0, got 'fast'"),
    ("tables.f*.dtype=float61", "dtype 'float61', which is not known.*float32"),
    ("tables.f*.init={gauss=1}", "init must be .*normal = std.*got {'gauss': 1}"),
    ("tables.f*.init=normal", r"tables.f\*: init must be {normal = std} or .*, got 'normal'"),
    ("tables.f*.evict=lruu", r"tables.f\*.evict 'lruu', .*did you mean 'lru'"),
    ("tables.f*.ttl=0", "ttl must be at least 1, got 0"),
    ("tables.f*.tier=disc", "tier must be 'memory' or 'disk', got 'disc'"),
    ("tables.f*.features=[1]", r"tables.f\*.features must be"),
    ("tables.g=3", r"tables.g must be a section \[tables.g\], got 3"),
    ("tables.g.dim=3", "feature 'g' of the data"),
    ("tables.f00.dim=3", "feature 'f00' of the data, .*did you mean 'f0'"),
    ("tables.g*.dim=3", r"tables.'g\*' fits no feature of the data, which has f0, f1, f2"),
    ("train.steps=ten", "train.steps must be a whole number, got 'ten'"),
    ("train.steps=1.5", "train.steps must be a whole number, got 1.5"),
    ("train.steps=0", "train.steps must be at least 1, got 0"),
    ("train.batch_size=-4", "train.batch_size must be at least 1, got -4"),
    ("train.batch_tokens=0", "train.batch_tokens must be at least 1, got 0"),
    ("schedule.balance=even", "schedule.balance must be a finite number or 'none' or 'tokens' or 'auto', got 'even'"),
    ("schedule.balance=-1", "schedule.balance must be at least 0, got -1"),
    ("train.dense_lr=fast", "train.dense_lr must be a finite number, got 'fast'"),
    ("train.exclude_seen=1", "train.exclude_seen must be true or false, got 1"),
    ("train.rank_at=10", "train.rank_at must be a list of whole numbers, got 10"),
    ("train.rank_at=[]", "train.rank_at must not be empty"),
    ("train.rank_at=[10, 0]", "train.rank_at must be at least 1, got 0"),
    ("train.dense_optimizer=adamm", "train.dense_optimizer 'adamm', .*did you mean 'adam"),
    ("train.on_nonfinite=skipp", "train.on_nonfinite 'skipp', .*did you mean 'skip'"),
    ("train.eval_split=tset", "train.eval_split 'tset', .*did you mean 'test'"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda text: text)
def test_a_mistake_is_named_with_the_near_right_word(mistake: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(CLICKS, mistake)


@pytest.mark.parametrize("section", ["data", "model", "tables"])
def test_a_missing_section_is_named(section: str) -> None:
    values = {name: content for name, content in CLICKS.items() if name != section}
    with pytest.raises(ValueError, match=rf"section \[{section}\] is missing; see examples/demo.toml"):
        config.parse(values)


@pytest.mark.parametrize("section", ["data", "model"])
def test_a_missing_kind_lists_the_known_ones(section: str) -> None:
    with pytest.raises(ValueError, match=rf"{section}.kind is missing; one of .*(dlrm|criteo)"):
        config.parse({**CLICKS, section: {"dim": 3}})


def test_a_missing_dim_is_named() -> None:
    with pytest.raises(ValueError, match=r"tables.f\*.dim is missing"):
        config.parse({**CLICKS, "tables": {"f*": {"lr": 0.1}}})


def test_a_section_that_is_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="train must be a section, got 3"):
        config.parse({**CLICKS, "train": 3})


def test_an_argument_that_cannot_be_worked_out_is_asked_for() -> None:
    tables = {"f0": {"dim": 4, "pooling": "sum"}, "f1": {"dim": 8, "pooling": "sum"}}
    with pytest.raises(ValueError, match=r"model\.dim is missing"):
        built({**CLICKS, "tables": tables})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the config .*none\.toml: No such file"):
        config.read(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[data\n")
    with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML: .*line 1"):
        config.read(bad)


def test_a_batch_is_cut_by_samples_or_by_tokens_and_by_256_samples_if_nothing_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"train.batch_size = 4 and train.batch_tokens = 100: .*; leave one of them out"
    ):
        TrainSection(batch_size=4, batch_tokens=100)
    assert TrainSection().batch_size == 256 and TrainSection(batch_tokens=100).batch_size is None

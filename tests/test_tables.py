from __future__ import annotations

import math

import pytest
import torch

from nestpipe.errors import did_you_mean
from nestpipe.optim import OPTIMIZERS, Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.tables import Eviction, Feature, Normal, Table, Uniform, check_declarations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim must be a whole number of at least 1, got 0"),
        ({"dim": 8.0}, r"dim must be a whole number of at least 1, got 8\.0"),
        ({"optimizer": torch.optim.SGD}, r"optimizer must be a nestpipe row optimizer such as .*, got <class"),
        ({"optimizer": "sgd"}, "optimizer must be a nestpipe row optimizer such as .*, got 'sgd'"),
        ({"dtype": torch.float16}, r"dtype must be torch\.float32 or torch\.bfloat16, got torch\.float16"),
        ({"tier": "tape"}, "tier must be .*, got 'tape'"),
        ({"admit_after": 0}, "admit_after must be a whole number of at least 1, got 0"),
        ({"admit_after": 1.5}, r"admit_after must be a whole number of at least 1, got 1\.5"),
        ({"max_rare_keys": 0}, "max_rare_keys must be a whole number of at least 1, got 0"),
        ({"max_rare_keys": None}, "max_rare_keys must be a whole number of at least 1, got None"),
        ({"owners": 0}, "owners must be a number of workers of at least 1, 'auto', or None for all, got 0"),
        ({"owners": "all"}, "owners must be a number of workers of at least 1, 'auto', or None for all, got 'all'"),
        ({"owners": True}, "owners must be a number of workers of at least 1, 'auto', or None for all, got True"),
        ({"pooled_at": "worker"}, r"pooled_at must be one of .*'auto', 'source', 'owner'.*, got 'worker'"),
    ],
)
def test_a_bad_table_is_refused_by_name_with_the_value(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^table 'item': {message}"):
        Table(**{"name": "item", "dim": 8} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give max_rows, ttl or both"),
        ({"policy": "lru"}, "give max_rows, ttl or both"),
        ({"max_rows": 5, "policy": "fifo"}, "policy must be 'lru' or 'lfu', got 'fifo'"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"max_rows": 5, "ttl": 0}, "ttl must be at least 1, got 0"),
        ({"ttl": -3}, "ttl must be at least 1, got -3"),
    ],
)
def test_a_bad_eviction_is_refused_with_the_value(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Eviction: {message}"):
        Eviction(**settings)


def test_a_bad_pooling_is_refused_with_the_feature() -> None:
    with pytest.raises(ValueError, match=r"^feature 'liked': pooling must be None, 'sum' or 'mean', got 'max'"):
        Feature("liked", "item", pooling="max")


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize("value", [-0.1, math.nan, "0.1", None, True])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "clip"])
def test_a_bad_optimizer_setting_is_refused_by_name_with_the_value(kind, name: str, value) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name} must be a finite number >= 0, got {value!r}"):
        kind(**{name: value})


def test_settings_of_single_optimizers_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"^Adagrad: initial must be a finite number >= 0, got -1"):
        Adagrad(initial=-1)
    with pytest.raises(ValueError, match=r"^RowwiseAdagrad: eps must be a finite number >= 0, got -1"):
        RowwiseAdagrad(eps=-1)
    for betas in ({"beta1": 1.0}, {"beta2": 1.5}):
        with pytest.raises(ValueError, match=r"^Adam: beta1 and beta2 must be below 1, got"):
            Adam(**betas)


def test_state_beside_a_row_is_what_each_optimizer_needs() -> None:
    assert {name: kind().state_floats(10) for name, kind in OPTIMIZERS.items()} == {
        "sgd": 0,
        "adagrad": 10,
        "rowwise_adagrad": 1,
        "scaled_rowwise_adagrad": 1,
        "adam": 20,
    }
    assert ScaledRowwiseAdagrad(scale="row").state_floats(10) == 9


@pytest.mark.parametrize("scale", [0.5, 0, -1, math.inf, math.nan, "rows", "", None, True])
def test_a_scale_that_is_neither_a_number_nor_a_word_for_one_is_refused(scale) -> None:
    told = rf"^ScaledRowwiseAdagrad: scale must be 'replicas', 'row' or a finite number >= 1, got {scale!r}$"
    with pytest.raises(ValueError, match=told):
        ScaledRowwiseAdagrad(scale=scale)


def test_every_scale_is_one_without_replicas() -> None:
    assert [ScaledRowwiseAdagrad(scale=scale).divisor(1) for scale in (1, 2.5, "replicas")] == [1, 1, 1]
    assert [ScaledRowwiseAdagrad(scale=scale).divisor(4) for scale in (1, 2.5, "replicas")] == [1, 2.5, 4]


ITEM, USER = Table("item", dim=8), Table("user", dim=4)


def test_good_declarations_pass_and_features_may_share_a_table() -> None:
    check_declarations(
        [ITEM, USER], [Feature("history", "item"), Feature("liked", "item", pooling="sum"), Feature("user", "user")]
    )


@pytest.mark.parametrize(
    ("tables", "features", "message"),
    [
        ([ITEM, USER, ITEM], [Feature("a", "item"), Feature("b", "user")], "table 'item' is declared more than once"),
        ([ITEM], [Feature("a", "item"), Feature("a", "item")], "feature 'a' is declared more than once"),
        ([ITEM, USER], [Feature("a", "item")], "table 'user' is read by no feature"),
        (
            [ITEM, USER],
            [Feature("a", "itme"), Feature("b", "user")],
            r"feature 'a' refers to table 'itme', which is not known; did you mean 'item'\? \(known: item, user\)",
        ),
        (
            [ITEM, USER],
            [Feature("a", "zzz"), Feature("b", "user")],
            r"feature 'a' refers to table 'zzz', which is not known \(known: item, user\)",
        ),
    ],
)
def test_bad_declarations_are_refused_with_the_names(tables, features, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_declarations(tables, features)


def test_an_unknown_name_where_nothing_is_known_says_so() -> None:
    assert did_you_mean("item", []) == "which is not known (known: none)"


def test_first_values_and_eviction_of_a_wrong_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="low must not be above high"):
        Uniform(0.1, -0.1)
    with pytest.raises(ValueError, match="std must be at least 0"):
        Normal(-1.0)
    with pytest.raises(ValueError, match="table 't': init"):
        Table("t", 4, init=0.02)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table 't': eviction"):
        Table("t", 4, eviction=100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table 't': dim"):
        Table("t", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(5_000_000, 5_000_000), ("2GB", 2 * 10**9), ("512MB", 512 * 10**6), ("1GiB", 2**30), ("1.5 gib", 3 * 2**29), ("77", 77),
     (None, 10**9)],
)  # fmt: skip
def test_the_memory_of_a_table_on_disk_is_a_number_or_text(text: int | str | None, expected: int) -> None:
    assert Table("item", 4, tier="disk", memory=text).memory_bytes == expected


@pytest.mark.parametrize("memory", ["2 G B", "GB", "-1GB", "1GX", 0, -5, True, 1.5, "0MB"])
def test_other_amounts_of_memory_are_refused(memory) -> None:
    with pytest.raises(ValueError, match=r"table 'item': memory must be a number of bytes .* such as '2GB'"):
        Table("item", 4, tier="disk", memory=memory)


def test_a_table_in_memory_has_no_budget_and_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="memory='2GB' is the budget of a table with tier='disk'"):
        Table("item", 4, memory="2GB")
    with pytest.raises(ValueError, match="table 'item': tier must be 'memory' or 'disk', got 'tape'"):
        Table("item", 4, tier="tape")


def test_a_streamed_feature_is_a_sequence() -> None:
    assert Feature("negatives", "item", streamed=True).pooling is None
    with pytest.raises(ValueError, match="feature 'bag': streamed is for rows that come one by one"):
        Feature("bag", "item", "sum", streamed=True)
    with pytest.raises(ValueError, match="feature 'bag': streamed must be True or False"):
        Feature("bag", "item", streamed=1)  # type: ignore[arg-type]

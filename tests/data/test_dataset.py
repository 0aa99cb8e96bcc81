import inspect

import pytest

from nestpipe.data import DATASETS, SyntheticClicks


def test_the_registry_names_every_dataset():
    assert sorted(DATASETS) == [
        "criteo", "csv", "huggingface", "kuairand", "kuairand_clicks", "kuairand_like", "kuairand_sequences", "movielens",
        "parquet", "sequences", "synthetic_clicks", "synthetic_sequences",
    ]  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_takes_keywords_only_so_that_a_toml_section_can_build_it(name):
    kinds = {p.kind for p in inspect.signature(DATASETS[name]).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2}, "rank is 2 of world 2"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_wrong_request_is_refused_before_the_first_batch(wrong, message):
    with pytest.raises(ValueError, match=message):
        SyntheticClicks().batches("train", **{"batch_size": 4, "rank": 0, "world": 2, "seed": 0, **wrong})

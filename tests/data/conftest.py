"""One of every data set there is."""

from __future__ import annotations

import random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data import DATASETS


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    draw = random.Random(0)
    lines = [f"{user} {' '.join(str(draw.randrange(50)) for _ in range(2 + user % 9))}" for user in range(60)]
    (folder / "sequences.txt").write_text("\n".join(lines) + "\n")
    lines = [f"{draw.randrange(20)}::{draw.randrange(50)}::{draw.randrange(1, 6)}::{t}" for t in range(300)]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    numbers = [[str(n % 2), *(str(draw.randrange(99)) for _ in range(13))] for n in range(300)]
    lines = ["\t".join([*row, *(f"{draw.randrange(1 << 32):08x}" for _ in range(26))]) for row in numbers]
    (folder / "criteo.tsv").write_text("\n".join(lines) + "\n")
    head = "user_id,video_id,hourmin,time_ms,is_click,duration_ms,tab\n"
    lines = [f"{draw.randrange(9)},{draw.randrange(99)},1530,{n},{draw.randrange(2)},900,1" for n in range(300)]
    (folder / "kuairand.csv").write_text(head + "\n".join(lines) + "\n")
    lines = [f"s{draw.randrange(9)},a{draw.randrange(99)},{draw.randrange(99) / 4}" for n in range(300)]
    (folder / "words.csv").write_text("site,app,price\n" + "\n".join(lines) + "\n")
    lists = pa.array([list(range(n % 4)) for n in range(300)], pa.list_(pa.int64()))
    columns = {"user": pa.array(range(300)), "liked": lists, "age": pa.array([n / 2 for n in range(300)])}
    datasets.Dataset(pa.table(columns)).save_to_disk(str(folder / "saved"), num_shards=2)
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=50)

    options = {
        "synthetic_sequences": {"num_samples": 100, "num_valid_samples": 20, "overlap": 0.5},
        "synthetic_clicks": {"num_samples": 100, "num_valid_samples": 20, "keys_per_bag": [0, 5]},
        "kuairand_like": {"num_users": 100, "num_items": 500, "mean_length": 12, "max_length": 60, "num_evaluated": 20},
        "kuairand_clicks": {
            "num_users": 100,
            "num_items": 500,
            "mean_length": 12,
            "max_length": 60,
            "num_evaluated": 20,
        },
        "sequences": {"path": str(folder / "sequences.txt")},
        "movielens": {"path": str(folder / "ratings.dat")},
        "criteo": {"path": str(folder / "criteo.tsv"), "shuffle_buffer": 64, "block_bytes": 2000},
        "kuairand": {"path": str(folder / "kuairand.csv"), "shuffle_buffer": 64, "block_bytes": 500},
        "kuairand_sequences": {"path": str(folder / "kuairand.csv")},
        "csv": {
            "path": str(folder / "words.csv"),
            "keys": ["site", "app"],
            "dense": ["price"],
            "buckets": {"level": {"column": "price", "quantiles": 5}},
            "crosses": {"both": ["site", "level"]},
            "shuffle_buffer": 64,
            "block_bytes": 500,
        },
        "huggingface": {
            "path": str(folder / "saved"),
            "keys": ["user", "liked"],
            "dense": ["age"],
            "rows_per_read": 20,
        },
        "parquet": {"path": str(folder / "rows.parquet"), "keys": ["user", "liked"], "dense": ["age"]},
    }
    assert options.keys() == DATASETS.keys()
    return {name: DATASETS[name](**entries) for name, entries in options.items()}

"""Data where it lies: an S3 server on this machine, fsspec's file systems, and what goes wrong there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from nestpipe import run
from nestpipe.config import parse
from nestpipe.data import Criteo, Parquet, Sequences
from nestpipe.data.files import find_files, line_blocks
from nestpipe.data.reader import in_process
from tests.cluster import Cluster
from tests.data.data_samples import assert_same

HOW = {"batch_size": 7, "rank": 0, "world": 1, "seed": 3}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files in a folder, and the same in the bucket "logs" of an S3 server."""
    folder = tmp_path_factory.mktemp("bucket")
    for day in range(3):
        rows = range(100 * day, 100 * day + 100)
        table = pa.table({"user": rows, "liked": [list(range(n % 4)) for n in rows], "click": [n % 2 for n in rows]})
        pq.write_table(table, folder / f"day {day}.parquet", row_group_size=30)
        text = "".join("\t".join(["1", *["7"] * 13, *["0a"] * 25, f"{n:x}"]) + "\n" for n in rows)
        (folder / f"day-{day}.tsv").write_text(text)
    (folder / "users.txt").write_text("".join(f"{user} 1 2 3 {user}\n" for user in range(9)))
    (folder / "empty.txt").write_text("")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            settings = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
            for name, value in settings.items():
                patch.setenv(f"AWS_{name}", value)
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
            client = boto3.client("s3")
            client.create_bucket(Bucket="logs")
            for file in folder.iterdir():
                client.put_object(Bucket="logs", Key=f"in/{file.name}", Body=file.read_bytes())
            yield folder
    finally:
        server.stop()


def test_a_pattern_names_the_objects_of_a_bucket_in_order(bucket: Path) -> None:
    assert find_files("s3://logs/in/day-*.tsv") == [f"s3://logs/in/day-{day}.tsv" for day in range(3)]
    assert find_files("s3://logs/*/day-[02].tsv") == ["s3://logs/in/day-0.tsv", "s3://logs/in/day-2.tsv"]
    assert find_files(["s3://logs/*/users.txt", str(bucket / "users.txt")]) == [
        "s3://logs/in/users.txt",
        str(bucket / "users.txt"),
    ]


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda path: Parquet(path=path, keys=["user", "liked"], shuffle_buffer=50), "day *.parquet"),
        (lambda path: Criteo(path=path, shuffle_buffer=50, block_bytes=3000), "day-*.tsv"),
        (lambda path: Sequences(path=path), "users.txt"),
    ],
)
def test_batches_are_those_of_the_same_files_on_disk(bucket: Path, make, pattern: str) -> None:
    here, there = make(str(bucket / pattern)), make(f"s3://logs/in/{pattern}")
    for epoch in range(2):
        ours, theirs = (list(data.batches("train", **HOW, epoch=epoch)) for data in (there, here))
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


def test_a_reader_process_finds_the_server_too(bucket: Path) -> None:
    data = Parquet(path="s3://logs/in/day *.parquet", keys=["user"])
    with in_process(data.batches, "train", **HOW) as batches:
        for ours, theirs in zip(batches, data.batches("train", **HOW), strict=True):
            assert_same(ours, theirs)


def digest_of(data: dict[str, Any], environment: dict[str, str], folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:  # the worker began before there was a server
        for name, value in environment.items():
            patch.setenv(name, value)
        config = parse(
            {
                "data": data,
                "model": {"kind": "dlrm", "bottom": [4], "top": [4]},
                "tables": {"*": {"dim": 4, "pooling": "sum"}},
                "train": {"batch_size": 16, "epochs": 1, "eval_split": "none", "reader": "thread"},
                "schedule": {"name": "nested"},
            }
        )
        return run.train(config, folder=folder, json_file=None)["digest"]


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        ({"kind": "parquet", "keys": ["user", "liked"], "label": "click", "shuffle_buffer": 50}, "day *.parquet"),
        ({"kind": "criteo", "shuffle_buffer": 50, "block_bytes": 3000}, "day-*.tsv"),
    ],
)
def test_two_workers_learn_the_same_from_a_bucket_as_from_files(
    bucket: Path, cluster: Cluster, tmp_path: Path, data: dict[str, Any], pattern: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    there = cluster.run(2, digest_of, {**data, "path": f"s3://logs/in/{pattern}"}, environment, tmp_path / "there")
    here = cluster.run(2, digest_of, {**data, "path": str(bucket / pattern)}, {}, tmp_path / "here")
    assert there == here and len(set(here)) == 1


def test_text_is_read_from_an_object_as_from_a_file(bucket: Path) -> None:
    blocks = [block.text for block in line_blocks(["s3://logs/in/day-0.tsv"], block_bytes=999)]
    assert len(blocks) > 5 and b"".join(blocks) == (bucket / "day-0.tsv").read_bytes()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://nowhere/in/*.tsv", "s3://nowhere/in/.* cannot be read: .*NO_SUCH_BUCKET.*AWS_ENDPOINT_URL"),
        ("s3://logs/in/week-*.tsv", "no file matches 's3://logs/in/week-"),
        ("s3://logs/in/none.tsv", "no file matches 's3://logs/in/none.tsv'"),
        ("s3://logs/in", "is a folder; name its files, for example 's3://logs/in/\\*'"),
        ("s3://logs/in/empty.txt", "empty.txt is empty"),
        ("nosuch://logs/x", "nosuch://logs/x cannot be read: .*nosuch"),
        ("file://elsewhere/x", "a file on another machine"),
    ],
)
def test_what_is_not_there_is_named_before_training(bucket: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_files(path)


def test_credentials_that_a_server_refuses_are_named(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError("AWS Error ACCESS_DENIED during HeadObject operation")

    monkeypatch.setattr("nestpipe.data.remote._system", denied)
    with pytest.raises(
        ValueError, match=r"s3://logs/x cannot be read: .*ACCESS_DENIED.*; credentials are AWS_ACCESS_KEY_ID"
    ):
        find_files("s3://logs/x")


def test_any_file_system_of_fsspec_will_do(bucket: Path) -> None:
    memory = fsspec.filesystem("memory")
    for day in range(3):
        memory.pipe(f"/logs/day-{day}.tsv", (bucket / f"day-{day}.tsv").read_bytes())
    data = Criteo(path="memory://logs/day-*.tsv", shuffle_buffer=0)
    on_disk = Criteo(path=(bucket / "day-*.tsv").as_uri().replace("%2A", "*"), shuffle_buffer=0)
    for ours, theirs in zip(data.batches("train", **HOW), on_disk.batches("train", **HOW), strict=True):
        assert_same(ours, theirs)

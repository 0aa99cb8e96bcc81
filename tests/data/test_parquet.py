import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe import hash_strings
from nestpipe.batch import NotFinite, check_batch
from nestpipe.data import Parquet
from tests.data.data_samples import all_ranks, read, read_samples


def write(path: Path, *, rows_per_group: int = 10, **columns) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return str(path)


@pytest.fixture
def path(tmp_path):
    n = range(100)
    return write(
        tmp_path / "rows.parquet",
        user=pa.array(n, pa.int64()),
        liked=pa.array([[k, k + 1][: k % 3] for k in n], pa.list_(pa.int64())),
        age=pa.array([k / 2 for k in n], pa.float64()),
        clicked=pa.array([k % 2 for k in n], pa.int8()),
    )


COLUMNS = {"keys": {"user": "user", "likes": "liked"}, "dense": ["age"], "label": "clicked"}


def test_columns_become_keys_dense_inputs_and_labels(path):
    dataset = Parquet(path=path, valid=path, **COLUMNS)
    assert dataset.features == ("user", "likes")
    batch = next(read(dataset, "valid", batch_size=6))
    assert batch.keys["user"].to_lists() == [[k] for k in range(6)]
    assert batch.keys["likes"].to_lists() == [[], [1], [2, 3], [], [4], [5, 6]]
    assert batch.dense["dense"].tolist() == [[k / 2] for k in range(6)]
    assert batch.labels.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("rows_per_group", [7, 1000])  # many row groups, or fewer than ranks
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_is_in_one_split_on_one_rank(tmp_path, rows_per_group, world):
    path = write(tmp_path / "rows", rows_per_group=rows_per_group, user=pa.array(range(200)))
    dataset = Parquet(path=path, keys=["user"], rows_per_read=16)
    for split, least in (("train", 40), ("valid", 0), ("test", 0)):
        assert all(len(read_samples(dataset, split, batch_size=9, world=world, rank=r)) >= least for r in range(world))
    seen = [s for split in ("train", "valid", "test") for s in all_ranks(dataset, split, world=world, batch_size=9)]
    assert sorted(seen) == [((user,),) for user in range(200)]


def test_seed_and_epoch_change_the_order_even_without_a_buffer(path):
    for shuffle_buffer in (0, 30):
        dataset = Parquet(path=path, shuffle_buffer=shuffle_buffer, **COLUMNS)
        wheres = ((0, 0), (0, 0), (1, 0), (0, 1))
        orders = [tuple(read_samples(dataset, "train", batch_size=9, seed=s, epoch=e)) for s, e in wheres]
        assert orders[0] == orders[1]
        assert len(set(orders)) == 3
        assert len({tuple(sorted(order)) for order in orders}) == 1


def test_reading_takes_one_record_batch_at_a_time(path, monkeypatch):
    dataset = Parquet(path=path, shuffle_buffer=0, rows_per_read=5, **COLUMNS)
    pieces = []
    original = dataset._piece
    monkeypatch.setattr(dataset, "_piece", lambda *args: pieces.append(1) or original(*args))
    batches = dataset.batches("train", batch_size=3, rank=0, world=1, seed=0)
    next(batches)
    assert len(pieces) <= 2


def test_missing_keys_are_empty_lists_and_missing_numbers_are_left_to_the_batch_check(tmp_path):
    path = write(
        tmp_path / "rows",
        user=pa.array([1, None, 3], pa.int32()),
        liked=pa.array([None, [], [4]], pa.large_list(pa.int64())),
        age=pa.array([0.0, None, 1.0]),
    )
    batch = next(
        Parquet(path=path, valid=path, keys=["user", "liked"], dense=["age"]).batches(
            "valid", batch_size=3, rank=0, world=1, seed=0
        )
    )
    assert batch.keys["user"].to_lists() == [[1], [], [3]]
    assert batch.keys["liked"].to_lists() == [[], [], [4]]
    assert batch.labels is None
    with pytest.raises(NotFinite, match="dense"):
        check_batch(batch, ["user"])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"user": [1.5]}, {"keys": ["user"]}, "key column 'user' is double; .*cast it, or make buckets of it"),
        ({"user": [1]}, {"keys": ["user"], "integers": []}, "key column 'user' is int64, and holds strings"),
        ({"user": ["1"]}, {"keys": ["user"], "integers": ["user"]}, "key column 'user' is string, and holds integers"),
        ({"user": ["a"]}, {"keys": ["user"], "buckets": {"old": {"column": "user", "log": 2}}}, "not a number"),
        ({"user": [[1]], "item": [1]}, {"keys": ["user", "item"], "crosses": {"x": ["user", "item"]}}, "holds lists"),
        ({"user": [1]}, {"keys": ["user"], "crosses": {"x": ["user", "usr"]}}, "did you mean 'user'"),
        ({"user": [1]}, {"keys": ["user"], "crosses": {"x": ["user"]}}, "name two or more different features"),
        ({"user": [1]}, {"keys": ["user"], "crosses": {"user": ["user", "user"]}}, "are named 'user'"),
        ({"user": [1]}, {"keys": ["user"], "log1p": ["age"]}, "log1p: 'age' of dense, which is not known"),
        ({"user": [1]}, {"keys": ["item"]}, "no column 'item'; it has user"),
        ({"user": [1], "age": ["x"]}, {"keys": ["user"], "dense": ["age"]}, "column 'age' is string, not a number"),
        ({"user": [1]}, {"keys": []}, "name at least one key column"),
    ],
)
def test_columns_that_do_not_fit_are_refused_at_once(tmp_path, columns, options, message):
    with pytest.raises(ValueError, match=message):
        Parquet(path=write(tmp_path / "rows", **columns), **options)


def test_bad_values_are_named_by_row(tmp_path):
    path = write(tmp_path / "rows", user=pa.array([1, 2, 3]), clicked=pa.array([0, 1, 7]), rows_per_group=2)
    with pytest.raises(ValueError, match=r"rows, row 2: clicked is 7, not 0 or 1"):
        read_samples(Parquet(path=path, valid=path, keys=["user"], label="clicked"), "valid", batch_size=2)
    any_label = Parquet(path=path, valid=path, keys=["user"], label="clicked", binary_label=False)
    assert read_samples(any_label, "valid", batch_size=2)[2] == ((3,), 7.0)

    path = write(tmp_path / "nulls", liked=pa.array([[1], [], [2, None]], pa.list_(pa.int64())))
    with pytest.raises(ValueError, match=r"nulls, row 2: the list in liked holds a null"):
        read_samples(Parquet(path=path, valid=path, keys=["liked"]), "valid", batch_size=2)

    path = write(tmp_path / "huge", user=pa.array([2**63], pa.uint64()))
    with pytest.raises(ValueError, match=r"huge, rows 0 to 0, user: .*9223372036854775808"):
        read_samples(Parquet(path=path, valid=path, keys=["user"]), "valid", batch_size=2)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_strings_are_hashed_and_integers_stay_as_they_are(tmp_path, kind):
    words = pa.array(["a", None, "", "b"]).cast(kind) if kind != pa.binary() else pa.array([b"a", None, b"", b"b"])
    path = write(tmp_path / "rows", site=words, user=pa.array([7, 8, 9, 10]))
    data = Parquet(path=path, valid=path, keys=["site", "user"])
    batch = next(read(data, "valid", batch_size=4))
    a, empty, b = ([key] for key in hash_strings(["a", "", "b"]).tolist())
    assert batch.keys["site"].to_lists() == [a, [], empty, b]
    assert batch.keys["user"].to_lists() == [[7], [8], [9], [10]]
    assert data.integers == ["user"]


@pytest.mark.parametrize(
    ("values", "keys", "other"),
    [
        ([7, 8], [[7], [8]], ["a"]),
        (["a", "b"], [[key] for key in hash_strings(["a", "b"]).tolist()], [7]),
        ([[7, 8], []], [[7, 8], []], [["a"]]),
    ],
)
def test_a_file_in_which_a_column_holds_nothing_agrees_with_all_others(tmp_path, values, keys, other):
    nothing = pa.array([None], pa.list_(pa.null()) if values == [[7, 8], []] else pa.null())
    for number, column in enumerate([nothing, values, nothing]):
        write(tmp_path / str(number), user=column)
    path = str(tmp_path / "*")
    batch = next(read(Parquet(path=path, valid=path, keys=["user"]), "valid", batch_size=9))
    assert batch.keys["user"].to_lists() == [[], *keys, []]
    write(tmp_path / "3", user=other)
    with pytest.raises(ValueError, match=r"3: key column 'user' is .*, and holds .* in other files"):
        Parquet(path=path, keys=["user"])


def test_lists_of_strings_are_lists_of_keys(tmp_path):
    path = write(tmp_path / "rows", liked=pa.array([["a", "b"], [], None]))
    batch = next(read(Parquet(path=path, valid=path, keys=["liked"]), "valid", batch_size=3))
    assert batch.keys["liked"].to_lists() == [hash_strings(["a", "b"]).tolist(), [], []]


def test_files_that_disagree_on_what_a_key_is_are_refused(tmp_path):
    numbers, words = write(tmp_path / "a", user=pa.array([1])), write(tmp_path / "b", user=pa.array(["1"]))
    with pytest.raises(ValueError, match=r"b: key column 'user' is string, and holds integers in other files"):
        Parquet(path=[numbers, words], keys=["user"])


def test_buckets_crosses_and_logarithms_are_made_of_columns(tmp_path):
    path = write(
        tmp_path / "rows",
        site=pa.array(["a", "b", None, "a"]),
        age=pa.array([10.0, None, 30.0, 40.0]),
        hour=pa.array([14102123, 14102200, 14102301, 14102123]),
    )
    data = Parquet(
        path=path,
        valid=path,
        keys=["site"],
        dense=["age", "hour"],
        log1p=["age"],
        fill=0.0,
        buckets={"old": {"column": "age", "boundaries": [18, 35]}, "hour": {"width": 1, "modulo": 100}},
        crosses={"site_hour": ["site", "hour"], "all": ["site", "hour", "old"]},
    )
    assert data.features == ("site", "old", "hour", "site_hour", "all")
    batch = next(read(data, "valid", batch_size=4))
    assert batch.keys["old"].to_lists() == [[0], [], [1], [2]]
    assert batch.keys["hour"].to_lists() == [[23], [0], [1], [23]]
    pairs = batch.keys["site_hour"].to_lists()
    assert pairs[0] == pairs[3] != pairs[1] and list(map(len, pairs)) == [1, 1, 0, 1]
    assert batch.keys["all"].lengths.tolist() == [1, 0, 0, 1]
    assert batch.dense["dense"][:, 0].tolist() == pytest.approx([math.log(11), 0, math.log(31), math.log(41)])
    assert batch.dense["dense"][:, 1].tolist() == [14102123, 14102200, 14102301, 14102123]


def test_quantiles_come_from_training_rows_alone_and_serve_for_other_files(tmp_path):
    path = write(tmp_path / "rows", user=pa.array(range(1000)), age=pa.array(range(1000)))
    other = write(tmp_path / "other", user=pa.array([1, 2]), age=pa.array([9e9, -9e9]))
    declared = {"old": {"column": "age", "quantiles": 4}}
    data = Parquet(path=path, valid=other, test=other, keys=["user"], buckets=declared)
    assert data.buckets["old"]["boundaries"] == [250, 500, 750]
    assert next(read(data, "valid", batch_size=2)).keys["old"].to_lists() == [[3], [0]]
    again = Parquet(path=other, keys=["user"], buckets=data.buckets, integers=data.integers)
    assert again.buckets == data.buckets


def test_a_file_cut_off_is_refused_at_once(path):
    Path(path).write_bytes(Path(path).read_bytes()[:-30])
    with pytest.raises(ValueError, match="is not a whole Parquet file"):
        Parquet(path=path, **COLUMNS)

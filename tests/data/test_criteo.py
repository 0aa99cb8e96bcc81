import gzip
import math
from pathlib import Path

import pytest

from nestpipe.data import Criteo, criteo
from tests.data.data_samples import all_ranks, read, read_samples

REAL = Path(__file__).parents[3] / "shared" / "data" / "criteo_rows.csv"


def row(number: int, *, label: object = None, integers=None, categories=None) -> str:
    integers = [number] * 13 if integers is None else integers
    categories = [f"{number:08x}"] * 26 if categories is None else categories
    return "\t".join(map(str, [number % 2 if label is None else label, *integers, *categories])) + "\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(row(number) for number in range(300)))
    return str(path)


def test_a_row_becomes_keys_numbers_and_a_label(tmp_path):
    path = tmp_path / "one.tsv"
    gaps = row(
        3, label=1, integers=["", -2, 0, 7, *[""] * 9], categories=["68FD1e64", "", "ffffffffffffffff", *[""] * 23]
    )
    path.write_text(gaps.replace("\n", "\r\n") + row(255))
    dataset = Criteo(path=str(path), valid=str(path), test=str(path))
    batch = next(read(dataset, "valid", batch_size=5))
    assert batch.keys["C1"].to_lists() == [[0x68FD1E64], [255]]
    assert batch.keys["C2"].to_lists() == [[], [255]]
    assert batch.keys["C3"].to_lists() == [[-1], [255]]  # all 64 bits are kept
    assert batch.keys["C26"].to_lists() == [[], [255]]
    assert batch.dense["dense"][0].tolist() == pytest.approx([0, 0, 0, math.log(8)] + [0] * 9)
    assert batch.dense["dense"][1].tolist() == pytest.approx([math.log(256)] * 13)
    assert batch.labels.tolist() == [1, 1]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_is_in_one_split_on_one_rank(path, world):
    dataset = Criteo(path=path, block_bytes=2_000)
    seen = [s for split in ("train", "valid", "test") for s in all_ranks(dataset, split, world=world, batch_size=16)]
    assert sorted(sample[0] for sample in seen) == [(number,) for number in range(300)]


def test_seed_and_epoch_change_the_order_of_training_only(path):
    dataset = Criteo(path=path, block_bytes=2_000, shuffle_buffer=64)
    first = read_samples(dataset, "train", batch_size=16)
    assert first == read_samples(dataset, "train", batch_size=16)
    for other in ({"seed": 1}, {"epoch": 1}):
        again = read_samples(dataset, "train", batch_size=16, **other)
        assert first != again
        assert sorted(first) == sorted(again)
    in_order = [sample[0] for sample in read_samples(dataset, "valid", batch_size=16, seed=7)]
    assert in_order == sorted(in_order)


def test_files_of_their_own_are_read_whole(path, tmp_path):
    (tmp_path / "valid.tsv").write_text("".join(row(number) for number in range(1000, 1020)))
    dataset = Criteo(path=path, valid=str(tmp_path / "valid.tsv"), shuffle_buffer=0)
    assert len(read_samples(dataset, "valid", batch_size=8)) == 20
    assert len(read_samples(dataset, "train", batch_size=8)) + len(read_samples(dataset, "test", batch_size=8)) == 300


def test_compressed_files_give_the_same_rows(path, tmp_path):
    packed = tmp_path / "rows.tsv.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert read_samples(Criteo(path=str(packed)), "train", batch_size=64) == read_samples(
        Criteo(path=path), "train", batch_size=64
    )


def test_reading_takes_no_more_of_the_file_than_the_batch_needs(path, monkeypatch):
    parsed = []
    original = criteo.parse
    monkeypatch.setattr(criteo, "parse", lambda block, **kw: parsed.append(block) or original(block, **kw))
    batches = Criteo(path=path, block_bytes=2_000, shuffle_buffer=0).batches(
        "train", batch_size=4, rank=1, world=2, seed=0
    )
    assert not parsed
    next(batches)
    assert len(parsed) == 1
    assert parsed[0].first_line > 1  # the block of the other rank was passed over


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(1, label=2), r"line 3: the label is '2', not 0 or 1"),
        (row(1, label=""), r"line 3: the label is '', not 0 or 1"),
        (row(1, integers=[0, "1.5", *[""] * 11]), r"line 3: integer I2 is '1.5', not an integer"),
        (row(1, integers=["-", *[""] * 12]), r"line 3: integer I1 is '-', not an integer"),
        (row(1, categories=["xyz", *[""] * 25]), r"line 3: category C1 is 'xyz', not 1 to 16 hex"),
        (row(1, categories=["0" * 17, *[""] * 25]), r"line 3: category C1 is '0{17}'"),
        (
            "1\t2\t3\n",
            r"line 3: 3 columns instead of 40; if the file was cut off there, complete the row or cut it off",
        ),
        (row(1).replace("\n", "\tmore\n"), r"line 3: 41 columns instead of 40"),
        ("\n", r"line 3: 1 columns instead of 40"),
    ],
)
def test_a_bad_row_is_named_by_line_and_value(tmp_path, bad, message):
    path = tmp_path / "rows.tsv"
    path.write_text(row(0) + row(1) + bad + row(2))
    dataset = Criteo(path=str(path), valid=str(path))
    with pytest.raises(ValueError, match=message):
        read_samples(dataset, "valid", batch_size=2)


def test_a_file_cut_off_in_a_row_is_refused_before_training(path):
    Path(path).write_text(Path(path).read_text()[:-5])
    with pytest.raises(ValueError, match=r"rows.tsv ends in the middle of line 300, .*complete the row or cut it off"):
        Criteo(path=path)


def test_an_empty_file_a_missing_file_and_an_unknown_split_are_refused(tmp_path, path):
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(ValueError, match=r"empty\.tsv is empty"):
        Criteo(path=str(tmp_path / "empty.tsv"))
    with pytest.raises(ValueError, match="no file matches"):
        Criteo(path=str(tmp_path / "none.tsv"))
    with pytest.raises(ValueError, match="unknown split 'dev'; use one of train, valid, test"):
        Criteo(path=path).batches("dev", batch_size=1, rank=0, world=1, seed=0)


@pytest.mark.skipif(not REAL.exists(), reason="the file is not here")
def test_real_rows_have_the_known_share_of_clicks():
    dataset = Criteo(path=str(REAL), valid=str(REAL))
    labels = [float(label) for batch in read(dataset, "valid", batch_size=1024) for label in batch.labels]
    assert (len(labels), sum(labels)) == (7_200, 1_549)

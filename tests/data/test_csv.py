import gzip
from pathlib import Path

import pytest
import torch

from nestpipe import hash_strings
from nestpipe.data import CSV, Criteo
from tests.data.data_samples import all_ranks, read, read_samples

REAL = Path(__file__).parents[3] / "shared" / "data" / "criteo_rows.csv"
HEADER = "click,site,user,price\n"


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def keys_of(*words: str) -> list[list[int]]:
    return [[] if word is None else [int(hash_strings([word])[0])] for word in words]


def first(path: str, **options):
    return next(read(CSV(**{"path": path, "valid": path, "keys": ["site"], **options}), "valid", batch_size=100))


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_text_is_hashed_integers_stay_and_numbers_are_inputs(tmp_path, name):
    path = write(tmp_path / name, HEADER + "1,a,7,2.5\n0,,8,\n1,07,,-1\n")
    options = {"keys": {"site": "site", "who": "user"}, "integers": ["user"], "dense": ["price"], "fill": 9.0}
    batch = first(path, label="click", **options)
    assert batch.keys["site"].to_lists() == keys_of("a", None, "07")
    assert batch.keys["who"].to_lists() == [[7], [8], []]
    assert batch.dense["dense"].tolist() == [[2.5], [9.0], [-1.0]]
    assert batch.labels.tolist() == [1, 0, 1]


def test_a_column_may_be_text_and_a_number_at_once(tmp_path):
    path = write(tmp_path / "rows", "hour\n14102123\n07\n")
    batch = first(path, keys=["hour"], buckets={"of_day": {"column": "hour", "width": 1, "modulo": 100}})
    assert batch.keys["hour"].to_lists() == keys_of("14102123", "07")
    assert batch.keys["of_day"].to_lists() == [[23], [7]]


def test_files_without_a_header_with_other_delimiters_and_other_words_for_nothing(tmp_path):
    path = write(tmp_path / "rows", "a\t1\r\nNA\t2\r\n\\N\t3\r\n")
    options = {"columns": ["site", "n"], "delimiter": "\t", "missing": ["NA", "\\N"], "dense": ["n"]}
    batch = first(path, **options)
    assert batch.keys["site"].to_lists() == keys_of("a", None, None)
    assert batch.dense["dense"].tolist() == [[1], [2], [3]]


def test_quotes_hold_delimiters_and_are_text_where_they_are_not_quotes(tmp_path):
    path = write(tmp_path / "rows", 'site,n\n"a,b",1\n"say ""hi""",2\n5" pipe,3\n')
    assert first(path).keys["site"].to_lists() == keys_of("a,b", 'say "hi"', '5" pipe')
    path = write(tmp_path / "plain", 'site,n\n"a",1\n')
    assert first(path, quoted=False).keys["site"].to_lists() == keys_of('"a"')


def test_bytes_that_are_no_utf8_are_keys_like_others(tmp_path):
    (tmp_path / "rows").write_bytes(b"site\n\xff\xfe\n")
    assert first(str(tmp_path / "rows")).keys["site"].values.tolist() == hash_strings([b"\xff\xfe"]).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_line_is_in_one_split_on_one_rank(tmp_path, world):
    path = write(tmp_path / "rows", "site,n\n" + "".join(f"s{n},{n}\n" for n in range(300)))
    data = CSV(path=path, keys=["n"], integers=["n"], block_bytes=100, shuffle_buffer=20)
    seen = [s for split in ("train", "valid", "test") for s in all_ranks(data, split, world=world, batch_size=9)]
    assert sorted(seen) == [((n,),) for n in range(300)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (HEADER, {"keys": ["sit"]}, "line 1: no column 'sit'"),
        ("site,site\na,b\n", {}, "2 columns are named 'site'"),
        (HEADER, {"columns": ["a", "b"]}, "columns: column 'site', which is not known"),
        (HEADER, {"delimiter": "ab"}, "delimiter is 'ab'; it must be one character"),
        (HEADER, {"integers": ["price"]}, "integers: 'price' of the key columns, which is not known"),
        (HEADER + "1,a,7", {}, "ends in the middle of line 2"),
        (
            HEADER,
            {"buckets": {"level": {"column": "price", "quantiles": 3}}},
            "no training row to compute the quantiles",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        CSV(**{"path": write(tmp_path / "rows", text), "keys": ["site"], **options})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,a,7", "line 3: 3 columns instead of 4"),
        ("1,a,7,x", "line 3: price is 'x', not a number"),
        ("1,a,x,2", "line 3: user is 'x', not an integer of 64 bits"),
        ("1,a,99999999999999999999,2", "line 3: user is '99999999999999999999', not an integer of 64 bits"),
        ("2,a,7,2", "line 3: click is 2, not 0 or 1"),
        (",a,7,2", "line 3: click is nan, not 0 or 1"),
        ('1,"a,7,2', "line 3: .* has a quote that does not end in its line"),
        ('1,"a\nb",7,2', "line 3: .* has a quote that does not end in its line"),
        ("", "line 3: 1 columns instead of 4"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "rows", f"{HEADER}1,a,7,2\n{line}\n1,a,7,2\n")
    data = CSV(
        path=path, valid=path, keys=["site", "user"], integers=["user"], dense=["price"], label="click", fill=0.0
    )
    with pytest.raises(ValueError, match=message):
        read_samples(data, "valid", batch_size=2)


@pytest.mark.parametrize(("end", "line"), [("\n", 1), ("\r\n", 1), ("\n", 3), ("\r\n", 3)])
def test_an_empty_line_is_named_also_where_every_field_may_be_empty(tmp_path, end, line):
    lines = ["a,1", "b,2", "c,3"]
    lines.insert(line - 1, "")
    path = write(tmp_path / "rows", end.join(lines) + end)
    with pytest.raises(ValueError, match=f"line {line}: 1 columns instead of 2"):
        first(path, columns=["site", "n"], keys=["site", "n"], missing=["NA"])


def test_a_carriage_return_inside_a_line_is_named(tmp_path):
    path = write(tmp_path / "rows", "site,n\na,1\nb\rc,2\n")
    with pytest.raises(ValueError, match=r"line 3: .* has a carriage return in it"):
        first(path)


@pytest.mark.skipif(not REAL.exists(), reason="no Criteo rows here")
def test_criteo_rows_read_as_text_are_those_of_the_data_set_for_them():
    names = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    numbers, categories = names[1:14], names[14:]
    how = {"dense": numbers, "log1p": numbers, "fill": 0.0, "label": "label"}
    ours = CSV(path=str(REAL), columns=names, delimiter="\t", keys=categories, **how)
    for batch, known in zip(
        read(ours, "valid", batch_size=200), read(Criteo(path=str(REAL)), "valid", batch_size=200), strict=True
    ):
        torch.testing.assert_close(batch.dense["dense"], known.dense["dense"], rtol=1e-6, atol=0)
        assert torch.equal(batch.labels, known.labels)
        for name in categories:
            texts = [[f"{key:08x}" for key in keys] for keys in known.keys[name].to_lists()]
            assert batch.keys[name].to_lists() == [hash_strings(keys).tolist() for keys in texts]

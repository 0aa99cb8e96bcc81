"""Whatever stands in a config or a data file, the answer is data or an error that says what to do: no other exception."""

from __future__ import annotations

import contextlib
import itertools
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe import config
from nestpipe.data import Criteo, KuaiRand, KuaiRandSequences, MovieLens, Parquet, Sequences

EXAMPLES = [tomllib.loads(path.read_text()) for path in sorted(Path(__file__).parents[2].glob("examples/*.toml"))]
CAREFULLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)

plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=12))
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def places(tree: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in tree.items():
        found.append((*above, name))
        if isinstance(value, dict):
            found += places(value, (*above, name))
    return found


def changed(tree: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy = dict(tree)
    copy[place[0]] = changed(tree[place[0]], place[1:], value) if len(place) > 1 else value
    return copy


@CAREFULLY
@given(data=st.data())
def test_a_config_with_anything_in_the_place_of_an_entry_is_read_or_refused(data: st.DataObject) -> None:
    example = data.draw(st.sampled_from(EXAMPLES))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(example)))
        example = changed(example, place, data.draw(values))
    with contextlib.suppress(ValueError):
        config.parse(example)


@CAREFULLY
@given(text=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_as_a_config_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"some\.toml is not valid TOML|^config: "):
        config.read(path)


ROWS = {
    Sequences: b"1 2 3 4\n5 6 7 8\n",
    MovieLens: b"userId,movieId,rating,timestamp\n1,2,3.5,100\n1,3,4.0,101\n1,4,2.0,102\n1,5,2.0,103\n",
    Criteo: b"\t".join([b"1", *[b"3"] * 13, *[b"0a1b2c3d"] * 26]) + b"\n",
    KuaiRand: b"user_id,video_id,date,hourmin,time_ms,is_click\n1,2,20220408,1200,1649390400000,1\n",
    KuaiRandSequences: b"user_id,video_id,time_ms,is_click\n1,2,10,1\n1,3,11,1\n1,4,12,1\n1,5,13,0\n",
}


def read_some(make: Any) -> None:
    with contextlib.suppress(ValueError):
        data = make()
        for split in ("train", "valid"):
            batches = data.batches(split, batch_size=2, rank=0, world=1, seed=0)
            for batch in itertools.islice(batches, 4):
                assert batch.size


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.__name__)
@CAREFULLY
@given(data=st.data())
def test_a_data_file_with_bytes_changed_cut_or_added_is_read_or_refused(tmp_path: Path, kind: Any, data: Any) -> None:
    text = bytearray(ROWS[kind])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        match data.draw(st.sampled_from(["put", "cut", "add"])):
            case "put":
                text[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del text[at:]
            case "add":
                text[at:at] = data.draw(st.binary(max_size=30))
    path = tmp_path / "data.txt"
    path.write_bytes(bytes(text))
    read_some(lambda: kind(path=str(path)))


@CAREFULLY
@given(data=st.data())
def test_a_parquet_file_with_bytes_changed_or_cut_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"key": [1, 2, 3, 4], "label": [0, 1, 0, 1]}), path)
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text))
    read_some(lambda: Parquet(path=str(path), keys=["key"], label="label"))

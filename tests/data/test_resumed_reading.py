"""A run that goes on reads nothing of what it passes over, where that can be known; what follows is the same to the bit."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data import Criteo, Parquet
from nestpipe.data import lines as lines_of
from nestpipe.data.dataset import skip
from nestpipe.data.files import find_files
from nestpipe.data.parquet import RowGroup, _recut
from tests.data.data_samples import assert_same

HOW = {"batch_size": 10, "seed": 3}


def lines(first: int, count: int) -> str:
    rows = range(first, first + count)
    return "".join("\t".join(["0", *["7"] * 13, *["0a"] * 25, f"{n:x}"]) + "\n" for n in rows)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for day in range(4):
        (tmp_path / f"day-{day}.tsv").write_text(lines(1000 * day, 300))
    return tmp_path


def criteo(folder: Path) -> Criteo:
    data = Criteo(path=str(folder / "day-*.tsv"), shuffle_buffer=100, block_bytes=2000)
    data.remember(folder / "lines" / "0.jsonl")
    return data


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of text, by every open of a file."""
    counts: list[int] = []
    open_input = lines_of.open_input

    class Counted:
        def __init__(self, file) -> None:
            self._file = file

        def __getattr__(self, name: str):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def read(self, size: int = -1) -> bytes:
            return self._counted(self._file.read(size))

        def readline(self) -> bytes:
            return self._counted(self._file.readline())

        def _counted(self, text: bytes) -> bytes:
            counts.append(len(text))
            return text

    monkeypatch.setattr(lines_of, "open_input", lambda path, **how: Counted(open_input(path, **how)))
    return counts


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_text_is_read_from_the_offset_where_the_run_goes_on(text: Path, bytes_read: list[int], rank, world) -> None:
    how = {**HOW, "rank": rank, "world": world}
    whole = list(criteo(text).batches("train", **how))
    in_all = sum(bytes_read)
    passed = len(whole) - 12 // world
    del bytes_read[:]
    batches = criteo(text).batches("train", **how)
    assert skip(batches, passed) == passed
    assert not bytes_read
    for ours, theirs in zip(batches, whole[passed:], strict=True):
        assert_same(ours, theirs)
    assert 0 < sum(bytes_read) < in_all / 2


def test_text_that_was_read_in_part_is_known_in_part(text: Path, bytes_read: list[int]) -> None:
    how = {**HOW, "rank": 0, "world": 1}
    whole = list(Criteo(path=str(text / "day-*.tsv"), shuffle_buffer=100, block_bytes=2000).batches("train", **how))
    begun = criteo(text).batches("train", **how)
    for _ in range(30):
        next(begun)
    with (text / "lines" / "0.jsonl").open("a") as file:
        file.write("[17, 20")  # the process was killed while it wrote
    del bytes_read[:]
    batches = criteo(text).batches("train", **how)
    skip(batches, 25)
    assert not bytes_read
    for ours, theirs in zip(batches, whole[25:], strict=True):
        assert_same(ours, theirs)
    again = criteo(text).batches("train", **how)
    del bytes_read[:]
    assert skip(again, len(whole)) == len(whole) and not bytes_read, "what was learned behind the torn line is kept too"


def test_in_a_later_epoch_a_worker_reads_only_its_own_lines(text: Path, bytes_read: list[int]) -> None:
    data = criteo(text)
    how = {**HOW, "rank": 1, "world": 4}
    first = [list(data.batches("train", **how, epoch=0)), sum(bytes_read)][1]
    del bytes_read[:]
    list(data.batches("train", **how, epoch=1))
    assert sum(bytes_read) < first / 3


def test_a_file_that_has_changed_since_is_refused(text: Path) -> None:
    how = {**HOW, "rank": 0, "world": 1}
    list(criteo(text).batches("train", **how))
    before = (text / "day-1.tsv").read_bytes()
    (text / "day-1.tsv").write_bytes(before.replace(b"\n", b"\t", 1))
    with pytest.raises(ValueError, match=r"day-1.tsv has changed since it was read for this run"):
        list(criteo(text).batches("train", **how))


def test_what_is_known_of_lines_travels_to_a_reader_process_by_its_file(text: Path, bytes_read: list[int]) -> None:
    how = {**HOW, "rank": 0, "world": 1}
    count = sum(1 for _ in criteo(text).batches("train", **how))
    del bytes_read[:]
    sent = pickle.loads(pickle.dumps(criteo(text)))
    assert skip(sent.batches("train", **how), count) == count and not bytes_read


def test_text_files_come_in_an_order_of_seed_and_epoch_on_every_rank(text: Path) -> None:
    data = Criteo(path=str(text / "day-*.tsv"), shuffle_buffer=1, block_bytes=1 << 20)

    def order(**how: int) -> list[int]:
        batches = data.batches("train", batch_size=1000, **how)
        keys = [key for batch in batches for key in batch.keys["C26"].values.tolist()]
        return list(dict.fromkeys(key // 1000 for key in keys))

    orders = [tuple(order(rank=0, world=1, seed=3, epoch=epoch)) for epoch in range(6)]
    assert len(set(orders)) > 1 and all(sorted(days) == [0, 1, 2, 3] for days in orders)
    for epoch, days in enumerate(orders):
        assert tuple(order(rank=0, world=1, seed=3, epoch=epoch)) == days
        shares = [order(rank=rank, world=2, seed=3, epoch=epoch) for rank in range(2)]
        assert shares == [list(days[0::2]), list(days[1::2])], "a block for each file, dealt in the same order"


@pytest.mark.parametrize("world", [1, 2])
def test_parquet_begins_with_the_row_group_in_the_middle(tmp_path: Path, monkeypatch, world: int) -> None:
    for part in range(3):  # 100 row groups each, of which 16 of 20 rows are training rows
        table = pa.table({"user": list(range(2000 * part, 2000 * part + 2000))})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=20)
    read: list[tuple[str, int]] = []
    from_front = RowGroup._from_front

    def counted(group: RowGroup):
        read.append((group._file, group._number))
        return from_front(group)

    data = Parquet(path=str(tmp_path / "*.parquet"), keys=["user"], shuffle_buffer=40, rows_per_read=8)
    monkeypatch.setattr(RowGroup, "_from_front", counted)
    how = {**HOW, "rank": 0, "world": world}
    whole = list(data.batches("train", **how))
    assert len(read) == len(set(read)) == 300 // world
    read.clear()
    batches, passed = data.batches("train", **how), len(whole) - 10
    assert skip(batches, passed) == passed and not read
    for ours, theirs in zip(batches, whole[passed:], strict=True):
        assert_same(ours, theirs)
    # 100 rows lie in 7 groups or more; the buffer holds rows of 3 others, and a few that have stayed in it for long.
    assert 7 <= len(set(read)) <= 20
    assert len(read) <= 2 * len(set(read)), (
        "some were in the buffer when it began, and are read again for their later rows"
    )


def test_a_row_group_that_arrow_gives_in_smaller_parts_is_put_together() -> None:
    whole = pa.record_batch({"user": list(range(23))})
    for sizes in ([5] * 5, [10, 10, 3], [1, 9, 4, 9], [3, 10, 10]):
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        parts = [whole.slice(start, size) for start, size in zip(starts, sizes, strict=True) if start < 23]
        cut = [part.column("user").to_pylist() for part in _recut(iter(parts), 10)]
        assert [len(part) for part in cut] == [10, 10, 3] and [n for part in cut for n in part] == list(range(23)), (
            sizes
        )


def test_a_path_of_this_machine_may_be_a_url(text: Path) -> None:
    assert find_files(f"file://{text}/day-*.tsv") == [str(text / f"day-{day}.tsv") for day in range(4)]

"""Streams of text: blocks of lines, the shuffle buffer, the held-out rows, Criteo and KuaiRand."""

import gzip
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.batch import Batch, Jagged
from nestpipe.data.dataset import generator
from nestpipe.data.files import SplitFiles, find_files, line_blocks
from nestpipe.data.stream import Stream


def pieces(sizes):
    """Pieces of numbered rows; row n has n % 3 keys."""
    first = 0
    for size in sizes:
        rows = torch.arange(first, first + size)
        lists = [[int(row)] * (int(row) % 3) for row in rows]
        yield Batch({"key": Jagged.from_lists(lists)}, {"row": rows[:, None].float()}, rows)
        first += size


@given(sizes=st.lists(st.integers(0, 9)), batch_size=st.integers(1, 12), shuffle_buffer=st.integers(0, 20))
def test_batches_hold_every_row_once_and_whole(sizes, batch_size, shuffle_buffer):
    options = {"batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    batches = list(Stream(pieces(sizes), **options, generator=generator(0)))
    rows = [row for batch in batches for row in batch.labels.tolist()]
    assert sorted(rows) == list(range(sum(sizes)))
    assert [batch.size for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        assert batch.keys["key"].to_lists() == [[row] * (row % 3) for row in batch.labels.tolist()]
        assert batch.dense["row"][:, 0].tolist() == batch.labels.tolist()
    if not shuffle_buffer:
        assert rows == list(range(sum(sizes)))


def test_the_shuffle_buffer_holds_no_more_rows_than_it_is_told():
    taken = 0

    def counted():
        nonlocal taken
        for piece in pieces([5] * 100_000):
            taken += 5
            yield piece

    batches = Stream(counted(), batch_size=10, shuffle_buffer=40, generator=generator(0))
    for given_out in range(10, 300, 10):
        next(batches)
        assert taken <= given_out + 40 + 10


def test_the_shuffle_moves_rows_far_and_depends_on_the_generator_alone():
    def order(seed):
        batches = Stream(pieces([10] * 100), batch_size=50, shuffle_buffer=200, generator=generator(seed))
        return [row for batch in batches for row in batch.labels.tolist()]

    assert order(1) == order(1) != order(2)
    assert np.abs(np.array(order(1)) - np.arange(1000)).mean() > 50


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"")), max_size=40),
    block_bytes=st.integers(1, 50),
    world=st.integers(1, 4),
)
def test_each_line_is_in_one_block_of_one_rank_and_has_its_number(tmp_path_factory, lines, block_bytes, world):
    path = tmp_path_factory.mktemp("lines") / "text"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    by_number = {}
    for rank in range(world):
        for block in line_blocks([str(path)], rank=rank, world=world, block_bytes=block_bytes):
            for number, line in enumerate(block.text.split(b"\n")[:-1], start=block.first_line):
                assert number not in by_number
                by_number[number] = line
    assert [by_number[number] for number in sorted(by_number)] == lines
    assert sorted(by_number) == list(range(1, len(lines) + 1))


def test_blocks_are_dealt_out_through_all_files(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_text(f"head\n{name}\n")
    files = find_files(str(tmp_path / "*"))
    texts = [[block.text for block in line_blocks(files, rank=r, world=2, skip_lines=1)] for r in range(2)]
    assert texts == [[b"a\n", b"c\n"], [b"b\n", b"d\n"]]


def test_a_damaged_compressed_file_is_named(tmp_path):
    path = tmp_path / "rows.gz"
    path.write_bytes(gzip.compress(b"some text\n" * 10_000)[:-20])
    with pytest.raises(ValueError, match=r"rows\.gz is damaged or cut off"):
        list(line_blocks([str(path)]))


def test_a_compressed_file_that_ends_in_the_middle_of_a_line_is_named(tmp_path):
    path = tmp_path / "rows.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\nthr"))
    with pytest.raises(ValueError, match="ends in the middle of line 3, 'thr'"):
        list(line_blocks([str(path)]))


@pytest.mark.parametrize("own", [(None, None), (["v"], None), (None, ["t"]), (["v"], ["t"])])
def test_each_row_of_the_training_files_is_in_one_split(own):
    files = SplitFiles(train=["a"], valid=own[0], test=own[1])
    split_of_row: Counter[int] = Counter()
    for split in ("train", "valid", "test"):
        mask = files.mask(split, first=100, count=5_000)
        if files.files(split) == ["a"]:
            split_of_row.update(np.flatnonzero(mask).tolist())
            assert mask.mean() == pytest.approx(0.1 if split != "train" else 1 - 0.1 * own.count(None), abs=0.02)
        else:
            assert mask.all()
    assert set(split_of_row.values()) == {1}
    assert len(split_of_row) == 5_000


def test_the_split_of_a_row_does_not_depend_on_its_block():
    files = SplitFiles(train=["a"], valid=None, test=None)
    whole = files.mask("valid", first=1, count=100)
    assert np.array_equal(files.mask("valid", first=41, count=60), whole[40:])

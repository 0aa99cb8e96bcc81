"""Batches that a resumed run passes over: what comes after them is what would have come."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe import Batch, Jagged
from nestpipe.config import TrainSection
from nestpipe.data import DATASETS, criteo
from nestpipe.data.dataset import generator, skip
from nestpipe.data.stream import Stream, Unparsed
from nestpipe.running.feeding import epochs_of
from tests.data.data_samples import assert_same, same
from tests.data.test_files import pieces


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_what_follows_is_the_same_as_if_every_batch_had_been_taken(data_sets, name, split):
    data = data_sets[name]
    for rank, epoch in itertools.product(range(2), range(2)):
        how = {"batch_size": 3, "rank": rank, "world": 2, "seed": 3, "epoch": epoch}
        whole = list(data.batches(split, **how))
        assert len(whole) > 1
        for count in (0, 1, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 5):
            batches = data.batches(split, **how)
            assert skip(batches, count) == min(count, len(whole))
            rest = list(batches)
            assert len(rest) == len(whole[count:])
            for ours, theirs in zip(rest, whole[count:], strict=True):
                assert_same(ours, theirs)


@given(
    sizes=st.lists(st.integers(0, 9)),
    batch_size=st.integers(1, 12),
    shuffle_buffer=st.integers(0, 20),
    count=st.integers(0, 12),
)
def test_streams_of_pieces_of_any_size(sizes, batch_size, shuffle_buffer, count):
    def stream():
        unparsed = (Unparsed(piece.size, lambda piece=piece: piece) for piece in pieces(sizes))
        return Stream(unparsed, batch_size=batch_size, shuffle_buffer=shuffle_buffer, generator=generator(0))

    whole, passed = list(stream()), stream()
    assert skip(passed, count) == min(count, len(whole))
    rest = list(passed)
    assert len(rest) == len(whole[count:]) and all(map(same, rest, whole[count:]))


def test_batches_without_a_way_to_skip_are_taken_one_by_one():
    numbers = iter(range(5))
    assert skip(numbers, 3) == 3 and list(numbers) == [3, 4]
    assert skip(numbers, 3) == 0


class Listed:
    """A data set of one's own that gives a list, three batches an epoch."""

    features = ("key",)

    def batches(self, split, *, batch_size, rank, world, seed, epoch=0):
        return [Batch({"key": Jagged.from_lists([[10 * epoch + number]])}) for number in range(3)]


@pytest.mark.parametrize("passed", range(8))
def test_a_resumed_run_goes_on_in_the_middle_of_a_list_and_of_a_later_epoch(passed):
    settings = TrainSection(batch_size=1, epochs=2)
    keys = [batch.keys["key"].values.item() for batch in epochs_of(Listed(), settings, 0, 1, passed)]
    assert keys == [0, 1, 2, 10, 11, 12][passed:]


def test_what_is_passed_over_is_not_parsed(data_sets, monkeypatch):
    parse, parsed = criteo.parse, []

    def counted(block, *, kept):
        parsed.append(block.first_line)
        return parse(block, kept=kept)

    monkeypatch.setattr(criteo, "parse", counted)
    how = {"batch_size": 7, "rank": 0, "world": 1, "seed": 3}
    everything = sum(1 for _ in data_sets["criteo"].batches("train", **how))
    in_all = len(parsed)
    parsed.clear()
    batches = data_sets["criteo"].batches("train", **how)
    assert skip(batches, everything - 1) == everything - 1 and not parsed
    assert sum(1 for _ in batches) == 1 and 0 < len(parsed) < in_all // 2


def test_after_a_skip_each_piece_is_parsed_a_few_times_and_not_once_a_batch(data_sets, monkeypatch):
    parse, parsed = criteo.parse, Counter()

    def counted(block, *, kept):
        parsed[block.first_line] += 1
        return parse(block, kept=kept)

    monkeypatch.setattr(criteo, "parse", counted)
    batches = data_sets["criteo"].batches("train", batch_size=1, rank=0, world=1, seed=3)
    assert skip(batches, 40) == 40
    rest = sum(1 for _ in batches)
    assert rest > 100 and max(parsed.values()) <= 3, (
        "the batches of a buffer, what stays in it, and what is left of a batch"
    )


def test_synthetic_batches_are_passed_over_at_once(data_sets):
    batches = DATASETS["synthetic_clicks"](num_samples=10**12).batches("train", batch_size=1, rank=0, world=1, seed=0)
    made: list[int] = []
    make = batches._make
    batches._make = lambda number: (made.append(number), make(number))[1]
    assert skip(batches, 10**11) == 10**11 and next(batches).size == 1
    assert made == [10**11]

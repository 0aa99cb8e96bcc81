from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels.keys import Deduplicator
from nestpipe.kernels.window import count_by_part, distinct_in_each, first_and_last_use, places_by_part
from tests.kernels.cases import few

micro_batches = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=6)


def deduplicated(keys: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct keys, which one each key is, and where each micro-batch ends."""
    flat = np.array([key for of_micro_batch in keys for key in of_micro_batch], np.int64)
    unique, inverse = np.empty(len(flat), np.int64), np.empty(len(flat), np.int32)
    unique = unique[: Deduplicator()(flat, unique, inverse)]
    return unique, inverse, np.cumsum([len(of_micro_batch) for of_micro_batch in keys])


@given(micro_batches)
@few
def test_first_and_last_use_are_the_first_and_the_last_micro_batch_with_the_key(keys: list[list[int]]) -> None:
    unique, inverse, ends = deduplicated(keys)
    num_new, last = np.full(len(keys), 99), np.full(len(unique), 99, np.uint8)
    first_and_last_use(inverse, ends, num_new, last)
    users = [[m for m, of_micro_batch in enumerate(keys) if key in of_micro_batch] for key in unique.tolist()]
    assert last.tolist() == [ms[-1] for ms in users]
    assert np.repeat(np.arange(len(keys)), num_new).tolist() == [ms[0] for ms in users]


@given(micro_batches)
@few
def test_distinct_in_each_deduplicates_every_micro_batch_alone(keys: list[list[int]]) -> None:
    unique, inverse, ends = deduplicated(keys)
    num_new, origin = np.full(len(keys), 99), np.full(len(inverse), -9, np.int32)
    n = distinct_in_each(inverse, ends, num_new, np.empty(len(unique), np.int32), origin)
    expected = [list(dict.fromkeys(of_micro_batch)) for of_micro_batch in keys]
    assert num_new.tolist() == [len(of_micro_batch) for of_micro_batch in expected]
    assert unique[origin[:n]].tolist() == [key for of_micro_batch in expected for key in of_micro_batch]
    assert unique[origin[inverse]].tolist() == [key for of_micro_batch in keys for key in of_micro_batch]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=5)), max_size=6))
@few
def test_entries_go_to_the_next_place_of_their_part_and_worker(segments: list[tuple[int, list[int]]]) -> None:
    parts = np.array([part for _, entries in segments for part in entries], np.uint8)
    counts, workers = (
        np.array([len(entries) for _, entries in segments], np.int64),
        np.array([w for w, _ in segments], int),
    )
    table = np.full((4, 3), 99)
    count_by_part(parts, counts, workers, table)
    pairs = [(part, w) for w, entries in segments for part in entries]
    assert table.tolist() == [[pairs.count((part, w)) for w in range(3)] for part in range(4)]
    start = np.arange(12).reshape(4, 3) * 100
    places = np.full(len(parts), -9, np.int32)
    places_by_part(parts, counts, workers, start.copy(), places)
    assert places.tolist() == [start[pair] + pairs[:e].count(pair) for e, pair in enumerate(pairs)]

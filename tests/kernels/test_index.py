from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import reference
from nestpipe.kernels.index import EMPTY, HashIndex, fewest_slots, find, place
from tests.kernels.cases import EXTREMES, few, int64, key_with_hash

# Keys whose hashes end in many ones live in the last slot of a table of any size, so that their run wraps around; a few
# live just before and just after, and get pushed along.
LAST = [key_with_hash((i << 20) | 0xFFFFF) for i in range(12)]
BEFORE = [key_with_hash((i << 20) | 0xFFFFE) for i in range(6)]
FIRST = [key_with_hash((i << 20) | 0x00000) for i in range(6)]
POOL = LAST + BEFORE + FIRST + [key for key in EXTREMES if key != 0]  # key 0 is in FIRST: its hash is 0


class Checked:
    """A HashIndex and its reference, driven together."""

    def __init__(self, capacity: int = 4) -> None:
        self.index, self.reference = HashIndex(capacity), reference.Index()
        self.next_position = 0

    def insert(self, keys: list[int]) -> None:
        absent = [key for key in dict.fromkeys(keys) if key not in self.reference.positions]
        # As the store does it: positions of the keys that are there stay as they are, `missing` names the others.
        everything = int64(absent + keys)
        positions = np.full(len(everything), 10**9, np.int64)
        positions[: len(absent)] = np.arange(self.next_position, self.next_position + len(absent))
        self.next_position += len(absent)
        self.index.insert(everything, positions, np.arange(len(absent)))
        self.reference.insert(torch.tensor(absent), torch.from_numpy(positions[: len(absent)]))

    def delete(self, keys: list[int]) -> None:
        before = len(self.index)
        positions = self.index.delete(int64(keys))
        expected = self.reference.delete(torch.tensor(keys, dtype=torch.int64))
        assert positions.tolist() == expected.tolist()
        assert before - len(self.index) == int((expected >= 0).sum())

    def assign(self, keys: list[int]) -> None:
        present = [key for key in keys if key in self.reference.positions]
        positions = np.arange(self.next_position, self.next_position + len(present))
        self.next_position += len(present)
        self.index.assign(int64(present), positions)
        self.reference.assign(torch.tensor(present, dtype=torch.int64), torch.from_numpy(positions))

    def check(self, keys: list[int]) -> None:
        out = np.full(len(keys), -9, np.int64)
        self.index.find(int64(keys), out)
        assert out.tolist() == self.reference.find(torch.tensor(keys, dtype=torch.int64)).tolist()
        assert len(self.index) == len(self.reference)
        all_keys, positions = self.index.items()
        assert dict(zip(all_keys.tolist(), positions.tolist(), strict=True)) == self.reference.positions


subsets = st.lists(st.sampled_from(POOL), max_size=12)
programs = st.lists(st.tuples(st.sampled_from(["insert", "insert", "delete", "assign"]), subsets), max_size=25)


@given(programs)
@few
def test_any_sequence_of_insert_delete_and_assign_leaves_what_a_dict_would_hold(program) -> None:
    checked = Checked()
    for operation, keys in program:
        getattr(checked, operation)(keys)
        checked.check(POOL)


@pytest.mark.parametrize("order", [1, -1])
def test_deleting_from_a_run_that_wraps_around_the_end_keeps_the_rest_reachable(order: int) -> None:
    checked = Checked(capacity=16)  # 32 slots: no growth, so that all these keys stand in one run
    keys = BEFORE[:4] + LAST + FIRST[:4]
    checked.insert(keys)
    for key in keys[::order]:
        checked.delete([key])
        checked.check(keys)


def test_deleting_leaves_no_tombstones() -> None:
    checked = Checked(capacity=16)
    for start in range(len(POOL) - 8):
        checked.insert(POOL[start : start + 8])
        checked.delete(POOL[start : start + 8])
    assert len(checked.index) == 0
    assert (checked.index._slots[:, 1] == EMPTY).all()


def test_an_empty_index_finds_and_deletes_nothing() -> None:
    checked = Checked()
    checked.check(EXTREMES)
    checked.delete(EXTREMES)
    checked.check([])
    checked.insert([])
    checked.check(EXTREMES)


def test_deleting_a_key_twice_in_one_call_finds_it_once() -> None:
    checked = Checked()
    checked.insert([5, 6])
    checked.delete([5, 5])
    checked.check([5, 6])


def test_growth_keeps_every_position() -> None:
    checked = Checked()
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**62), 2**62, 20_000))
    rng.shuffle(keys)
    sizes = set()
    for part in np.array_split(keys, 23):
        checked.insert(part.tolist())
        sizes.add(checked.index.nbytes)
        assert len(checked.index) * 3 <= len(checked.index._slots) * 2
    assert len(sizes) >= 5
    checked.check([*keys.tolist(), *EXTREMES])


def test_growth_keeps_a_run_of_collisions() -> None:
    checked = Checked()
    colliding = [key_with_hash((i << 24) | 0xFFFFFF) for i in range(300)]
    for start in range(0, 300, 20):
        checked.insert(colliding[start : start + 20])
        checked.delete(colliding[start : start + 5])
    checked.check(colliding)


def test_a_large_random_history_equals_a_dict() -> None:
    checked, rng = Checked(), np.random.default_rng(1)
    for _ in range(150):
        checked.insert(rng.integers(0, 3000, 60).tolist())
        checked.delete(rng.integers(0, 3000, 60).tolist())
    checked.check(list(range(3000)))


@given(st.sets(st.sampled_from(POOL), max_size=12), subsets)
@few
def test_slots_of_the_callers_own_are_found_in_as_a_dict_would(keys: set[int], asked: list[int]) -> None:
    slots = np.full((fewest_slots(len(keys)), 2), EMPTY, np.int64)
    assert len(keys) * 3 <= len(slots) * 2
    place(slots, int64(list(keys)), 5)
    expected = {key: 5 + number for number, key in enumerate(keys)}
    assert find(slots, int64(asked)).tolist() == [expected.get(key, EMPTY) for key in asked]


def test_a_key_that_is_placed_twice_is_named() -> None:
    slots = np.full((16, 2), EMPTY, np.int64)
    place(slots, int64([3, -8]), 7, step=0)
    assert find(slots, int64([-8, 3])).tolist() == [7, 7]
    with pytest.raises(ValueError, match="key -8 is there twice"):
        place(slots, int64([1, -8]), 0)

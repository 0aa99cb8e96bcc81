from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.kernels import compact
from nestpipe.kernels.compact import CompactIndex
from nestpipe.store.chunks import Chunks
from tests.kernels.cases import EXTREMES, any_key, int64, key_with_hash

# Keys that all want the same slot, the last one, in every small table: long runs that wrap around.
CROWD = [key_with_hash((i << 40) | 0xFFFF) for i in range(12)]


class Model:
    def __init__(self) -> None:
        self.index, self.memory = CompactIndex(4), Chunks(2, half=False)
        self.position: dict[int, int] = {}
        self.free = list(range(200))

    def insert(self, keys: list[int]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.position]
        positions = [self.free.pop(0) for _ in new]
        self.memory.reserve(max([0, *positions]) + 1)
        self.index.key_rows = self.memory.raw
        self.index.insert(int64(new), int64(positions), np.arange(len(new)))
        self.position.update(zip(new, positions, strict=True))

    def delete(self, keys: list[int]) -> None:
        distinct = list(dict.fromkeys(keys))
        there = [self.position.pop(key, -1) for key in distinct]
        assert self.index.delete(int64(distinct)).tolist() == there
        assert len(self.index) == len(self.position)
        self.free += [p for p in there if p >= 0]

    def check(self, keys: list[int]) -> None:
        out = np.empty(len(keys), np.int64)
        self.index.find(int64(keys), out)
        assert out.tolist() == [self.position.get(key, -1) for key in keys]
        assert len(self.index) == len(self.position)
        by_position = sorted((p, key) for key, p in self.position.items())
        for size in (3, 1 << 16):
            blocks = list(self.index.blocks(size))
            assert [
                (p, key) for keys, places in blocks for key, p in zip(keys.tolist(), places.tolist(), strict=True)
            ] == (by_position)
        assert self.index.key_at(int64([p for p, _ in by_position])).tolist() == [key for _, key in by_position]


some_keys = st.lists(st.one_of(st.sampled_from(CROWD), any_key), max_size=20)


@given(st.lists(st.tuples(st.booleans(), some_keys), max_size=10))
@settings(max_examples=80, deadline=None)
def test_any_program_leaves_what_a_dict_holds(program: list[tuple[bool, list[int]]]) -> None:
    model = Model()
    for inserts, keys in program:
        (model.insert if inserts else model.delete)(keys)
        model.check([*EXTREMES, *CROWD, *keys])


def test_growth_keeps_every_key() -> None:
    model = Model()
    model.free = list(range(50_000))
    keys = np.random.default_rng(0).permutation(40_000) - 20_000
    for part in np.array_split(keys, 7):
        model.insert(part.tolist())
    model.delete(keys[::3].tolist())
    model.check(keys.tolist())
    assert model.index.nbytes <= 4 * 4 * 40_000


@pytest.mark.parametrize("size", [0, 1000, 2730, 2731])
def test_nbytes_with_foretells_the_slots_old_and_new(size: int) -> None:
    model = Model()
    model.free = list(range(10_000))
    model.insert(list(range(size)))
    for more in (1, 5000):
        before, foretold = model.index.nbytes, model.index.nbytes_with(more)
        model.insert(list(range(10**6, 10**6 + more)))
        after = model.index.nbytes
        assert foretold == (before if after == before else before + after)
        model.delete(list(range(10**6, 10**6 + more)))


def test_a_position_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "MOST_POSITIONS", 5)
    model = Model()
    model.insert([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="use more workers"):
        model.insert([6])

"""Scratch memory: handed out again, and fresh where it would not fit."""

from __future__ import annotations

import numpy as np

from nestpipe.arena import Arena, as_tensor


def test_a_name_has_the_same_memory_again_and_other_names_have_others() -> None:
    arena = Arena()
    first, other = arena.take("a", (4, 25), np.float32), arena.take("b", 100, np.float32)
    assert first.shape == (4, 25) and not np.shares_memory(first, other)
    smaller, larger = arena.take("a", 60, np.float32), arena.take("a", 110, np.float32)
    assert np.shares_memory(first, smaller) and np.shares_memory(first, larger), (
        "batches of about one size settle at once"
    )
    assert not np.shares_memory(first, arena.take("a", 1000, np.float32))


def test_another_type_has_memory_of_its_own() -> None:
    arena = Arena()
    assert not np.shares_memory(arena.take("a", 8, np.float32), arena.take("a", 8, np.int32))
    assert arena.take("a", (0, 3), np.int32).shape == (0, 3)


def test_a_tensor_is_the_same_memory() -> None:
    array = np.zeros(3, np.float32)
    as_tensor(array)[1] = 5
    assert array.tolist() == [0, 5, 0]

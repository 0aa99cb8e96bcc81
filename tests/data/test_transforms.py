import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.transforms import Bucket, crossed, log1p
from tests.kernels.test_strings import xxh64


def keys(entries, numbers):
    bucket = Bucket.declared("age", entries)
    values, present = bucket.keys(np.array(numbers, float))
    out = iter(values.tolist())
    return [next(out) if there else None for there in present]


def test_boundaries_cut_numbers_and_a_boundary_belongs_to_what_is_above_it():
    assert keys({"boundaries": [18, 65.5]}, [-1, 17.9, 18, 65, 65.5, math.inf, math.nan]) == [0, 0, 1, 1, 2, 2, None]


def test_logarithms_count_powers_of_their_base_exactly():
    assert keys({"log": 10}, [-5, 0, 0.99, 1, 9.99, 10, 999, 1000, 1e15]) == [0, 0, 0, 1, 1, 2, 3, 4, 16]
    assert keys({"log": 2.0, "shift": 1}, [0, 1, 3, 7, 2.0**40 - 1]) == [1, 2, 3, 4, 41]
    assert keys({"log": 2.0}, [math.nan, math.inf]) == [None, keys({"log": 2.0}, [1e308])[0]]


def test_widths_make_cycles_of_time():
    assert keys({"width": 1, "modulo": 100}, [14102123, 14102200]) == [23, 0]
    assert keys({"width": 3600, "modulo": 24}, [3599, 3600, 86_400, -1]) == [0, 1, 0, 23]
    assert keys({"width": 0.5}, [-0.1, 0.5, math.nan, math.inf]) == [-1, 1, None, None]
    with pytest.raises(ValueError, match="beyond 64 bits; give a greater width"):
        keys({"width": 1e-10}, [1e10])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(2, 12))
def test_quantiles_are_boundaries_among_the_numbers_that_part_them_evenly(numbers, count):
    numbers = np.array(numbers, float)
    bucket = Bucket.declared("age", {"quantiles": count}).fitted(np.append(numbers, math.nan))
    assert set(bucket.boundaries) <= set(numbers)
    assert Bucket.declared("age", bucket.entries()) == bucket, "what is saved is what is read"
    sizes = np.bincount(bucket.keys(numbers)[0], minlength=count)
    assert len(sizes) == count
    most_frequent = np.unique(numbers, return_counts=True)[1].max()
    assert sizes.max() <= math.ceil(len(numbers) / count) + most_frequent


def test_quantiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match="column 'age' has no number in the first 100,000 training rows"):
        Bucket.declared("age", {"quantiles": 4}).fitted(np.array([math.nan]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "buckets.age has none of boundaries, quantiles, log, width; give one"),
        ({"log": 2, "width": 3}, "has log and width"),
        ({"quantile": 3}, "buckets.age.quantile, .*did you mean 'quantiles'"),
        ({"quantiles": 1}, "buckets.age.quantiles must be at least 2"),
        ({"boundaries": [1, 1]}, "boundaries must ascend"),
        ({"boundaries": []}, "must not be empty"),
        ({"width": 0}, "width must be greater than 0"),
        ({"log": 1.0}, "log must be at least 1.01"),
        ({"log": 2, "modulo": 3}, "modulo goes with width"),
        ({"width": 2, "shift": 3}, "shift goes with log"),
        ({"column": 3, "log": 2}, "column must be text"),
    ],
)
def test_a_bucket_that_cannot_be_meant_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        Bucket.declared("age", entries)


def test_a_cross_is_the_hash_of_the_bytes_of_its_keys_in_order():
    first, second = np.array([1, -1, 1]), np.array([2, 2**62, 3])
    expected = [
        xxh64(int(a).to_bytes(8, "little", signed=True) + int(b).to_bytes(8, "little", signed=True))
        for a, b in zip(first, second, strict=True)
    ]
    assert crossed([first, second]).view(np.uint64).tolist() == expected
    assert crossed([second, first])[0] != crossed([first, second])[0]


def test_the_logarithm_of_what_is_negative_is_zero():
    assert log1p(np.array([-3.0, 0.0, math.e - 1])).tolist() == [0, 0, 1]

"""Lists of what was clicked and passed over."""

import numpy as np

from nestpipe.data.draws import stream_of
from nestpipe.data.impressions import impressions

CLICKED = np.array([1, 2, 3, 4]), np.array([0, 2, 2, 3, 4])
PASSED = np.array([10, 11, 12, 13, 14]), np.array([0, 1, 3, 3, 5])


def test_each_list_has_what_was_clicked_and_passed_and_a_label_that_says_which():
    candidates, labels = impressions(stream_of(0), np.arange(4), CLICKED, PASSED)
    assert [sorted(keys) for keys in candidates.to_lists()] == [[1, 2, 10], [11, 12], [3], [4, 13, 14]]
    for keys, of_keys in zip(candidates.to_lists(), labels.to_lists(), strict=True):
        assert of_keys == [float(key < 10) for key in keys]


def test_the_place_in_a_list_does_not_tell_what_was_clicked():
    size = 500
    clicked = np.zeros(2 * size, np.int64), np.arange(size + 1) * 2
    passed = np.ones(3 * size, np.int64), np.arange(size + 1) * 3
    _, labels = impressions(stream_of(1), np.arange(size), clicked, passed)
    assert np.allclose(labels.values.view(size, 5).mean(0), 0.4, atol=0.08)


def test_the_order_of_a_list_is_that_of_its_sample_wherever_it_stands():
    candidates, _ = impressions(stream_of(0), np.array([7, 8, 9, 6]), CLICKED, PASSED)
    alone, _ = impressions(
        stream_of(0), np.array([6]), (np.array([4]), np.array([0, 1])), (np.array([13, 14]), np.array([0, 2]))
    )
    assert alone.to_lists()[0] == candidates.to_lists()[3]

"""Groups of samples of one rounded length."""

from __future__ import annotations

import torch

from nestpipe.ops.groups import LENGTHS, groups_of, rounded


def test_a_rounded_length_is_the_next_that_fills_whole_cache_lines():
    assert [rounded(n) for n in (1, 8, 9, 50, 53, 128, 129, 2047)] == [8, 8, 16, 52, 64, 128, 160, 2048]
    for n in range(1, 400):
        assert rounded(n) >= n and rounded(n) % 4 == 0
        assert rounded(n, 5) >= n and rounded(n, 5) % 16 == 0
    assert all(rounded(n) == n for n in LENGTHS if n != 52)


def test_a_matrix_that_leaves_a_part_of_a_vector_keeps_its_last_row_for_padding():
    assert (rounded(51), rounded(52)) == (52, 64)
    assert all(rounded(n) ** 2 % 32 == 0 or n < rounded(n) for n in range(1, 400))


def test_every_sample_is_in_one_group_and_comes_back_from_it():
    lengths = torch.tensor([3, 0, 8, 8, 17, 3, 300])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randn(int(offsets[-1]), 3)
    out = torch.full((len(values) + 1, 3), torch.nan)
    groups = groups_of(offsets, width=4)
    assert sorted(torch.cat([group.samples for group in groups]).tolist()) == [0, 2, 3, 4, 5, 6]
    for group in groups:
        taken = group.take(values, 0, len(group))
        assert taken.shape == (len(group), group.length, 3)
        group.put(out, 0, len(group), taken)
        zeros = group.take_or_zero(torch.ones(len(values)), 0, len(group))
        assert zeros.sum(1).tolist() == lengths[group.samples].tolist()
    assert torch.equal(out[:-1], values)


def test_long_samples_can_be_left_out():
    assert [group.length for group in groups_of(torch.tensor([0, 5, 200]), width=4, longest=128)] == [8]


def test_neighbours_without_padding_are_taken_without_a_copy():
    (group,) = groups_of(torch.tensor([0, 8, 16]), width=4)
    values = torch.randn(16, 32)
    assert group.take(values, 1, 2).data_ptr() == values[8:].data_ptr()


def test_groups_are_kept_until_the_offsets_change():
    offsets = torch.tensor([0, 8, 16])
    assert groups_of(offsets, width=4) is groups_of(offsets, width=8)
    before = groups_of(offsets, width=4)
    offsets[1] = 4
    assert groups_of(offsets, width=4) is not before
    with torch.inference_mode():
        assert len(groups_of(torch.tensor([0, 8, 16]), width=4)) == 1

"""What is kept of a user's first items, and how it is put before a tail."""

from __future__ import annotations

import pytest
import torch

from nestpipe.models import HSTURanker, Prefix
from nestpipe.models.prefix import end_to_end
from tests.models.requests import make_ranker, make_requests


def test_a_prefix_owns_just_the_bytes_that_it_counts():
    batch, rows = make_requests([30, 0, 7], [1, 1, 1])
    prefixes = make_ranker(HSTURanker).prefix(rows["history"], batch.dense["timestamps"])
    assert [prefix.length for prefix in prefixes] == [30, 0, 7]
    for prefix in prefixes:
        assert len(prefix.layers) == 3
        tensors = [*(x for pair in prefix.layers for x in pair), prefix.times]
        assert prefix.num_bytes == prefix.length * (3 * 2 * 16 * 4 + 8)
        assert prefix.num_bytes == sum(x.untyped_storage().nbytes() for x in tensors)
        assert not any(x.requires_grad for x in tensors)


def test_half_precision_takes_half_the_room_and_times_stay_whole():
    batch, rows = make_requests([30], [1])
    (prefix,) = make_ranker(HSTURanker).prefix(rows["history"], batch.dense["timestamps"])
    for dtype in (torch.float16, torch.bfloat16):
        half = prefix.to(dtype=dtype)
        assert half.num_bytes == 30 * (3 * 2 * 16 * 2 + 8)
        assert torch.equal(half.times, prefix.times)
        assert all(x.dtype is dtype for pair in half.layers for x in pair)
    assert prefix.layers[0][0].dtype is torch.float32


def test_what_half_precision_cannot_hold_is_refused():
    prefix = Prefix([(None, torch.tensor([[70_000.0]]))], 1)
    with pytest.raises(ValueError, match="beyond 65,504"):
        prefix.to(dtype=torch.float16)
    assert float(prefix.to(dtype=torch.bfloat16).layers[0][1]) == pytest.approx(70_000, rel=0.01)
    with pytest.raises(ValueError, match=r"not as torch\.int8"):
        prefix.to(dtype=torch.int8)


def test_what_is_kept_stands_before_the_tail_of_its_user():
    tails = torch.arange(6.0).view(3, 2)
    kept = [torch.full((2, 2), 7.0, dtype=torch.float16), None, torch.full((1, 2), 8.0)]
    whole = end_to_end(kept, tails, [0, 1, 3, 3])
    assert whole.dtype is torch.float32
    assert whole[:, 0].tolist() == [7, 7, 0, 2, 4, 8]


def test_nothing_is_copied_where_there_is_nothing_to_put_together():
    tails, kept = torch.ones(3, 2), torch.ones(4, 2)
    assert end_to_end([None, None], tails, [0, 3, 3]).data_ptr() == tails.data_ptr()
    assert end_to_end([kept], tails[:0], [0, 0]) is kept
    assert end_to_end([kept.half()], tails[:0], [0, 0]).dtype is torch.float32
    assert len(end_to_end([None], tails[:0], [0, 0])) == 0

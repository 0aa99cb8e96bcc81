"""Which implementation is taken, and what is refused."""

from __future__ import annotations

import pytest
import torch

from nestpipe.ops.attention import attention, jagged_attention

OFFSETS = torch.tensor([0, 2, 5])
X = torch.randn(5, 4)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((X, X, X, OFFSETS), {"kind": "relu"}, "kind must be one of"),
        ((X, X, X, OFFSETS), {"impl": "cuda"}, "impl must be one of"),
        ((None, X, X, OFFSETS), {}, "need both"),
        ((X, X, X, OFFSETS), {"kind": "weights"}, "takes None for q and k"),
        ((None, None, X, OFFSETS), {"kind": "weights"}, "needs position_bias or time_bias"),
        ((X, X, X, OFFSETS), {"num_heads": 3}, "4 columns cannot be split into num_heads=3"),
        ((X, X, X, OFFSETS), {"time_bias": X[0]}, r"one per key \[5\], got none"),
        ((X, X, X, OFFSETS), {"time_bias": X[0], "times": X[:4, 0]}, r"got shape \(4,\)"),
        ((X[:3], X, X, OFFSETS), {}, "q must have one row of 4 values for each of the 5 tokens"),
        ((X, X[:, :2], X, OFFSETS), {}, "k must have one row of 4 values"),
        ((X, X, X, OFFSETS), {"position_bias": X[0, :2]}, "position_bias has 2 distances, a sample has 3 keys"),
        ((X, X, X, OFFSETS), {"key_offsets": torch.tensor([0, 5])}, "offsets are of 2 samples, key_offsets of 1"),
        ((X, X, X, OFFSETS), {"key_offsets": torch.tensor([0, 1, 5])}, "more queries than keys"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, named, message):
    with pytest.raises(ValueError, match=f"jagged_attention: .*{message}"):
        jagged_attention(*given, **named)


def test_each_device_and_dtype_gets_the_fastest_implementation_that_can(monkeypatch):
    assert attention._choose(X) == attention._choose(X.double()) == "cpu"
    assert attention._choose(X.bfloat16()) == "reference"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert attention._choose(X.to("meta")) == "triton"
    assert attention._choose(X.to("meta").double()) == "reference"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert attention._choose(X.to("meta")) == "reference"


def test_a_tail_of_queries_gets_what_it_gets_among_all():
    torch.manual_seed(0)
    lengths, tails = torch.tensor([7, 200, 0, 3]), torch.tensor([2, 60, 0, 3])
    key_offsets, offsets = (torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (lengths, tails))
    q, k, v = torch.randn(3, int(key_offsets[-1]), 8)
    bias = torch.randn(200)
    last = [torch.arange(int(z - n), int(z)) for z, n in zip(key_offsets[1:], tails, strict=True)]
    whole = jagged_attention(q, k, v, key_offsets, num_heads=2, position_bias=bias)
    tail = jagged_attention(q[torch.cat(last)], k, v, offsets, num_heads=2, position_bias=bias, key_offsets=key_offsets)
    torch.testing.assert_close(tail, whole[torch.cat(last)], rtol=1e-5, atol=1e-5)

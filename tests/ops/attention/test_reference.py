"""The definition of jagged attention: its gradients, and its formula written once more, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from nestpipe.ops.attention import jagged_attention, time_buckets
from tests.ops.attention.cases import Case, make


@pytest.mark.parametrize("kind", ["silu", "softmax", "weights"])
def test_gradients_are_those_of_the_formula(kind):
    call = make(Case(kind, True, True, (2, 0, 3, 1), num_heads=2, width=2), dtype=torch.float64)
    leaves = call.leaves()

    def run(*values):
        given = dict(zip(leaves, values, strict=True))
        q, k, v = (given.get(name) for name in "qkv")
        return jagged_attention(q, k, v, call.positional[3], **(call.named | _biases(given)), impl="reference")

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


def _biases(given):
    return {name: x for name, x in given.items() if name.endswith("bias")}


@pytest.mark.parametrize("tails", [None, (2, 1)])
def test_every_query_gets_the_weighted_sum_of_the_values_up_to_its_own(tails):
    lengths = (3, 2)
    call = make(Case("silu", True, True, lengths, tails, num_heads=1, width=4), dtype=torch.float64)
    q, k, v, _ = call.positional
    position_bias, times, time_bias = (call.named[name] for name in ("position_bias", "times", "time_bias"))
    rows, first, query = [], 0, 0
    for length, tail in zip(lengths, tails or lengths, strict=True):
        for i in range(first + length - tail, first + length):
            row = torch.zeros(4, dtype=torch.float64)
            for j in range(first, i + 1):
                bucket = int(time_buckets(times[i] - times[j], len(time_bias)))
                score = (q[query] @ k[j] + position_bias[i - j] + time_bias[bucket]).item()
                row += score / (1 + math.exp(-score)) * v[j].detach()
            rows.append(row)
            query += 1
        first += length
    got = jagged_attention(*call.positional, **call.named, impl="reference")
    torch.testing.assert_close(got.detach(), torch.stack(rows), rtol=1e-12, atol=1e-12)

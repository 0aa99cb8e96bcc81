"""The definition of candidate attention: the sum written out, and causal attention with one candidate at the end."""

from __future__ import annotations

import math

import pytest
import torch

from nestpipe.ops import candidate_attention, jagged_attention
from nestpipe.ops.attention import time_buckets
from tests.ops.candidates.cases import Case, make, results


def test_each_candidate_gets_the_sum_over_the_history_and_itself():
    given = make(Case("silu", True, True, (2, 0, 3), (3, 2, 0), num_heads=1, width=4), dtype=torch.float64)
    given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    got = candidate_attention(**given, impl="reference")
    candidates, items = given["offsets"].tolist(), given["history_offsets"].tolist()
    for b in range(3):
        n = items[b + 1] - items[b]
        for c in range(candidates[b], candidates[b + 1]):
            seen = [
                (given["history_k"][j], given["history_v"][j], n - place, given["now"][b] - given["times"][j])
                for place, j in enumerate(range(items[b], items[b + 1]))
            ]
            seen.append((given["k_CE"][c], given["v_CE"][c], 0, torch.tensor(0)))
            row = torch.zeros(4, dtype=torch.float64)
            for k, v, distance, seconds in seen:
                bias = given["position_bias"][distance] + given["time_bias"][int(time_buckets(seconds, 40))]
                score = float(given["q_CE"][c] @ k + bias)
                row += score / (1 + math.exp(-score)) * v
            torch.testing.assert_close(got[c], row, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_a_single_candidate_is_the_last_item_of_a_causal_sequence(kind):
    given = make(Case(kind, True, True, (1, 1), (9, 0)), dtype=torch.float64)
    ends = torch.tensor([9, 10])  # where the candidates stand among the items

    def behind(items, own):
        return None if items is None else torch.cat([items[:9], own[:1], items[9:], own[1:]])

    times = torch.cat([given["times"], given["now"]])
    whole = jagged_attention(
        None if given["q_CE"] is None else behind(torch.zeros_like(given["history_v"]), given["q_CE"]),
        behind(given["history_k"], given["k_CE"]),
        behind(given["history_v"], given["v_CE"]),
        torch.tensor([0, 10, 11]),
        num_heads=2,
        kind=kind,
        position_bias=given["position_bias"],
        times=times,
        time_bias=given["time_bias"],
        impl="reference",
    )
    torch.testing.assert_close(candidate_attention(**given, impl="reference"), whole[ends])


@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_gradients_are_those_of_finite_differences(kind):
    given = make(Case(kind, True, True, (2, 0, 1), (3, 2, 0), num_heads=2, width=2), dtype=torch.float64)
    names = [name for name in results(given, "cpu") if name != "out"]
    for impl in ("reference", "cpu"):

        def run(*tensors: torch.Tensor, impl: str = impl) -> torch.Tensor:
            return candidate_attention(**(given | dict(zip(names, tensors, strict=True))), impl=impl)

        assert torch.autograd.gradcheck(run, [given[name] for name in names])

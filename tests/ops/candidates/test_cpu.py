"""The CPU implementation against the reference, sample by sample to the bit, and its memory."""

from __future__ import annotations

import pytest
import torch

from nestpipe.ops import candidate_attention
from nestpipe.ops.candidates import cpu
from tests.ops.attention.test_cpu import LargestTensor
from tests.ops.candidates.cases import ALL, Case, leaves, make, results, select


def differences(case: Case) -> dict[str, float]:
    """Of output and gradients, the largest difference from the reference in float64, relative to the largest entry."""
    given = make(case)
    got, exact = results(given, "cpu"), results(make(case, dtype=torch.float64), "reference")
    assert got.keys() == exact.keys() == {"out", *leaves(given)}
    return {name: float((got[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_output_and_all_gradients_equal_the_reference(case):
    found = differences(case)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_more_candidates_and_items_than_a_tile_equal_the_reference(kind, monkeypatch):
    monkeypatch.setattr(cpu, "TILE", cpu.BLOCK * 32)
    found = differences(Case(kind, True, True, (300, 7, 129), (200, 500, 33)))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_a_sample_is_the_same_to_the_bit_whatever_else_is_in_the_call(kind, width):
    given = make(Case(kind, True, True, (7, 50, 1, 64, 200, 0, 3), (300, 1, 49, 0, 129, 7, 64), width=width))

    def run(samples):
        some = select(given, samples)
        which = some.pop("which")
        out = candidate_attention(**some)
        named = {name: x for name, x in leaves(some).items() if "bias" not in name}
        direction = torch.sin(which.double()).float()[:, None]
        return (
            which,
            out.detach(),
            dict(zip(named, torch.autograd.grad((out * direction).sum(), list(named.values())), strict=True)),
        )

    _, whole, grads = run(list(range(7)))
    of_items = given["history_offsets"].tolist()
    for samples in (*([b] for b in range(7)), [6, 0, 3], [4, 2], [1, 5]):
        which, out, part = run(samples)
        assert torch.equal(out, whole[which]), samples
        items = torch.cat([torch.arange(of_items[b], of_items[b + 1]) for b in samples])
        for name, grad in part.items():
            assert torch.equal(grad, grads[name][items if name.startswith("history") else which]), (samples, name)


def test_offsets_that_change_in_place_or_meet_others_are_looked_at_anew():
    given = make(Case("silu", True, True, (3, 4), (6, 8)))
    first = results(given, "cpu")
    for changed in ({"history_offsets": torch.tensor([0, 7, 14])}, {"offsets": given["offsets"]}):
        call = given | changed
        if "offsets" in changed:
            call["offsets"][1] = 5
        got, expected = (results(call, impl) for impl in ("cpu", "reference"))
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
        assert not torch.equal(got["out"], first["out"])


def test_candidates_do_not_see_each_other_and_their_order_means_nothing():
    given = make(Case("silu", True, True, (65,), (200,)))
    order = torch.randperm(65, generator=torch.Generator().manual_seed(1))
    turned = given | {name: given[name][order] for name in ("q_CE", "k_CE", "v_CE")}
    assert torch.equal(candidate_attention(**turned), candidate_attention(**given)[order])
    others = given | {name: torch.cat([given[name][:5], torch.randn(60, 10)]) for name in ("q_CE", "k_CE", "v_CE")}
    assert torch.equal(candidate_attention(**others)[:5], candidate_attention(**given)[:5])
    fewer = given | {name: given[name][:5] for name in ("q_CE", "k_CE", "v_CE")} | {"offsets": torch.tensor([0, 5])}
    torch.testing.assert_close(candidate_attention(**fewer), candidate_attention(**given)[:5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "lengths"), [((), ()), ((0,), (0,)), ((0, 0), (3, 0)), ((1,), (0,)), ((0,), (200,))]
)
@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_empty_calls_have_gradients_of_every_input(kind, counts, lengths):
    given = make(Case(kind, True, True, counts, lengths))
    found = results(given, "cpu")
    assert found["out"].shape == (sum(counts), 10)
    assert all(found[name].shape == leaf.shape for name, leaf in leaves(given).items())


@pytest.mark.parametrize("kind", ["silu", "weights"])
def test_no_tensor_has_a_score_for_every_candidate_and_item(kind):
    given = make(Case(kind, True, True, (1_000,), (3_000,), num_heads=1, width=16))
    with LargestTensor() as largest:
        results(given, "cpu")
    assert largest.values <= 2 * cpu.TILE < 1_000 * 3_000 / 10

"""Which implementation is taken, and what is refused."""

from __future__ import annotations

import pytest
import torch

from nestpipe.ops import candidate_attention
from nestpipe.ops.candidates import attention
from tests.ops.candidates.cases import Case, make

X = torch.randn(5, 4)
GIVEN = {
    "q_CE": X,
    "k_CE": X,
    "v_CE": X,
    "offsets": torch.tensor([0, 2, 5]),
    "history_k": X[:3],
    "history_v": X[:3],
    "history_offsets": torch.tensor([0, 0, 3]),
}
NOTHING = {"q_CE": None, "k_CE": None, "history_k": None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "softmax"}, "kind must be one of"),
        ({"impl": "triton"}, "impl must be one of"),
        ({"q_CE": None}, "kind='silu' needs all three"),
        ({"kind": "weights"}, "kind='weights' takes None"),
        ({"kind": "weights", **NOTHING}, "needs position_bias or time_bias"),
        ({"num_heads": 3}, "4 columns cannot be split into num_heads=3"),
        ({"offsets": torch.tensor([0, 5])}, "offsets are of 1 samples, history_offsets of 2"),
        ({"q_CE": X[:3]}, "q must have one row of 4 values for each of the 5 tokens"),
        ({"history_k": X[:3, :2]}, "history_k must have one row of 4 values for each of the 3 tokens"),
        ({"position_bias": X[0, :3]}, "position_bias has 3 distances, a history has 3 items; give 4"),
        ({"time_bias": X[0]}, r"needs times, one per item \[3\], got none"),
        ({"time_bias": X[0], "times": X[:3, 0]}, r"needs now, one per sample \[2\], got none"),
        ({"time_bias": X[0], "times": X[:3, 0], "now": X[:3, 0]}, r"needs now, .* got shape \(3,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ValueError, match=f"candidate_attention: .*{message}"):
        candidate_attention(**(GIVEN | changed))


def test_half_precision_goes_through_the_reference(monkeypatch):
    called = []
    for name, implementation in attention.IMPLEMENTATIONS.items():
        monkeypatch.setitem(
            attention.IMPLEMENTATIONS,
            name,
            lambda *x, name=name, run=implementation, **y: (called.append(name), run(*x, **y))[1],
        )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        candidate_attention(**make(Case("silu", True, True), dtype=dtype))
    assert called == ["cpu", "cpu", "reference"]

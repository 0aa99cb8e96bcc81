from __future__ import annotations

import torch

from nestpipe.ops import normalize


def test_gradients_are_those_of_the_formula():
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(normalize, (torch.randn(4, 5, dtype=torch.float64, requires_grad=True),))


def test_vectors_shorter_than_eps_are_divided_by_eps():
    small = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    normalize(small).sum().backward()
    assert torch.equal(small.grad, torch.full_like(small, 1e6))

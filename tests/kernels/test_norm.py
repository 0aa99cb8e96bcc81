from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.kernels import reference
from nestpipe.kernels.norm import squares


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 100_003])
def test_squares_equal_the_reference_bit_for_bit(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32) * 1e3
    assert squares(values) == reference.squares(torch.from_numpy(values))


def test_squares_of_values_that_overflow_float32_are_finite() -> None:
    assert squares(np.full(4, 1e30, np.float32)) == pytest.approx(4e60)

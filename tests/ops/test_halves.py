import pytest
import torch

from nestpipe.ops.halves import from_half, rounded, to_half


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e20])
def test_rows_of_any_size_keep_their_digits(dtype, digits, size):
    rows = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * size
    half, scale = to_half(rows, dtype)
    assert half.dtype == dtype and torch.isfinite(half).all()
    back = from_half(half, scale)
    assert back.dtype == torch.float32
    assert float(((back - rows).abs() / rows.abs().amax(1, keepdim=True)).max()) <= digits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(dtype):
    rows = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0]])
    back = rounded(rows, dtype)
    assert not back[0].any() and not torch.isfinite(back[1:, 0]).any()
    assert rounded(torch.empty(0, 4), dtype).shape == (0, 4)


def test_float32_is_left_as_it_is():
    rows = torch.randn(3, 4)
    assert rounded(rows, torch.float32) is rows

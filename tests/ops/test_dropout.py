from __future__ import annotations

import pytest
import torch

from nestpipe.ops import dropout


def test_dropout_is_off_in_eval_and_keeps_the_mean_in_training():
    x = torch.ones(1000, 101)
    assert dropout(x, p=0.3, training=False) is x
    torch.manual_seed(0)
    dropped = dropout(x, p=0.3, training=True)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(dropped, dropout(x, p=0.3, training=True))

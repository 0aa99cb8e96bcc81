"""What models of clicks share: samples by themselves, empty batches, labels and inputs that are wrong, dropout."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.models import DCN, DLRM, DeepFM
from nestpipe.models.clicks import MLP
from tests.models.clicks import FEATURES, NUM_DENSE, make_batch, make_model

KINDS = (DLRM, DeepFM, DCN)
of_every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: type[Any], **changes: Any) -> Any:
    return make_model(kind, **changes).float()


@of_every_kind
def test_a_sample_does_not_depend_on_the_others(kind):
    model = make(kind)
    batch, rows = make_batch(7)
    some = torch.tensor([5, 2])
    part = model(batch.select(some), {name: rows[name][some] for name in FEATURES})
    torch.testing.assert_close(part.losses, model(batch, rows).losses[some], rtol=1e-5, atol=1e-5)


@of_every_kind
@pytest.mark.parametrize("size", [0, 1])
def test_every_parameter_and_row_has_a_gradient_however_few_samples_there_are(kind, size):
    model = make(kind)
    batch, rows = make_batch(size)
    output = model(batch, rows)
    assert output.losses.shape == output.predictions.shape == (size,)
    output.losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.grad is not None for part in rows.values())


@of_every_kind
def test_predict_needs_no_labels_and_gives_the_predictions_of_forward(kind):
    model = make(kind)
    batch, rows = make_batch(5)
    assert torch.equal(model.predict(Batch({}, batch.dense), rows), model(batch, rows).predictions)


@of_every_kind
def test_no_tensor_is_made_on_another_device_than_the_rows(kind):
    """A tensor made without saying where would be on the meta device here, and could not meet the others."""
    model = make(kind)
    batch, rows = make_batch(5)
    with torch.device("meta"):
        model(batch, rows).losses.sum().backward()


@of_every_kind
def test_wrong_inputs_are_named(kind):
    batch, rows = make_batch(4)
    name = kind.__name__
    for wrong_rows, problem in (
        ({**rows, "item": torch.randn(4, 5)}, rf"feature 'item' has rows of 5 values, .*dim=6; {name} needs"),
        (
            {**rows, "item": Jagged(torch.randn(4, 6), torch.arange(5))},
            rf"{name}: feature 'item' must have one row per sample",
        ),
        ({"user": rows["user"], "item": rows["item"]}, rf"{name}: features\[2\] is 'shop', which is no feature"),
    ):
        with pytest.raises(ValueError, match=problem):
            make(kind)(batch, wrong_rows)
    for labels, problem in (
        (None, "got none; set Batch.labels"),
        (batch.labels[:, None], r"got shape \(4, 1\)"),
        (Jagged(batch.labels, torch.arange(5)), "got a Jagged"),
        ({"click": batch.labels}, "got a dict"),
    ):
        with pytest.raises(ValueError, match=rf"{name} needs labels of shape \[B\], {problem}"):
            make(kind)(Batch({}, batch.dense, labels), rows)
    with pytest.raises(ValueError, match=r"label 2\.0 of sample 3 is outside"):
        make(kind)(Batch({}, batch.dense, torch.tensor([0.0, 1, 1, 2])), rows)
    with pytest.raises(ValueError, match=re.escape(f"'dense' must be a tensor [B, 3], got (4, {NUM_DENSE})")):
        make(kind, num_dense=3)(batch, rows)
    for features, problem in (
        ("item", "must be a list of names"),
        ([], "must be one or more different names"),
        (["item", "item"], "must be one or more different names"),
        (["item", ""], r"features\[1\] must be a name"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{problem}"):
            make(kind, features=features)


def test_dropout_is_of_training_alone_and_changes_no_names_of_weights():
    torch.manual_seed(0)
    plain, dropping = MLP([4, 8, 1]), MLP([4, 8, 1], dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(50, 4)
    assert not torch.equal(dropping(x), plain(x))
    assert torch.equal(dropping.eval()(x), plain(x))


@pytest.mark.parametrize("kind", [DeepFM, DCN])
def test_a_share_of_dropout_that_leaves_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, got 1"):
        make(kind, dropout=1.0)

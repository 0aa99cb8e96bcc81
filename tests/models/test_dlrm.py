"""DLRM: the interaction written out, and what it refuses."""

import pytest
import torch
from torch.nn import functional

from nestpipe.batch import Batch, Jagged
from nestpipe.models import DLRM

FEATURES = ["user", "item", "shop"]


def make_batch(size: int, *, num_dense: int = 4, dim: int = 6) -> tuple[Batch, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    dense = {"dense": torch.randn(size, num_dense)} if num_dense else {}
    batch = Batch({}, dense, labels=torch.randint(0, 2, (size,)).float())
    return batch, {name: torch.randn(size, dim, requires_grad=True) for name in FEATURES}


def make_model(**changes) -> DLRM:
    torch.manual_seed(1)
    return DLRM(**({"num_dense": 4, "features": FEATURES, "dim": 6, "bottom": (8,), "top": (10,)} | changes))


@pytest.mark.parametrize("num_dense", [0, 4])
@pytest.mark.parametrize("interaction", ["dot", "cat", "both"])
def test_equals_the_interaction_written_out(interaction, num_dense):
    model = make_model(interaction=interaction, num_dense=num_dense)
    batch, rows = make_batch(5, num_dense=num_dense)
    logits = []
    for b in range(5):
        vectors = [rows[name][b] for name in FEATURES]
        if num_dense:
            vectors.insert(0, model.bottom(batch.dense["dense"][b]))
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        whole = {"dot": vectors[:1] if num_dense else [], "cat": vectors, "both": vectors}[interaction]
        tail = [torch.stack(products)] if interaction != "cat" else []
        logits.append(model.top(torch.cat([*whole, *tail])))
    logits = torch.cat(logits)
    output = model(batch, rows)
    expected = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    torch.testing.assert_close(output.losses, expected)
    torch.testing.assert_close(output.predictions, logits.sigmoid())
    assert not output.predictions.requires_grad
    output.losses.sum().backward()
    grads = {name: rows[name].grad.clone() for name in FEATURES}
    for name in FEATURES:
        rows[name].grad = None
    expected.sum().backward()
    for name in FEATURES:
        torch.testing.assert_close(grads[name], rows[name].grad)


def test_a_sample_does_not_depend_on_the_others():
    model = make_model()
    batch, rows = make_batch(7)
    some = torch.tensor([5, 2])
    part = model(batch.select(some), {name: rows[name][some] for name in FEATURES})
    torch.testing.assert_close(part.losses, model(batch, rows).losses[some], rtol=1e-6, atol=1e-6)


def test_an_empty_batch_has_no_losses():
    output = make_model()(*make_batch(0))
    assert output.losses.shape == output.predictions.shape == (0,)
    output.losses.sum().backward()


@pytest.mark.parametrize("label", [-0.5, 1.5, float("nan")])
def test_a_label_outside_0_and_1_is_named_with_its_sample(label):
    batch, rows = make_batch(4)
    batch.labels[2] = label
    with pytest.raises(ValueError, match=f"label {label} of sample 2"):
        make_model()(batch, rows)


def test_wrong_inputs_are_named():
    batch, rows = make_batch(4)
    with pytest.raises(ValueError, match=r"feature 'item' has rows of 5 values.*dim=6"):
        make_model()(batch, rows | {"item": torch.randn(4, 5)})
    with pytest.raises(ValueError, match="pooling='sum'"):
        make_model()(batch, rows | {"item": Jagged.from_lengths(torch.randn(4, 6), torch.ones(4, dtype=torch.int64))})
    with pytest.raises(ValueError, match=r"\[B, 3\], got \(4, 4\)"):
        make_model(num_dense=3)(batch, rows)
    with pytest.raises(ValueError, match="got NoneType"):
        make_model()(Batch({}, labels=batch.labels), rows)
    with pytest.raises(ValueError, match="labels of shape"):
        make_model()(Batch({}, batch.dense), rows)
    with pytest.raises(ValueError, match="interaction must be"):
        make_model(interaction="sum")
    with pytest.raises(ValueError, match="interaction='cat'"):
        make_model(num_dense=0, features=["item"])
    with pytest.raises(ValueError, match="different names"):
        make_model(features=["item", "item"])


def test_predict_needs_no_labels_and_gives_the_predictions_of_forward():
    model = make_model()
    batch, rows = make_batch(5)
    expected = model(batch, rows).predictions
    batch.labels = None
    assert torch.equal(model.predict(batch, rows), expected)

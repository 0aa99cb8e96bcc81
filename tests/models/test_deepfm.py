"""DeepFM: linear terms, pairs and MLP written out."""

import pytest
import torch

from nestpipe.models import DeepFM
from tests.models.clicks import assert_same_gradients, cross_entropy, fields_of, make_batch, make_model, perceptron


@pytest.mark.parametrize("num_dense", [0, 4])
def test_equals_the_formula_with_a_loop_over_all_pairs(num_dense):
    model = make_model(DeepFM, num_dense=num_dense, deep=(7, 5))
    batch, rows = make_batch(5, num_dense=num_dense, dtype=torch.float64)
    logits = []
    for b in range(5):
        dense, fields = fields_of(batch, rows, b)
        fields = [*(x * row for x, row in zip(dense, model.dense_rows if num_dense else [], strict=True)), *fields]
        logit = model.bias + sum(field[0] for field in fields)
        for i in range(len(fields)):
            for j in range(i):
                logit = logit + fields[i][1:] @ fields[j][1:]
        logits.append(logit + perceptron(model.deep, torch.cat([field[1:] for field in fields]))[0])
    logits = torch.stack(logits)
    output = model(batch, rows)
    torch.testing.assert_close(output.predictions, logits.sigmoid())
    assert not output.predictions.requires_grad
    assert_same_gradients(model, list(rows.values()), output.losses, cross_entropy(logits, batch.labels.double()))


def test_a_row_of_one_value_leaves_no_vector():
    with pytest.raises(ValueError, match="DeepFM: dim must be a whole number of at least 2, got 1"):
        DeepFM(num_dense=0, features=["item"], dim=1)

"""DCN-v2: cross layers written out, full and of low rank, beside and below the MLP."""

import pytest
import torch

from nestpipe.models import DCN
from tests.models.clicks import assert_same_gradients, cross_entropy, fields_of, make_batch, make_model, perceptron


@pytest.mark.parametrize("num_dense", [0, 4])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_equals_the_formula_sample_by_sample(structure, rank, num_dense):
    model = make_model(DCN, num_dense=num_dense, rank=rank, structure=structure, num_cross=2, deep=(7, 5))
    batch, rows = make_batch(5, num_dense=num_dense, dtype=torch.float64)
    logits = []
    for b in range(5):
        dense, fields = fields_of(batch, rows, b)
        x0 = torch.cat([*(x[None] for x in dense), *fields])
        x = x0
        for layer in model.cross:
            weight = layer.up.weight if rank is None else layer.up.weight @ layer.down.weight
            x = torch.stack([x0[i] * (weight[i] @ x + layer.up.bias[i]) + x[i] for i in range(len(x))])
        deep = perceptron(model.deep, x if structure == "stacked" else x0)
        seen = deep if structure == "stacked" else torch.cat([x, deep])
        logits.append(model.out.weight[0] @ seen + model.out.bias[0])
    logits = torch.stack(logits)
    output = model(batch, rows)
    torch.testing.assert_close(output.predictions, logits.sigmoid())
    assert_same_gradients(model, list(rows.values()), output.losses, cross_entropy(logits, batch.labels.double()))


def test_a_low_rank_has_fewer_weights():
    full, low = (sum(p.numel() for p in make_model(DCN, rank=rank).cross.parameters()) for rank in (None, 2))
    assert (full, low) == (3 * (22 * 22 + 22), 3 * (2 * 22 * 2 + 22))


def test_without_hidden_layers_the_logit_reads_the_cross_layers_alone():
    batch, rows = make_batch(5, dtype=torch.float64)
    assert make_model(DCN, deep=(), structure="stacked")(batch, rows).losses.shape == (5,)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"rank": 22}, "rank 22 is not below the 22 inputs"),
        ({"rank": 0}, "rank must be a whole number of at least 1"),
        ({"structure": "beside"}, "structure must be one of"),
        ({"num_cross": 0}, "num_cross must be a whole number of at least 1"),
        ({"deep": 3}, "deep must be a list of hidden widths"),
    ],
)
def test_wrong_arguments_are_named(argument, problem):
    with pytest.raises(ValueError, match=f"DCN: {problem}"):
        make_model(DCN, **argument)

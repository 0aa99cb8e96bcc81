"""What models of histories share: samples that do not depend on each other, short histories, inputs that are wrong."""

import pytest
import torch
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models import HSTU, FuXi
from tests.models.histories import DIM, LENGTHS, NUM_NEGATIVES, make_batch, make_model

pytestmark = pytest.mark.parametrize("kind", [HSTU, FuXi])


def test_a_sample_does_not_depend_on_the_others(kind):
    model = make_model(kind, num_time_buckets=64)
    batch, rows = make_batch(LENGTHS)
    whole, query = model(batch, rows), model.query(batch, rows)
    for samples in (torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([5, 3, 7]), torch.tensor([4, 6])):
        part, part_rows = batch.select(samples), {name: jagged.select(samples) for name, jagged in rows.items()}
        torch.testing.assert_close(model(part, part_rows).losses, whole.losses[samples], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model.query(part, part_rows), query[samples], rtol=1e-5, atol=1e-6)


def test_a_position_does_not_see_later_items(kind):
    model = make_model(kind)
    batch, rows = make_batch([6])
    changed = rows["history"].values.detach().clone()
    changed[4:] += 1.0
    changed_rows = {"history": rows["history"].like(changed)}
    cut = {"history": Jagged(rows["history"].values[:4], torch.tensor([0, 4])), "negatives": rows["negatives"]}
    short = Batch({"history": Jagged(batch.keys["history"].values[:4], torch.tensor([0, 4]))})
    long = Batch({"history": batch.keys["history"]})
    states = model.encode(long, changed_rows)
    torch.testing.assert_close(states[3:4], model.query(short, cut))


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 1, 0], [2, 2], [5, 5, 5]])
def test_short_empty_and_equal_histories(kind, lengths):
    model = make_model(kind, num_time_buckets=64)
    batch, rows = make_batch(lengths)
    output = model(batch, rows)
    assert isinstance(output, Output)
    assert output.losses.shape == (len(lengths),)
    output.losses.sum().backward()  # every parameter and row takes part, so that no worker waits for a gradient
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())
    assert output.weights.tolist() == [max(n - 1, 0) for n in lengths]
    assert [loss > 0 for loss in output.losses.tolist()] == [n > 1 for n in lengths]
    query = model.query(batch, rows)
    assert query.shape == (len(lengths), DIM)
    assert all(not query[b].any() for b, n in enumerate(lengths) if n == 0)


def test_score_is_the_logit_of_training(kind):
    model = make_model(kind)
    batch, rows = make_batch([3])
    scores = model.score(model.query(batch, rows), rows["negatives"].values).detach()
    assert scores.shape == (1, NUM_NEGATIVES)
    assert scores.abs().max() <= 1 / model.temperature + 1e-5
    state = model.query(batch, rows)[0].detach()
    cosine = functional.cosine_similarity(state, rows["negatives"].values[2].detach(), dim=0)
    assert float(scores[0, 2]) == pytest.approx(float(cosine) / model.temperature, rel=1e-5)


def test_other_feature_names_and_bad_inputs_are_named(kind):
    batch, rows = make_batch([3, 4])
    model = make_model(kind, history="watched", negatives="others")
    renamed = {"watched": "history", "others": "negatives"}
    output = model(
        Batch({new: batch.keys[old] for new, old in renamed.items()}), {new: rows[old] for new, old in renamed.items()}
    )
    torch.testing.assert_close(output.losses, make_model(kind)(batch, rows).losses)
    with pytest.raises(ValueError, match="max_length is 3"):
        make_model(kind, max_length=3)(batch, rows)
    with pytest.raises(ValueError, match="dim=4"):
        make_model(kind, dim=4).query(batch, rows)
    with pytest.raises(ValueError, match="not a multiple"):
        make_model(kind, num_heads=3)
    with pytest.raises(ValueError, match="timestamps"):
        make_model(kind, num_time_buckets=4)(Batch(batch.keys), rows)
    uneven = Jagged(rows["negatives"].values, torch.tensor([0, 5, 12]))
    with pytest.raises(ValueError, match="same number of negatives"):
        make_model(kind)(batch, {**rows, "negatives": uneven})

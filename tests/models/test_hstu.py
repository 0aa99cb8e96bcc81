"""HSTU against a plain padded implementation, forward and backward, and the independence of samples."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models import HSTU
from nestpipe.models.hstu_ops import MASKED, Packing, attend, dropout, normalize, pick, sampled_softmax

LENGTHS = [7, 0, 2, 20, 1, 5, 3, 9]
DIM, NUM_NEGATIVES, CATALOGUE = 8, 6, 12  # few keys, so that negatives meet targets


def make_batch(lengths: list[int], *, seed: int = 0) -> tuple[Batch, dict[str, Jagged]]:
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    num_tokens = int(lengths_B.sum())
    keys = Jagged.from_lengths(torch.randint(CATALOGUE, (num_tokens,), generator=generator), lengths_B)
    negatives = Jagged.from_lengths(
        torch.randint(CATALOGUE, (len(lengths) * NUM_NEGATIVES,), generator=generator),
        torch.full((len(lengths),), NUM_NEGATIVES),
    )
    times = Jagged(torch.randint(10**7, (num_tokens,), generator=generator).cumsum(0), keys.offsets)
    batch = Batch({"history": keys, "negatives": negatives}, {"timestamps": times})
    rows = {
        name: Jagged(torch.randn(len(part.values), DIM, generator=generator).mul_(0.3).requires_grad_(), part.offsets)
        for name, part in batch.keys.items()
    }
    return batch, rows


def make_model(**changes) -> HSTU:
    torch.manual_seed(1)
    settings = {"dim": DIM, "num_heads": 2, "max_length": 20, "dropout": 0.0, "input_dropout": 0.0, "temperature": 0.5}
    return HSTU(**(settings | changes))


def reference(model: HSTU, batch: Batch, rows: dict[str, Jagged]) -> tuple[Tensor, Tensor]:
    """Losses [B] and last states [B, D], everything padded to max_length, every formula written out."""
    history, keys = rows["history"], batch.keys["history"]
    B, L = len(keys), model.max_length
    valid = torch.arange(L) < keys.lengths[:, None]
    x = (history.to_padded(L) * math.sqrt(model.dim) + model.position_embedding) * valid[..., None]
    for layer in model.layers:
        normed = functional.layer_norm(x, (model.dim,))
        heads = layer.num_heads
        u = functional.silu(layer.gate(normed))
        q, k, v = (p.view(B, L, heads, -1) for p in functional.silu(layer.qkv(normed)).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        apart = torch.arange(L)[:, None] - torch.arange(L)
        scores = scores + layer.position_bias[apart.abs()]
        if layer.time_bias is not None:
            times = batch.dense["timestamps"].to_padded(L)
            seconds = (times[:, :, None] - times[:, None, :]).clamp(min=1).float()
            bucket = (seconds.log() / 0.301).long().clamp(max=model.num_time_buckets - 1)
            scores = scores + layer.time_bias[bucket][:, None]
        visible = (apart >= 0) & valid[:, None, :]
        weights = functional.silu(scores) * visible[:, None] / torch.arange(1, L + 1)[:, None]
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        x = x + layer.out(u * functional.layer_norm(attended, (attended.shape[-1],)))
    last = torch.stack([x[b, n - 1] if n else x.new_zeros(model.dim) for b, n in enumerate(keys.lengths.tolist())])

    def scale(vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=1e-6) if model.normalize else vectors

    losses = []
    key_lists, row_lists = keys.to_lists(), history.values.split(keys.lengths.tolist())
    negative_rows = rows["negatives"].values.view(B, -1, model.dim)
    for b, sample in enumerate(key_lists):
        total = x.new_zeros(())
        for i in range(len(sample) - 1):
            others = [n for n, key in enumerate(batch.keys["negatives"].to_lists()[b]) if key != sample[i + 1]]
            candidates = torch.cat([row_lists[b][i + 1][None], negative_rows[b][others]])
            logits = scale(candidates) @ scale(x[b, i]) / model.temperature
            total = total - logits.log_softmax(0)[0]
        losses.append(total)
    return torch.stack(losses), last


def gradients(model: HSTU, rows: dict[str, Jagged], loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    for part in rows.values():
        part.values.grad = None
    loss.backward()
    of_parameters = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return of_parameters | {name: part.values.grad.clone() for name, part in rows.items()}


@pytest.mark.parametrize("normalize_", [True, False])
@pytest.mark.parametrize("num_time_buckets", [0, 64])
def test_equals_a_padded_reference_forward_and_backward(normalize_, num_time_buckets):
    model = make_model(normalize=normalize_, num_time_buckets=num_time_buckets).double()
    batch, rows = make_batch(LENGTHS)
    rows = {name: Jagged(part.values.detach().double().requires_grad_(), part.offsets) for name, part in rows.items()}
    output = model(batch, rows)
    expected, last = reference(model, batch, rows)
    torch.testing.assert_close(output.losses, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.query(batch, rows), last, rtol=1e-9, atol=1e-9)
    assert output.weights.tolist() == [max(n - 1, 0) for n in LENGTHS]
    grads = gradients(model, rows, (output.losses * torch.arange(1, 9)).sum())
    wanted = gradients(model, rows, (expected * torch.arange(1, 9)).sum())
    assert grads.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-7, atol=1e-9, msg=name)


def test_a_sample_does_not_depend_on_the_others():
    model = make_model(num_time_buckets=64)
    batch, rows = make_batch(LENGTHS)
    whole, query = model(batch, rows), model.query(batch, rows)
    for samples in (torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([5, 3, 7]), torch.tensor([4, 6])):
        part, part_rows = batch.select(samples), {name: jagged.select(samples) for name, jagged in rows.items()}
        torch.testing.assert_close(model(part, part_rows).losses, whole.losses[samples], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model.query(part, part_rows), query[samples], rtol=1e-5, atol=1e-6)


def test_a_position_does_not_see_later_items():
    model = make_model()
    batch, rows = make_batch([6])
    changed = rows["history"].values.detach().clone()
    changed[4:] += 1.0
    cut = {"history": Jagged(rows["history"].values[:4], torch.tensor([0, 4])), "negatives": rows["negatives"]}
    short = Batch({"history": Jagged(batch.keys["history"].values[:4], torch.tensor([0, 4]))})
    long = Batch({"history": batch.keys["history"]})
    states = model._encode(long, changed, Packing(long.keys["history"].offsets))
    torch.testing.assert_close(states[3:4], model.query(short, cut))


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 1, 0], [2, 2], [5, 5, 5]])
def test_short_empty_and_equal_histories(lengths):
    model = make_model(num_time_buckets=64)
    batch, rows = make_batch(lengths)
    output = model(batch, rows)
    assert isinstance(output, Output)
    assert output.losses.shape == (len(lengths),)
    output.losses.sum().backward()  # every parameter and row takes part, so that no worker waits for a gradient
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())
    expected = reference(model, batch, rows)[0].tolist() if lengths else []
    assert output.losses.tolist() == pytest.approx(expected, rel=1e-5)
    query = model.query(batch, rows)
    assert query.shape == (len(lengths), DIM)
    assert all(not query[b].any() for b, n in enumerate(lengths) if n == 0)


def test_score_is_the_logit_of_training():
    model = make_model()
    batch, rows = make_batch([3])
    scores = model.score(model.query(batch, rows), rows["negatives"].values).detach()
    assert scores.shape == (1, NUM_NEGATIVES)
    assert scores.abs().max() <= 1 / model.temperature + 1e-5
    state = model.query(batch, rows)[0].detach()
    cosine = functional.cosine_similarity(state, rows["negatives"].values[2].detach(), dim=0)
    assert float(scores[0, 2]) == pytest.approx(float(cosine) / model.temperature, rel=1e-5)


def test_other_feature_names_and_bad_inputs_are_named():
    batch, rows = make_batch([3, 4])
    model = make_model(history="watched", negatives="others")
    renamed = {"watched": "history", "others": "negatives"}
    output = model(
        Batch({new: batch.keys[old] for new, old in renamed.items()}), {new: rows[old] for new, old in renamed.items()}
    )
    torch.testing.assert_close(output.losses, make_model()(batch, rows).losses)
    with pytest.raises(ValueError, match="max_length is 3"):
        make_model(max_length=3)(batch, rows)
    with pytest.raises(ValueError, match="dim=4"):
        make_model(dim=4).query(batch, rows)
    with pytest.raises(ValueError, match="not a multiple"):
        make_model(num_heads=3)
    with pytest.raises(ValueError, match="timestamps"):
        make_model(num_time_buckets=4)(Batch(batch.keys), rows)
    uneven = Jagged(rows["negatives"].values, torch.tensor([0, 5, 12]))
    with pytest.raises(ValueError, match="same number of negatives"):
        make_model()(batch, {**rows, "negatives": uneven})


def test_dropout_is_off_in_eval_and_keeps_the_mean_in_training():
    x = torch.ones(1000, 101)
    assert dropout(x, p=0.3, training=False) is x
    torch.manual_seed(0)
    dropped = dropout(x, p=0.3, training=True)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(dropped, dropout(x, p=0.3, training=True))


def test_operations_have_the_gradients_of_their_formulas():
    def double(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(normalize, (double(4, 5),))
    assert torch.autograd.gradcheck(lambda table: pick(table, torch.tensor([[0, 2, 2], [1, 0, 2]])), (double(4),))
    hits = torch.rand(2, 3, 4) < 0.4
    vectors = double(2, 3, 5), double(2, 3, 5), double(2, 4, 5)
    assert torch.autograd.gradcheck(lambda *x: sampled_softmax(*x, hits), vectors)
    for bias in (double(3, 3), double(2, 3, 3)):
        assert torch.autograd.gradcheck(lambda qkv, b: attend(qkv, b, num_heads=2), (double(2, 3, 12), bias))
    small = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    normalize(small).sum().backward()
    assert torch.equal(small.grad, torch.full_like(small, 1e6))


def test_masked_scores_weigh_exactly_nothing():
    score = torch.tensor([MASKED + 50, MASKED], requires_grad=True)
    weight = functional.silu(score)
    weight.sum().backward()
    assert not weight.any()
    assert not score.grad.any()


def test_all_negatives_equal_to_the_target_cost_nothing():
    states, targets = torch.randn(1, 1, 4, requires_grad=True), torch.randn(1, 1, 4)
    loss = sampled_softmax(states, targets, torch.randn(1, 2, 4), torch.ones(1, 1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.item() == 0
    assert not states.grad.any()

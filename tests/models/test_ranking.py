"""Rankers against a plain padded implementation, a candidate at a time; and in two steps against one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch, Jagged
from nestpipe.models import FuXiRanker, HSTURanker, Prefix, Ranker
from tests.models import test_fuxi, test_hstu
from tests.models.requests import DIM, apart, full_pass, make_ranker, make_requests, relay

LAYERS = {HSTURanker: test_hstu.layer, FuXiRanker: test_fuxi.layer}
pytestmark = pytest.mark.parametrize("kind", LAYERS)

LENGTHS, COUNTS = [300, 0, 70, 1, 200, 130, 0], [5, 3, 200, 1, 0, 64, 0]


def reference(model: Ranker, batch: Batch, rows: dict[str, Jagged]) -> Tensor:
    """Scores [C]: each candidate is the last item of a history of its own."""
    scores = []
    bounds = rows["history"].offsets.tolist()
    for c, b in enumerate(rows["candidates"].sample_ids().tolist()):
        mine = slice(bounds[b], bounds[b + 1])
        items = torch.cat([rows["history"].values[mine], rows["candidates"].values[c : c + 1]])
        times = torch.cat([batch.dense["timestamps"].values[mine], batch.dense["now"][b : b + 1]])
        x = (items * math.sqrt(model.dim) + model.position_embedding[: len(items)])[None]
        for layer in model.layers:
            x = LAYERS[type(model)](layer, x, times[None], torch.ones(1, len(items), dtype=torch.bool))
        scores.append(functional.layer_norm(x[0, -1], (model.dim,)) @ model.score_weight + model.score_bias)
    return torch.stack(scores)


@pytest.mark.parametrize("num_time_buckets", [0, 32])
def test_equals_a_padded_reference_forward_and_backward(kind, num_time_buckets):
    model = make_ranker(kind, num_time_buckets=num_time_buckets, max_length=20).double()
    batch, rows = make_requests([7, 0, 20, 1], [3, 2, 4, 0])
    rows = {name: part.like(part.values.detach().double().requires_grad_()) for name, part in rows.items()}
    output, scores = model(batch, rows), reference(model, batch, rows)
    torch.testing.assert_close(full_pass(model, batch, rows).values, scores, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.predictions.values, scores.sigmoid(), rtol=1e-9, atol=1e-9)
    labels = batch.labels.values.double()
    losses = batch.labels.like(-(labels * scores.sigmoid().log() + (1 - labels) * (1 - scores.sigmoid()).log())).sum()
    torch.testing.assert_close(output.losses, losses, rtol=1e-9, atol=1e-9)
    assert output.weights.tolist() == [3, 2, 4, 0]
    leaves = [*model.parameters(), *(part.values for part in rows.values())]
    weighted = torch.arange(1, 5)
    for got, expected in zip(
        torch.autograd.grad((output.losses * weighted).sum(), leaves),
        torch.autograd.grad((losses * weighted).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_training_and_the_full_pass_of_serving_are_the_same_to_the_bit(kind):
    model = make_ranker(kind)
    batch, rows = make_requests(LENGTHS, COUNTS)
    scores = full_pass(model, batch, rows)
    assert torch.equal(model(batch, rows).predictions.values, scores.values.sigmoid())
    assert torch.equal(model.predict(Batch(batch.keys, batch.dense), rows).values, scores.values.sigmoid())
    assert scores.lengths.tolist() == COUNTS


@pytest.mark.parametrize(
    "tails",
    [
        [32, 0, 70, 0, 5, 1, 0],  # some, all and none of a history
        [1, 0, 1, 1, 1, 1, 0],
        [64, 0, 33, 0, 63, 65, 0],
        [70, 0, 7, 0, 70, 2, 0],
    ],
)
def test_a_prefix_and_a_tail_score_as_the_whole_history_does(kind, tails):
    model = make_ranker(kind)
    batch, rows = make_requests(LENGTHS, COUNTS)
    assert apart(relay(model, batch, rows, tails).values, full_pass(model, batch, rows).values) <= 1e-5


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_one_user_scores_the_same_with_every_tail(kind, length, count):
    model = make_ranker(kind, num_layers=2)
    batch, rows = make_requests([length], [count])
    whole = full_pass(model, batch, rows).values
    for tail in sorted({0, 1, 5, 32, 64, 70} & set(range(length + 1))):
        got = relay(model, batch, rows, [tail]).values
        assert got.shape == (count,)
        assert apart(got, whole) <= 1e-5, tail


@pytest.mark.parametrize("lengths", [[300], [128, 40, 300], [5, 2, 90]])
def test_without_a_tail_products_have_the_same_shapes_and_scores_the_same_bits(kind, lengths):
    model = make_ranker(kind)
    batch, rows = make_requests(lengths, [7] * len(lengths))
    assert torch.equal(relay(model, batch, rows, [0] * len(lengths)).values, full_pass(model, batch, rows).values)


def test_a_user_with_a_prefix_and_one_without_can_share_a_call(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([100, 90], [20, 30])
    first, last = rows["history"].split(torch.tensor([80, 0]))
    first_times, last_times = batch.dense["timestamps"].split(torch.tensor([80, 0]))
    prefixes = [model.prefix(first, first_times)[0], None]
    scores = model.rank(prefixes, last, rows["candidates"], times=last_times, now=batch.dense["now"])
    assert apart(scores.values, full_pass(model, batch, rows).values) <= 1e-5


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-4), (torch.bfloat16, 1e-3)])
def test_half_precision_costs_little_of_a_score(kind, dtype, error):
    model = make_ranker(kind)
    batch, rows = make_requests(LENGTHS, COUNTS)
    whole = full_pass(model, batch, rows).values
    for tails in ([32, 0, 70, 0, 5, 1, 0], [0] * 7):
        assert 0 < apart(relay(model, batch, rows, tails, dtype).values, whole) <= error


def test_an_order_of_candidates_orders_the_scores_and_changes_none(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([150], [200])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    turned = {**rows, "candidates": rows["candidates"].like(rows["candidates"].values[order])}
    for run in (full_pass, lambda *given: relay(*given, [32])):
        assert torch.equal(run(model, batch, turned).values, run(model, batch, rows).values[order])


def test_a_score_depends_neither_on_other_candidates_nor_on_other_users(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([150, 40], [200, 8])
    whole = full_pass(model, batch, rows)
    fewer = {**rows, "candidates": Jagged(rows["candidates"].values[:5], torch.tensor([0, 5, 5]))}
    assert apart(full_pass(model, batch, fewer).values, whole.values[:5]) <= 1e-5
    alone = torch.tensor([1])
    part = full_pass(model, batch.select(alone), {name: jagged.select(alone) for name, jagged in rows.items()})
    assert apart(part.values, whole.select(alone).values) <= 1e-5


@pytest.mark.parametrize(("lengths", "counts"), [([], []), ([0], [0]), ([3], [0]), ([0, 2], [1, 0])])
def test_empty_histories_and_lists_have_losses_and_every_gradient(kind, lengths, counts):
    model = make_ranker(kind)
    batch, rows = make_requests(lengths, counts)
    output = model(batch, rows)
    output.losses.sum().backward()  # every parameter and row takes part, so that no worker waits for a gradient
    assert output.weights.tolist() == counts
    assert [loss > 0 for loss in output.losses.tolist()] == [count > 0 for count in counts]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(part.values.grad is not None for part in rows.values())


def test_no_layers_and_no_times_can_be_relayed_too(kind):
    for options in ({"num_layers": 0}, {"num_layers": 1, "num_time_buckets": 0}):
        model = make_ranker(kind, **options)
        batch, rows = make_requests([50], [6])
        assert apart(relay(model, batch, rows, [9]).values, full_pass(model, batch, rows).values) <= 1e-5
        assert model.relay_problem() is None


def test_labels_that_do_not_fit_are_refused(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([3, 4], [2, 1])

    def with_labels(labels):
        return Batch(batch.keys, batch.dense, labels)

    for labels, message in (
        (None, "needs labels, a Jagged .* got none"),
        (torch.ones(2), r"got a tensor of shape \(2,\)"),
        (
            Jagged.from_lists([[1.0], [0.0, 1.0]], dtype=torch.float32),
            "one for each key of 'candidates', sample by sample",
        ),
        (Jagged.from_lists([[1.0, 0.0], [2.0]], dtype=torch.float32), r"label 2.0 of sample 1 is outside \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(with_labels(labels), rows)


def test_inputs_that_do_not_fit_are_refused(kind):
    batch, rows = make_requests([3, 4], [2, 1])
    model, now = make_ranker(kind), batch.dense["now"]
    times, history, candidates = batch.dense["timestamps"], rows["history"], rows["candidates"]
    with pytest.raises(ValueError, match="max_length is 3"):
        full_pass(make_ranker(kind, max_length=3), batch, rows)
    with pytest.raises(ValueError, match="max_length is 5"):
        relay(make_ranker(kind, max_length=5), *make_requests([6], [1]), [2])
    with pytest.raises(ValueError, match="feature 'candidates': rows are 4 wide"):
        model.rank([None, None], history, candidates.like(torch.zeros(3, 4)), times=times, now=now)
    with pytest.raises(ValueError, match="1 prefixes, 2 tails and 2 lists"):
        model.rank([None], history, candidates, times=times, now=now)
    with pytest.raises(ValueError, match=r"give now, the seconds of each request \[2\]"):
        model.rank([None, None], history, candidates, times=times)
    with pytest.raises(ValueError, match="give the seconds of each item"):
        model.prefix(history)
    with pytest.raises(ValueError, match=r"needs batch\.dense\['now'\]"):
        model(Batch(batch.keys, {"timestamps": times}, batch.labels), rows)
    with pytest.raises(ValueError, match="training mode"):
        make_ranker(kind).train().prefix(history, times)
    with pytest.raises(ValueError, match="'impressions', which is no feature"):
        make_ranker(kind, candidates="impressions")(batch, rows)


def test_a_prefix_of_another_model_is_refused(kind):
    batch, rows = make_requests([5], [2])
    model = make_ranker(kind)
    no_tail = Jagged(torch.empty(0, DIM), torch.tensor([0, 0]))

    def rank(prefix: Prefix):
        return model.rank(
            [prefix], no_tail, rows["candidates"], times=no_tail.like(torch.empty(0)), now=batch.dense["now"]
        )

    for options, message in (
        ({"num_layers": 2}, "has 2 layers, the model 3"),
        ({"head_dim": 4}, r"keys and values of shape \(5, 16\)"),
        ({"num_time_buckets": 0}, "has no times"),
    ):
        (prefix,) = make_ranker(kind, **options).prefix(
            rows["history"], batch.dense["timestamps"] if "num_time_buckets" not in options else None
        )
        with pytest.raises(ValueError, match=f"the prefix of user 0 .*{message}.*of another model"):
            rank(prefix)
    (prefix,) = model.prefix(rows["history"], batch.dense["timestamps"])
    with pytest.raises(ValueError, match="is on meta, the tails on cpu"):
        rank(prefix.to(device="meta"))


# -- prefixes in pieces ------------------------------------------------------------------------------------------------


def in_pieces(
    model: Ranker, batch: Batch, rows: dict[str, Jagged], ends: list[list[int]], dtype: torch.dtype | None = None
) -> list[Prefix]:
    """Prefixes of the whole histories, of which pieces end there; of each user as many."""
    made: list[Prefix] | None = None
    starts = [0] * batch.size
    for upto in zip(*ends, strict=True):
        places = [slice(a, z) for a, z in zip(starts, upto, strict=True)]
        piece, times = (_cut(part, places) for part in (rows["history"], batch.dense["timestamps"]))
        made = [prefix.to(dtype=dtype) for prefix in model.prefix(piece, times, made)]
        starts = list(upto)
    assert made is not None
    return made


def _cut(part: Jagged, places: list[slice]) -> Jagged:
    bounds = part.offsets.tolist()
    cut = [part.values[a:z][place] for a, z, place in zip(bounds[:-1], bounds[1:], places, strict=True)]
    return Jagged.from_lengths(torch.cat(cut), torch.tensor([len(each) for each in cut]))


def far_apart(made: list[Prefix], whole: list[Prefix]) -> float:
    assert [prefix.length for prefix in made] == [prefix.length for prefix in whole]
    pairs = [
        (mine, other)
        for one, two in zip(made, whole, strict=True)
        for ours, theirs in zip(one.layers, two.layers, strict=True)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    for one, two in zip(made, whole, strict=True):
        assert (one.times is None and two.times is None) or torch.equal(one.times, two.times)
        assert one.num_bytes == two.num_bytes
    return max((apart(mine, other) for mine, other in pairs), default=0.0)


@pytest.mark.parametrize("num_time_buckets", [0, 32])
@pytest.mark.parametrize(
    "ends",
    [
        [[300], [70], [1]],
        [[128, 256, 300], [64, 65, 70], [0, 0, 1]],
        [[1, 2, 300], [0, 70, 70], [1, 1, 1]],  # empty pieces, before and after
        [[0, 0, 129, 300, 300], [0, 0, 0, 0, 70], [0, 1, 1, 1, 1]],
    ],
)
def test_pieces_make_the_prefix_that_is_computed_at_once(kind, num_time_buckets, ends):
    model = make_ranker(kind, num_time_buckets=num_time_buckets)
    batch, rows = make_requests([300, 70, 1], [5, 3, 2])
    whole = model.prefix(rows["history"], batch.dense["timestamps"])
    made = in_pieces(model, batch, rows, ends)
    assert far_apart(made, whole) <= 1e-5
    no_tail, times = (_cut(part, [slice(0)] * 3) for part in (rows["history"], batch.dense["timestamps"]))
    scores = model.rank(made, no_tail, rows["candidates"], times=times, now=batch.dense["now"])
    assert apart(scores.values, full_pass(model, batch, rows).values) <= 1e-5


def test_pieces_that_end_where_tiles_do_have_the_same_bits(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([384], [1])
    whole = model.prefix(rows["history"], batch.dense["timestamps"])
    assert far_apart(in_pieces(model, batch, rows, [[256, 384]]), whole) == 0


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_a_prefix_kept_in_half_precision_can_be_extended(kind, dtype, error):
    model = make_ranker(kind)
    batch, rows = make_requests([300, 70], [5, 3])
    whole = [prefix.to(dtype=dtype) for prefix in model.prefix(rows["history"], batch.dense["timestamps"])]
    made = in_pieces(model, batch, rows, [[128, 256, 300], [10, 20, 70]], dtype)
    assert {x.dtype for prefix in made for pair in prefix.layers for x in pair} == {dtype}
    assert 0 < far_apart(made, whole) <= error


def test_a_prefix_that_is_extended_stays_as_it_is_and_shares_no_memory_with_the_longer_one(kind):
    model = make_ranker(kind)
    batch, rows = make_requests([100], [1])
    (before,) = in_pieces(model, batch, rows, [[60]])
    kept = [x.clone() for pair in before.layers for x in pair]
    piece, times = (_cut(part, [slice(60, 100)]) for part in (rows["history"], batch.dense["timestamps"]))
    (longer,) = model.prefix(piece, times, [before])
    for pair in longer.layers:
        for x in pair:
            x.zero_()
    now = [x for pair in before.layers for x in pair]
    assert all(torch.equal(was, is_now) for was, is_now in zip(kept, now, strict=True))


def test_prefixes_that_cannot_be_extended_are_refused(kind):
    model = make_ranker(kind, max_length=8)
    batch, rows = make_requests([5, 5], [1, 1])
    times = batch.dense["timestamps"]
    made = model.prefix(rows["history"], times)
    with pytest.raises(ValueError, match="prefix: 1 prefixes for 2 users"):
        model.prefix(rows["history"], times, made[:1])
    with pytest.raises(ValueError, match="max_length is 8"):
        model.prefix(rows["history"], times, made)
    others = make_ranker(kind, num_layers=2, max_length=8).prefix(rows["history"], times)
    with pytest.raises(
        ValueError, match="prefix: the prefix of user 1 has 2 layers, the model 3; it is of another model"
    ):
        model.prefix(rows["history"], times, [None, others[1]])

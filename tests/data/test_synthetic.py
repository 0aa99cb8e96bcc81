import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.batch import Batch, check_batch
from nestpipe.data import SyntheticClicks, SyntheticSequences
from nestpipe.data.draws import to_keys
from nestpipe.data.overlap import Overlap, cover
from nestpipe.data.synthetic_sequences import length_quantiles
from tests.data.data_samples import all_ranks, global_batches, read, read_samples, same


def small_sequences(**options):
    return SyntheticSequences(**{"num_items": 500, "num_samples": 50, "num_negatives": 3, "mean_length": 6, **options})


def small_clicks(**options):
    return SyntheticClicks(
        **{
            "num_features": 3,
            "keys_per_table": 200,
            "keys_per_bag": [0, 4],
            "num_dense": 2,
            "num_samples": 50,
            **options,
        }
    )


MAKERS = pytest.mark.parametrize("make", [small_sequences, small_clicks])


@MAKERS
@pytest.mark.parametrize("overlap", [None, 0.3])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_global_batches_do_not_depend_on_the_world(make, overlap, split):
    dataset = make(overlap=overlap, num_valid_samples=50)
    alone = global_batches(dataset, split, batch_size=12, world=1, seed=3, epoch=1)
    assert [len(batch) for batch in alone] == [12, 12, 12, 12, 2]
    assert global_batches(dataset, split, batch_size=6, world=2, seed=3, epoch=1) == alone
    assert global_batches(dataset, split, batch_size=4, world=3, seed=3, epoch=1) == alone


@MAKERS
def test_without_overlap_samples_do_not_even_depend_on_the_batch_size(make):
    assert read_samples(make(), "train", batch_size=7) == read_samples(make(), "train", batch_size=50)


@MAKERS
def test_seed_and_epoch_change_the_samples_and_nothing_else_does(make):
    first = read_samples(make(), "train", batch_size=10)
    assert first == read_samples(make(), "train", batch_size=10)
    assert first != read_samples(make(), "train", batch_size=10, seed=1)
    assert first != read_samples(make(), "train", batch_size=10, epoch=1)
    assert len(first) == 50


@MAKERS
def test_evaluation_is_the_same_for_every_seed_and_epoch_and_differs_from_training(make):
    dataset = make(num_valid_samples=50, num_test_samples=50)
    valid = read_samples(dataset, "valid", batch_size=10)
    assert valid == read_samples(dataset, "valid", batch_size=10, seed=5, epoch=2)
    assert valid != read_samples(dataset, "test", batch_size=10)
    histories = {sample[0] for sample in valid if len(sample[0]) > 2}
    assert not histories & {sample[0] for sample in read_samples(dataset, "train", batch_size=10)}


@MAKERS
@pytest.mark.parametrize("overlap", [None, 0.5])
def test_any_batch_can_be_made_alone(make, overlap):
    where = {"batch_size": 6, "rank": 1, "world": 2, "seed": 4, "epoch": 2}
    in_turn = list(make(overlap=overlap).batches("train", **where))
    assert same(make(overlap=overlap).batch("train", 3, **where), in_turn[3])


def distinct_keys(dataset, batch: Batch) -> list[set[int]]:
    """Per table: the sequence features share one, the click features have one each."""
    parts = [batch.keys[name].values for name in dataset.features]
    if isinstance(dataset, SyntheticSequences):
        parts = [torch.cat(parts)]
    return [set(part.tolist()) for part in parts]


@MAKERS
@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("spread_keys", [False, True])
def test_neighbouring_batches_share_exactly_the_given_fraction_of_their_keys(make, overlap, spread_keys):
    dataset = make(overlap=overlap, spread_keys=spread_keys, num_samples=110)
    batches = list(read(dataset, "train", batch_size=20))
    assert batches[-1].size == 10
    for before, after in itertools.pairwise(batches):
        for old, new in zip(distinct_keys(dataset, before), distinct_keys(dataset, after), strict=True):
            assert len(old & new) == round(overlap * len(new))
            assert len(new) > 5


@settings(deadline=None, max_examples=40)
@given(
    overlap=st.floats(0, 1),
    num_items=st.integers(20, 400),
    num_clusters=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    lengths=st.sampled_from(["fixed", "geometric", "lognormal"]),
)
def test_overlap_is_exact_for_any_shape(overlap, num_items, num_clusters, batch_size, lengths):
    dataset = small_sequences(
        overlap=overlap, num_items=num_items, num_clusters=num_clusters, lengths=lengths, num_samples=batch_size * 4 + 1
    )
    keys = [distinct_keys(dataset, batch)[0] for batch in read(dataset, "train", batch_size=batch_size)]
    for old, new in itertools.pairwise(keys):
        assert len(old & new) == round(overlap * len(new))
        assert min(new) >= 0
        assert max(new) < num_items


def test_overlap_that_a_tiny_catalogue_cannot_meet_is_refused():
    with pytest.raises(ValueError, match="raise the number of ids"):
        Overlap.plan(fraction=0.0, num_slots=3, num_ids=5, granule=4)


@given(slots=st.lists(st.integers(0, 9), min_size=10, max_size=60), granule=st.integers(1, 4), data=st.data())
def test_cover_makes_every_slot_occur_and_gives_up_only_what_is_surplus(slots, granule, data):
    before = np.array(slots)
    after = before.copy()
    cover(after, num_slots=10, granule=granule, num_free=data.draw(st.integers(0, len(slots))))
    assert set(after.tolist()) == set(range(10))
    assert (after != before).sum() == 10 - len(set(slots))


def test_popularity_is_a_power_law():
    dataset = SyntheticClicks(num_features=1, keys_per_table=100_000, skew=1.0, num_samples=40_000)
    keys = torch.cat([batch.keys["f0"].values for batch in read(dataset, "train", batch_size=8_000)])
    counts = torch.bincount(keys, minlength=100_000).double()
    # Each decade of ranks has the same mass when the exponent is 1.
    decades = torch.stack([counts[10**e - 1 : 10 ** (e + 1) - 1].sum() for e in range(5)]) / counts.sum()
    torch.testing.assert_close(decades, torch.full((5,), 0.2, dtype=torch.float64), atol=0.01, rtol=0)


def test_the_cluster_of_the_next_item_can_be_learned_from_the_last():
    dataset = small_sequences(num_clusters=10, num_valid_samples=2_000, predictability=0.8)
    batch = next(read(dataset, "valid", batch_size=2_000))
    last = batch.keys["history"].values[batch.keys["history"].offsets[1:] - 1]
    counts = torch.zeros(10, 10)
    counts.index_put_((last % 10, batch.labels % 10), torch.ones(len(last)), accumulate=True)
    assert counts.argmax(1).unique().numel() == 10
    assert counts.max(1).values.sum() / counts.sum() > 0.75


def test_overlapping_batches_keep_the_hidden_structure():
    dataset = SyntheticSequences(num_items=5_000, num_clusters=10, overlap=0.3, num_samples=512, lengths="fixed")
    batch = list(read(dataset, "train", batch_size=256))[1]
    history = batch.keys["history"].to_padded()
    counts = torch.zeros(10, 10)
    pairs = (history[:, :-1].flatten() % 10, history[:, 1:].flatten() % 10)
    counts.index_put_(pairs, torch.ones(len(pairs[0])), accumulate=True)
    assert counts.max(1).values.sum() / counts.sum() > 0.7


def test_clicks_follow_a_model_on_the_keys():
    """Two samples of the same key agree more often than chance: there is something to learn."""
    dataset = SyntheticClicks(
        num_features=1, keys_per_table=5, keys_per_bag=1, num_dense=0, num_samples=4_000, signal=4.0, seed=1
    )
    batch = next(read(dataset, "train", batch_size=4_000))
    rates = torch.stack([batch.labels[batch.keys["f0"].values == key].mean() for key in range(5)])
    assert rates.max() - rates.min() > 0.3


def test_timestamps_rise_and_targets_are_candidates():
    dataset = small_sequences(spread_keys=True)
    batch = next(read(dataset, "test", batch_size=100))
    candidates = dataset.candidates()
    assert torch.isin(batch.labels, candidates).all()
    assert torch.equal(candidates, candidates.sort().values)
    assert len(candidates.unique()) == 500
    for times in batch.dense["timestamps"].to_lists():
        assert times == sorted(set(times))


@pytest.mark.parametrize("kind", ["fixed", "geometric", "lognormal"])
def test_lengths_have_the_given_mean_when_nothing_is_clipped(kind):
    lengths = length_quantiles(kind, 20.0, 1, 10_000)
    assert lengths.mean() == pytest.approx(20, rel=0.02)
    assert length_quantiles(kind, 20.0, 5, 30).max() <= 30


@given(st.lists(st.integers(0, 2**62), unique=True))
def test_spread_keys_are_all_different(ids):
    keys = to_keys(np.array(ids, np.int64), spread_keys=True)
    assert len(set(keys.tolist())) == len(ids)


def test_tables_of_different_sizes_and_fixed_bags():
    dataset = SyntheticClicks(num_features=2, keys_per_table=[3, 50], keys_per_bag=4, skew=0, num_samples=64)
    batch = next(read(dataset, "train", batch_size=64))
    assert batch.keys["f0"].values.max() < 3 <= batch.keys["f1"].values.min()
    assert (batch.keys["f1"].lengths == 4).all()


def test_every_sample_is_on_one_rank():
    for world in (1, 2, 3):
        assert len(all_ranks(small_clicks(), "train", batch_size=8, world=world)) == 50


def test_a_rank_without_samples_gets_an_empty_batch():
    batches = list(small_sequences(num_samples=7).batches("train", batch_size=2, rank=0, world=3, seed=0))
    assert [batch.size for batch in batches] == [2, 0]
    check_batch(batches[1], ("history", "negatives"))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SyntheticSequences, {"overlap": 1.5}, "overlap is 1.5"),
        (SyntheticSequences, {"lengths": "long"}, "use one of fixed, geometric, lognormal"),
        (SyntheticSequences, {"num_items": 0}, "num_items is 0"),
        (SyntheticSequences, {"num_items": 5, "num_clusters": 6}, "num_clusters is 6"),
        (SyntheticClicks, {"keys_per_table": [1, 2], "num_features": 3}, "one per feature"),
        (SyntheticClicks, {"skew": -1.0}, "skew is -1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)

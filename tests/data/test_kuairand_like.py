import itertools

import numpy as np
import pytest
import torch

from nestpipe.data import KuaiRandLike
from tests.data.data_samples import assert_same, global_batches, read, read_samples


def small(**options):
    return KuaiRandLike(
        **{"num_users": 60, "num_items": 500, "mean_length": 12, "max_length": 40, "num_negatives": 3, **options}
    )


def test_lengths_have_the_mean_and_the_tail_that_the_docstring_states():
    unclipped = KuaiRandLike(num_users=100_000, max_length=10**6).lengths()
    assert unclipped.mean() == pytest.approx(300, rel=0.02)
    assert np.median(unclipped) == pytest.approx(182, rel=0.02)
    assert np.percentile(unclipped, 99) == pytest.approx(1_863, rel=0.03)
    clipped = KuaiRandLike(num_users=100_000).lengths()
    assert clipped.mean() == pytest.approx(292, rel=0.02) and clipped.max() == 2_048 and clipped.min() >= 2


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_lengths_are_known_without_drawing_a_history(split):
    data = small()
    users = data.order(split, seed=3, epoch=1)
    batch = data.samples(split, users, seed=3, epoch=1)
    assert batch.keys["history"].lengths.tolist() == data.lengths(split)[users].tolist()
    assert data.lengths(split).max() <= 40


@pytest.mark.parametrize("split", ["train", "valid"])
def test_global_batches_do_not_depend_on_the_world(split):
    data = small(num_evaluated=50)
    alone = global_batches(data, split, batch_size=12, world=1, seed=3, epoch=1)
    assert global_batches(data, split, batch_size=4, world=3, seed=3, epoch=1) == alone


def test_any_sample_can_be_made_from_its_number_alone():
    data, users = small(), np.array([41, 7, 19])
    together = data.samples("test", users, seed=2)
    for place, user in enumerate(users):
        alone = small().samples("test", np.array([user]), seed=2)
        assert_same(together.select(torch.tensor([place])), alone)


def test_an_epoch_has_every_user_once_in_an_order_of_its_own():
    data = small()
    first, second = (read_samples(data, "train", batch_size=7, epoch=epoch) for epoch in (0, 1))
    assert len(first) == 60 and [sample[0] for sample in first] != [sample[0] for sample in second]
    assert {sample[0] for sample in first} == {sample[0] for sample in second}  # the histories themselves are the same
    assert {sample[1] for sample in first} != {sample[1] for sample in second}  # negatives are drawn again


def test_the_last_two_items_are_held_out_for_validation_and_test():
    data, users = small(max_length=30), np.arange(60)
    train, valid, test = (data.samples(split, users, seed=0) for split in ("train", "valid", "test"))
    whole = test.dense["seen"].to_lists()
    for u, history in enumerate(train.keys["history"].to_lists()):
        assert history == whole[u][:-1] == valid.dense["seen"].to_lists()[u]
        assert valid.labels[u] == whole[u][-1]
        assert test.keys["history"].to_lists()[u] == whole[u][-30:]
    assert max(map(len, whole)) == 31  # else nothing was cut


def test_users_watch_things_again_and_stay_with_a_topic():
    data = small(
        num_users=1_000, num_items=100_000, mean_length=60, max_length=500, num_topics=100, num_evaluated=1_000
    )
    batch = next(read(data, "test", batch_size=1_000))
    history, seen = batch.keys["history"], batch.dense["seen"].to_lists()
    again = sum(int(label) in items for label, items in zip(batch.labels, seen, strict=True)) / 1_000
    assert 0.2 < again < 0.7
    last = history.values[history.offsets[1:] - 1]
    assert (last % 100 == batch.labels % 100).float().mean() > 0.4  # by chance 0.01 to 0.1


def test_popularity_is_a_power_law_and_keys_are_candidates():
    data = small(num_users=2_000, num_items=1_000, num_topics=1, repeats=0.0, spread_keys=True)
    keys = torch.cat([batch.keys["history"].values for batch in read(data, "train", batch_size=500)])
    candidates = data.candidates()
    assert torch.isin(keys, candidates).all() and torch.equal(candidates, candidates.sort().values)
    counts = keys.unique(return_counts=True)[1].sort(descending=True).values.double()
    assert counts[:9].sum() / counts.sum() == pytest.approx(np.log(10) / np.log(1_001), abs=0.03)


def test_seconds_rise_by_little_in_a_session_and_by_much_between_two():
    batch = next(read(small(num_users=200, mean_length=40), "train", batch_size=200))
    gaps = np.concatenate([np.diff(times) for times in batch.dense["timestamps"].to_lists()])
    assert gaps.min() >= 1 and np.median(gaps) < 60
    assert (gaps > 600).mean() == pytest.approx(1 / 20, abs=0.02)
    for times in batch.dense["timestamps"].to_lists():
        assert all(a < b for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_users": 0}, "num_users is 0"),
        ({"num_items": 5, "num_topics": 6}, "num_topics is 6 for 5 items"),
        ({"repeats": 1.5}, "repeats is 1.5"),
        ({"max_length": 1}, "max_length is 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)

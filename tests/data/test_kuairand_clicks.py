"""Drawn clicks: what is behind a history, what was passed over, and that there is something to learn."""

import numpy as np
import pytest
import torch

from nestpipe.batch import check_batch
from nestpipe.data import KuaiRandClicks, KuaiRandLike
from nestpipe.metrics import AUC
from tests.data.data_samples import assert_same, global_batches


def small(**options):
    settings = {
        "num_users": 60,
        "num_items": 500,
        "mean_length": 12,
        "max_length": 40,
        "num_clicked": 3,
        "num_passed": 5,
    }
    return KuaiRandClicks(**(settings | options))


def clicked(batch):
    lists = zip(batch.keys["candidates"].to_lists(), batch.labels.to_lists(), strict=True)
    return [{key for key, label in zip(keys, labels, strict=True) if label} for keys, labels in lists]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_batch_fits_a_ranker(split):
    data, users = small(), np.arange(60)
    batch = data.samples(split, users, seed=0)
    check_batch(batch, data.features)
    assert batch.keys["history"].lengths.tolist() == data.lengths(split).tolist()
    assert batch.keys["history"].lengths.max() == 40
    assert set(batch.keys["candidates"].lengths.tolist()) == {8}
    assert torch.equal(batch.labels.offsets, batch.keys["candidates"].offsets)
    assert batch.labels.sum().tolist() == [3.0] * 60
    times = batch.dense["timestamps"]
    assert torch.equal(times.offsets, batch.keys["history"].offsets)
    assert (batch.dense["now"] > times.last()).all()


def test_histories_are_those_of_kuairand_like_and_go_on_with_what_was_clicked():
    data, users = small(), np.arange(60)
    like = KuaiRandLike(num_users=60, num_items=500, mean_length=12, max_length=40)
    train, valid, test = (data.samples(split, users, seed=0) for split in ("train", "valid", "test"))
    assert train.keys["history"].to_lists() == like.samples("train", users, seed=0).keys["history"].to_lists()
    for before, after in ((train, valid), (valid, test)):
        for u, history in enumerate(after.keys["history"].to_lists()):
            assert set(history[-3:]) == clicked(before)[u]
            assert history[:-3] == before.keys["history"].to_lists()[u][-len(history[:-3]) :]


def test_nothing_is_both_clicked_and_passed_over():
    batch = small(num_items=40, num_topics=2).samples("train", np.arange(60), seed=0)
    lists = zip(batch.keys["candidates"].to_lists(), batch.labels.to_lists(), clicked(batch), strict=True)
    for keys, labels, of_user in lists:
        assert not of_user & {key for key, label in zip(keys, labels, strict=True) if not label}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_global_batches_do_not_depend_on_the_world(split):
    data = small(num_evaluated=50)
    alone = global_batches(data, split, batch_size=12, world=1, seed=3, epoch=1)
    assert global_batches(data, split, batch_size=4, world=3, seed=3, epoch=1) == alone


def test_any_sample_can_be_made_from_its_number_alone():
    data, users = small(spread_keys=True), np.array([41, 7, 19])
    together = data.samples("test", users, seed=2)
    for place, user in enumerate(users):
        assert_same(
            together.select(torch.tensor([place])), small(spread_keys=True).samples("test", np.array([user]), seed=5)
        )


def test_topics_of_the_history_tell_what_is_clicked_and_popularity_does_not():
    data = small(num_users=3_000, num_items=2_000, num_topics=40, num_evaluated=3_000, num_passed=12)
    batch = data.samples("test", np.arange(3_000), seed=0)
    candidates = batch.keys["candidates"]
    popularity = torch.bincount(
        torch.cat([data.samples("train", np.arange(3_000), seed=0).keys["history"].values]), minlength=2_000
    )
    recent = batch.keys["history"].select(candidates.sample_ids()).to_lists()
    of_topic = [
        sum(item % 40 == key % 40 for item in items)
        for key, items in zip(candidates.values.tolist(), recent, strict=True)
    ]
    for scores, least, most in (
        (torch.tensor(of_topic).float(), 0.75, 1.0),
        (popularity[candidates.values].float(), 0.45, 0.56),
    ):
        auc = AUC()
        auc.update(scores, batch.labels.values)
        assert least < auc.compute() < most


@pytest.mark.parametrize(
    ("options", "message"), [({"num_clicked": 0}, "num_clicked is 0"), ({"num_passed": -1}, "num_passed is -1")]
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nestpipe import Batch, Jagged
from nestpipe.data import Histories, HistoryDataset, SyntheticSequences, by_tokens
from nestpipe.data.dataset import skip
from nestpipe.data.epoch import Cut, epoch_of, token_bounds, training_batches
from tests.data.data_samples import assert_same

RNG = np.random.default_rng(0)
LENGTHS = np.clip(np.exp(RNG.normal(2.5, 1, 200)), 3, 200).astype(np.int64)
HISTORY = HistoryDataset(
    Histories(np.arange(200), RNG.integers(0, 500, LENGTHS.sum()), np.concatenate([[0], np.cumsum(LENGTHS)])),
    max_length=60,
    num_negatives=2,
)
SYNTHETIC = SyntheticSequences(num_items=300, lengths="lognormal", mean_length=20, num_samples=170, num_negatives=2)
BY_INDEX = pytest.mark.parametrize("data", [HISTORY, SYNTHETIC], ids=["histories", "synthetic"])
CUTS = [{"batch_size": 8, "batch_tokens": None}, {"batch_size": None, "batch_tokens": 150}]


def cut(data, rank, world, *, squares=None, **how):
    return list(
        training_batches(data, tokens="history", squares=squares, rank=rank, world=world, seed=3, epoch=1, **how)
    )


def histories_of(batch):
    return list(map(tuple, batch.keys["history"].to_lists()))


def test_batches_by_tokens_take_samples_until_the_next_would_be_too_many():
    lengths = np.array([3, 4, 3, 12, 1, 9, 0, 1, 10])
    assert token_bounds(lengths, 10).tolist() == [0, 3, 4, 7, 8, 9]
    assert token_bounds(lengths, 1000).tolist() == [0, 9]
    assert token_bounds(np.array([], np.int64), 5).tolist() == [0]


@BY_INDEX
def test_the_lengths_of_samples_are_known_without_making_them(data):
    epoch = epoch_of(data, "train", seed=3, epoch=1)
    places = np.array([5, 0, 160])
    assert epoch.lengths(places).tolist() == epoch.make(places).keys["history"].lengths.tolist()


@BY_INDEX
@pytest.mark.parametrize("how", CUTS, ids=["samples", "tokens"])
@pytest.mark.parametrize("world", [1, 3])
def test_dealt_batches_hold_the_samples_of_the_same_global_batches(data, how, world):
    plain = [cut(data, rank, world, **how) for rank in range(world)]
    dealt = [cut(data, rank, world, squares=0.05, **how) for rank in range(world)]
    assert len({len(batches) for batches in (*plain, *dealt)}) == 1 and len(plain[0]) > 3
    for before, after in zip(zip(*plain, strict=True), zip(*dealt, strict=True), strict=True):
        assert sorted(itertools.chain(*map(histories_of, before))) == sorted(itertools.chain(*map(histories_of, after)))
    assert sum(batch.size for batches in plain for batch in batches) == epoch_of(data, "train", seed=3, epoch=1).size


@BY_INDEX
def test_a_rank_has_about_as_many_tokens_as_asked_for(data):
    batches = [batch for rank in range(3) for batch in cut(data, rank, 3, batch_size=None, batch_tokens=150)[:-1]]
    tokens = [len(batch.keys["history"].values) for batch in batches]
    assert max(tokens) <= 150 and np.mean(tokens) > 110


@BY_INDEX
def test_dealing_evens_out_what_ranks_compute(data):
    epoch = epoch_of(data, "train", seed=3, epoch=1)
    batches = Cut(epoch, batch_size=16, batch_tokens=None, world=4, squares=0.05)
    before, after = np.sum([[costs.max() for costs in batches.costs(index)] for index in range(2)], 0)
    mean = sum(batches.costs(index)[0].mean() for index in range(2))
    assert 1 - mean / before > 0.15 and 1 - mean / after < 0.05


@BY_INDEX
def test_batches_by_samples_are_those_of_the_data_set_itself(data):
    ours = cut(data, 1, 3, batch_size=8, batch_tokens=None)
    epoch = epoch_of(data, "train", seed=3, epoch=1)
    again = Cut(epoch, batch_size=8, batch_tokens=None, world=3, squares=None).batches(1)
    for a, b in zip(ours, again, strict=True):
        assert_same(a, b)


@BY_INDEX
@pytest.mark.parametrize("how", CUTS, ids=["samples", "tokens"])
def test_batches_that_are_passed_over_are_counted(data, how):
    whole = cut(data, 1, 2, squares=0.05, **how)
    rest = training_batches(data, tokens="history", squares=0.05, rank=1, world=2, seed=3, epoch=1, **how)
    assert skip(rest, 3) == 3
    for a, b in zip(rest, whole[3:], strict=True):
        assert_same(a, b)


def test_neighbouring_batches_that_overlap_are_not_read_by_index():
    data = SyntheticSequences(num_items=300, overlap=0.5)
    assert epoch_of(data, "train", seed=0, epoch=0) is None and epoch_of(data, "valid", seed=0, epoch=0) is not None


@pytest.mark.parametrize("pieces", [[], [1], [5, 0, 30, 2], [50]])
@pytest.mark.parametrize("batch_tokens", [1, 20, 10_000])
def test_a_stream_is_cut_by_tokens_as_samples_read_by_index_are(pieces, batch_tokens):
    rng = np.random.default_rng(1)
    batches = []
    for size in pieces:
        lengths = torch.from_numpy(rng.integers(0, 9, size))
        keys = torch.from_numpy(rng.integers(0, 99, int(lengths.sum())))
        batches.append(Batch({"history": Jagged.from_lengths(keys, lengths)}, {"x": torch.rand(size)}))
    cut_up = list(by_tokens(batches, batch_tokens, tokens="history"))
    if sum(pieces):
        whole = Batch.joined(batches)
        assert_same(Batch.joined(cut_up), whole)
        bounds = token_bounds(whole.keys["history"].lengths.numpy(), batch_tokens)
        assert [batch.size for batch in cut_up] == np.diff(bounds).tolist()
    else:
        assert cut_up == []


def test_a_stream_cut_into_batches_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="batch_tokens is 0; it must be at least 1"):
        list(by_tokens([], 0, tokens="history"))

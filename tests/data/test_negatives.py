"""Negatives that data sets draw: how many for whom, and of what they are a function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.batch import Jagged
from nestpipe.data import Histories, HistoryDataset, KuaiRandLike, SyntheticSequences
from nestpipe.data.dataset import offsets_of


def histories(**options) -> HistoryDataset:
    lengths = np.array([5, 1, 0, 7, 2])
    items = np.array([3, 9, 3, 5, 7, 9, 1, 3, 3, 5, 7, 8, 2, 3, 5])
    return HistoryDataset(
        Histories(np.arange(5), items, offsets_of(lengths)), **{"max_length": 4, "num_negatives": 3, **options}
    )


def sequences(**options) -> SyntheticSequences:
    return SyntheticSequences(**{"num_items": 40, "num_samples": 20, "num_negatives": 3, "mean_length": 6, **options})


def videos(**options) -> KuaiRandLike:
    return KuaiRandLike(
        **{"num_users": 20, "num_items": 40, "mean_length": 6, "min_length": 1, "num_negatives": 3, **options}
    )


@pytest.mark.parametrize("made", [histories, sequences, videos, lambda **options: sequences(overlap=0.5, **options)])
def test_each_sample_has_k_or_each_of_its_positions(made) -> None:
    for per, wanted in (("sample", lambda n: torch.full_like(n, 3)), ("position", lambda n: (n - 1).clamp(min=0) * 3)):
        data = made(negatives_per=per)
        assert data.negatives_per == per
        for split in ("train", "valid"):
            for batch in data.batches(split, batch_size=4, rank=0, world=1, seed=0):
                lengths = batch.keys["history"].lengths
                assert torch.equal(batch.keys["negatives"].lengths, wanted(lengths))


@pytest.mark.parametrize("made", [histories, sequences, videos])
def test_those_of_positions_do_not_depend_on_the_other_samples(made) -> None:
    whole, parts = (
        [
            sample
            for batch in made(negatives_per="position").batches("train", batch_size=size, rank=0, world=1, seed=2)
            for sample in batch.keys["negatives"].to_lists()
        ]
        for size in (20, 3)
    )
    assert whole == parts and any(whole)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="negatives_per is 'token'; use one of sample, position"):
        histories(negatives_per="token")


def test_log_q_is_the_share_of_training_events() -> None:
    data = histories(log_q=True, max_length=50)
    # All but the last two of each history of three or more: 3 9 3 | 9 | 1 3 3 5 7 | 3 5
    counts = {3: 5, 9: 2, 1: 1, 5: 2, 7: 1}
    for split in ("train", "test"):
        for batch in data.batches(split, batch_size=5, rank=0, world=1, seed=0):
            log_q, keys = batch.dense["log_q"], batch.keys["history"]
            assert isinstance(log_q, Jagged) and torch.equal(log_q.offsets, keys.offsets)
            wanted = [np.log(counts.get(key, 1) / 11) for key in keys.values.tolist()]
            torch.testing.assert_close(log_q.values, torch.tensor(wanted, dtype=torch.float32))
    assert "log_q" not in next(iter(histories().batches("train", batch_size=5, rank=0, world=1, seed=0))).dense

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.kernels import reference
from nestpipe.kernels.dealing import costs_of, deal


def heavy_tailed(world: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of samples, and their homes: of different numbers of samples."""
    rng = np.random.default_rng(seed)
    home = np.sort(rng.integers(0, world, world * samples))
    return np.clip(np.exp(rng.normal(4.5, 1.2, len(home))), 2, 2048).astype(np.int64), home


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [0, 1, 5, 60])
def test_the_kernel_equals_the_reference(world: int, samples: int) -> None:
    tokens, home = heavy_tailed(world, samples, seed=world)
    cost = costs_of(tokens, 0.002)
    expected = reference.deal(torch.from_numpy(cost), torch.from_numpy(home), world)
    assert deal(cost, home, world).tolist() == expected.tolist()


def test_workers_come_out_even_where_samples_allow_it() -> None:
    for seed in range(5):
        tokens, home = heavy_tailed(4, 64, seed)
        cost = costs_of(tokens, 0.002)
        before, after = (np.bincount(worker, cost, 4) for worker in (home, deal(cost, home, 4)))
        assert 1 - before.mean() / before.max() > 0.1 and 1 - after.mean() / after.max() < 0.005


def test_what_is_even_stays_where_it_is() -> None:
    home = np.repeat(np.arange(3), 4)
    assert deal(np.full(12, 5.0), home, 3).tolist() == home.tolist()


def test_only_the_excess_travels() -> None:
    cost = np.array([100.0, 40, 30, 20, 10, 50, 30, 20])  # 200 and 100
    home = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    worker = deal(cost, home, 2)
    assert np.bincount(worker, cost).tolist() == [150, 150]
    assert cost[worker != home].sum() == 50 and (worker[home == 1] == 1).all()


def test_a_sample_that_costs_more_than_an_even_part_has_a_worker_to_itself() -> None:
    cost = np.array([1000.0, 1, 1, 1, 1, 1, 1])
    worker = deal(cost, np.zeros(7, np.int64), 3)
    assert worker[0] == 0 and (worker[1:] != 0).all()


def test_squares_make_long_samples_dearer_than_many_short_ones() -> None:
    assert costs_of(np.array([10, 1000]), 0).tolist() == [10, 1000]
    assert costs_of(np.array([10, 1000]), 0.01).tolist() == [11, 11000]

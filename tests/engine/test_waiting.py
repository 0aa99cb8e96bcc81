from __future__ import annotations

import numpy as np
import pytest

from nestpipe.engine.waiting import WARM_UP, Load, Loads, Waiting, fit_squares, gather
from nestpipe.exchange.transport import Transport
from tests.cluster import Cluster


def steps(seconds: tuple[float, float, float], *, noise: float = 0.0, seed: int = 0) -> Loads:
    """Steps of 20 samples that take `seconds` for the step, for a token, and for the square of a sample's tokens."""
    rng = np.random.default_rng(seed)
    loads = Loads([Load(99.0, 1.0, 1.0, 0, 0)] * WARM_UP)
    for _ in range(40):
        tokens = np.clip(np.exp(rng.normal(4.5, 1.2, 20)), 2, 2048)
        load = np.array([1, tokens.sum(), (tokens**2).sum()])
        loads.append(Load(float(seconds @ load) * (1 + noise * rng.standard_normal()), load[1], load[2], 0, 0))
    return loads


@pytest.mark.parametrize("squares", [0.0, 0.0005, 0.01])
def test_what_the_square_of_a_token_costs_is_found_from_times(squares: float) -> None:
    loads = steps((2e-3, 1e-6, squares * 1e-6))
    assert fit_squares(loads, Transport()) == pytest.approx(squares, rel=1e-2, abs=1e-9)


def test_noise_does_not_move_it_far() -> None:
    assert fit_squares(steps((0, 1e-6, 2e-9), noise=0.05), Transport()) == pytest.approx(2e-3, rel=0.5)


@pytest.mark.parametrize(("seconds", "squares"), [((1.0, 0.0, 0.0), 0.0), ((0.0, 0.0, 1e-6), 1.0)])
def test_where_tokens_cost_nothing_it_has_a_bound(seconds: tuple[float, float, float], squares: float) -> None:
    assert fit_squares(steps(seconds), Transport()) == squares


def told() -> tuple[float, Waiting | None, Waiting | None]:
    import torch.distributed as dist

    rows = Transport(dist.group.WORLD)
    fitted = fit_squares(steps((0, 1e-6, 2e-9), noise=0.1, seed=rows.rank), rows)
    slow = 3.0 if rows.rank else 1.0
    loads = Loads([Load(slow, 10 * slow, 0, 8.0 * slow, 16.0)] * 2)
    return fitted, gather(loads, rows), gather(Loads(), rows)


def test_all_workers_come_to_the_same(cluster: Cluster) -> None:
    first, second = cluster.run(2, told)
    assert first == second
    waiting = first[1]
    assert waiting == Waiting(pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0, 1.5) and first[2] is None
    assert str(waiting) == (
        "33.3% of the model's time; predicted 33.3% before samples are dealt -> 0.0% after; tokens, the most over the mean: 1.50"
    )


def test_where_samples_stay_nothing_is_predicted() -> None:
    waiting = gather(Loads([Load(1.0, 0, 0, 0, 0)]), Transport())
    assert waiting == Waiting(0.0) and str(waiting) == "0.0% of the model's time"

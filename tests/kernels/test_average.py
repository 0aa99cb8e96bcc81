from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.kernels import average as kernels
from nestpipe.kernels import reference, update
from nestpipe.optim import ScaledRowwiseAdagrad
from tests.kernels.cases import Records, few, floats, one_each, same_bits, seeds

REPLICAS = [1, 2, 3, 8]


def merged(name: str, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """What the kernel makes of rows [M, N, D] and their state: values, state and words."""
    replicas = [Records(*pair) for pair in zip(rows, state, strict=True)]
    records_MNW = np.stack([replica.words for replica in replicas])
    out = Records(torch.zeros_like(rows[0]), torch.full_like(state[0], 7.0))
    words = np.full_like(records_MNW[0], 7.0)
    getattr(kernels, name)(records_MNW, rows.shape[2], out.half, words)
    out.words = words
    return out.values, out.state, words


def draw(rng: np.random.Generator, *shape: int, half: bool) -> Tensor:
    return torch.from_numpy(floats(rng, *shape)).to(torch.bfloat16 if half else torch.float32)


@given(
    seed=seeds, num_replicas=st.sampled_from(REPLICAS), n=st.integers(0, 5), dim=st.integers(1, 19),
    state_floats=st.integers(0, 9), half=st.booleans(),
)  # fmt: skip
@few
def test_average_equals_the_reference_bit_for_bit(seed, num_replicas, n, dim, state_floats, half) -> None:
    rng = np.random.default_rng(seed)
    rows = draw(rng, num_replicas, n, dim, half=half)
    state = draw(rng, num_replicas, n, state_floats, half=False)
    values, averaged, words = merged("average", rows, state)
    expected_values, expected_state = reference.average(rows, state)
    assert same_bits(values, expected_values) and same_bits(averaged, expected_state)
    if half and dim % 2:
        assert not np.ascontiguousarray(words).view(np.uint16)[:, dim].any()


@pytest.mark.parametrize("name", ["average", "average_row_scaled"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 7, 8, 13])
def test_equal_replicas_stay_as_they_are(name: str, half: bool, num_replicas: int) -> None:
    rng = np.random.default_rng(num_replicas)
    rows, state = draw(rng, 1, 20, 11, half=half), draw(rng, 1, 20, 7, half=False).abs()
    state[:, :, update.OWN :] = 0
    values, averaged, _ = merged(name, rows.repeat(num_replicas, 1, 1), state.repeat(num_replicas, 1, 1))
    assert same_bits(values, rows[0]) and same_bits(averaged, state[0])


# -- one scale for each row ------------------------------------------------------------------------------------------


def train(
    rows: Tensor, grads: list[np.ndarray], *, lr: float = 0.1, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Replicas [M, N, D] after updates with gradients [M, N, D] in turn; a gradient of zeros: the row is not touched."""
    num_replicas, n, _ = rows.shape
    state = torch.zeros(n, update.ROW_SCALED_FLOATS) if state is None else state
    replicas = [Records(replica, state) for replica in rows]
    scratch, f32 = update.scratch_for(rows.shape[2]), np.float32
    for grads_MND in grads:
        is_touched = grads_MND.any(2)
        sharers = is_touched.sum(0)
        for replica, own, touched in zip(replicas, grads_MND, is_touched, strict=True):
            at = np.flatnonzero(touched)
            update.row_scaled_adagrad(
                replica.rows, at, one_each(own[at].copy()), scratch, f32(1), f32(lr), f32(0), f32(0), f32(1e-20),
                num_replicas, sharers[at],
            )  # fmt: skip
    return torch.stack([replica.values for replica in replicas]), torch.stack([replica.state for replica in replicas])


@given(
    seed=seeds, num_replicas=st.sampled_from(REPLICAS), n=st.integers(0, 5), dim=st.integers(1, 19), half=st.booleans(),
    steps=st.integers(1, 4), lr=st.sampled_from([0.1, 0.0]),
)  # fmt: skip
@few
def test_average_row_scaled_equals_the_reference(seed, num_replicas, n, dim, half, steps, lr) -> None:
    rng = np.random.default_rng(seed)
    rows = draw(rng, 1, n, dim, half=half).repeat(num_replicas, 1, 1)
    common = torch.from_numpy(rng.random((n, update.ROW_SCALED_FLOATS), np.float32))
    common[:, update.OWN :] = 0
    common[: n // 2] = 0
    is_touched = rng.random((steps, num_replicas, n, 1)) < 0.7
    grads = list(np.where(is_touched, rng.standard_normal((steps, num_replicas, n, dim)), 0).astype(np.float32))
    rows, state = train(rows, grads, lr=lr, state=common)
    values, averaged, _ = merged("average_row_scaled", rows, state)
    expected_values, expected_state = reference.average_row_scaled(rows, state)
    assert same_bits(values, expected_values)
    torch.testing.assert_close(averaged, expected_state, rtol=1e-4, atol=1e-5)
    assert not averaged[:, update.OWN :].any()


def accumulated(state: Tensor) -> Tensor:
    """The sum of squares of mean gradients, as the state has it."""
    agreed = state[:, update.AGREED]
    agree = torch.where(agreed > 0, (state[:, update.CROSS] / agreed).clamp(0, 1), 1.0)
    return state[:, update.SQUARES] + agree * agreed


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_replicas_that_agree_take_the_steps_of_one_table(num_replicas: int, half: bool) -> None:
    rng, f32 = np.random.default_rng(1), np.float32
    start = draw(rng, 4, 11, half=half)
    alone = Records(start, torch.zeros(4, 1))
    values, state = start, torch.zeros(4, update.ROW_SCALED_FLOATS)
    for window in range(3):
        grads = [floats(rng, 4, 11) for _ in range(window + 1)]
        for mean in grads:
            settings = f32(1), f32(0.1), f32(0), f32(0), f32(1e-10)
            scratch = update.scratch_for(11)
            update.rowwise_adagrad(alone.rows, np.arange(4), one_each(mean.copy()), scratch, *settings)
        replicas = values.repeat(num_replicas, 1, 1)
        values, state, _ = merged(
            "average_row_scaled", *train(replicas, [np.stack([g] * num_replicas) for g in grads], state=state)
        )
    if half:  # a value that lies between two bfloat16 may be rounded to either
        torch.testing.assert_close(values.float(), alone.values.float(), rtol=2**-7, atol=2**-7)
    else:
        torch.testing.assert_close(values, alone.values)
        torch.testing.assert_close(accumulated(state), alone.state[:, 0])


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("touching", [1, 2, 8])
def test_averaging_after_every_step_knows_the_square_of_the_mean_gradient(num_replicas: int, touching: int) -> None:
    rng = np.random.default_rng(0)
    grads = (1 + rng.standard_normal((num_replicas, 50, 64))).astype(np.float32)
    grads[touching:] = 0
    common = torch.zeros(50, update.ROW_SCALED_FLOATS)
    common[:, update.SQUARES] = 100.0  # so that all replicas have nearly the same step
    rows, state = train(torch.zeros(num_replicas, 50, 64), [grads], state=common)
    _, averaged, _ = merged("average_row_scaled", rows, state)
    expected = 100 + torch.from_numpy(grads.mean(0)).square().mean(1)
    torch.testing.assert_close(accumulated(averaged), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_without_movement_the_agreement_stays_as_it_was(lr: float) -> None:
    common = torch.tensor([[1.0, 0.5, 2.0, 0, 0, 0, 0]])
    grads = np.random.default_rng(0).standard_normal((4, 1, 8)).astype(np.float32)
    rows, state = train(torch.zeros(4, 1, 8), [grads], lr=lr, state=common)
    _, averaged, _ = merged("average_row_scaled", rows, state)
    before, after = (float(s[0, update.CROSS] / s[0, update.AGREED]) for s in (common, averaged))
    assert before == 0.25 and (after == pytest.approx(before)) == (lr == 0.0)
    assert averaged[0, update.SQUARES] == pytest.approx(1.0 + (grads**2).mean(2).sum() / 16)


def test_the_optimizer_has_room_for_the_state_of_the_kernels() -> None:
    by_row: Any = ScaledRowwiseAdagrad(scale="row")
    assert by_row.state_floats(5) == update.ROW_SCALED_FLOATS

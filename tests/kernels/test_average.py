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
    rows, state = draw(rng, 1, 20, 11, half=half), draw(rng, 1, 20, 9, half=False).abs()
    state[:, :, update.OWN :] = 0
    values, averaged, _ = merged(name, rows.repeat(num_replicas, 1, 1), state.repeat(num_replicas, 1, 1))
    assert same_bits(values, rows[0]) and same_bits(averaged, state[0])


# -- one scale for each row ------------------------------------------------------------------------------------------


def train(
    rows: Tensor, grads: list[np.ndarray], *, state: Tensor | None = None, first: int = 1
) -> tuple[Tensor, Tensor]:
    """Replicas [M, N, D] after updates with gradients [M, N, D] in turn; a gradient of zeros: the row is not touched.

    first: the number of the first update."""
    num_replicas, n, _ = rows.shape
    state = torch.zeros(n, update.ROW_SCALED_FLOATS) if state is None else state
    replicas = [Records(replica, state) for replica in rows]
    scratch, f32 = update.scratch_for(rows.shape[2]), np.float32
    for updates, grads_MND in enumerate(grads, start=first):
        is_touched = grads_MND.any(2)
        sharers = is_touched.sum(0)
        for replica, own, touched in zip(replicas, grads_MND, is_touched, strict=True):
            at = np.flatnonzero(touched)
            update.row_scaled_adagrad(
                replica.rows, at, one_each(own[at].copy()), scratch, f32(1), f32(0.1), f32(0), f32(0), f32(1e-20),
                num_replicas, sharers[at], updates,
            )  # fmt: skip
    return torch.stack([replica.values for replica in replicas]), torch.stack([replica.state for replica in replicas])


@given(
    seed=seeds, num_replicas=st.sampled_from(REPLICAS), n=st.integers(0, 5), dim=st.integers(1, 19), half=st.booleans(),
    steps=st.integers(1, 4),
)  # fmt: skip
@few
def test_average_row_scaled_equals_the_reference(seed, num_replicas, n, dim, half, steps) -> None:
    rng = np.random.default_rng(seed)
    rows = draw(rng, 1, n, dim, half=half).repeat(num_replicas, 1, 1)
    common = torch.from_numpy(rng.random((n, update.ROW_SCALED_FLOATS), np.float32))
    common[:, update.OWN :] = 0
    common[: n // 2] = 0
    is_touched = rng.random((steps, num_replicas, n, 1)) < 0.7
    grads = list(np.where(is_touched, rng.standard_normal((steps, num_replicas, n, dim)), 0).astype(np.float32))
    rows, state = train(rows, grads, state=common)
    values, averaged, _ = merged("average_row_scaled", rows, state)
    expected_values, expected_state = reference.average_row_scaled(rows, state)
    assert same_bits(values, expected_values)
    torch.testing.assert_close(averaged, expected_state, rtol=1e-6, atol=1e-6)
    assert not averaged[:, update.OWN :].any()


def accumulated(state: Tensor) -> Tensor:
    """The sum of squares of mean gradients, as the state has it."""
    return state[:, update.SQUARES] + state[:, update.CROSS]


@pytest.mark.parametrize("dim", [1, 3, 4])
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_averaging_after_every_step_knows_the_square_of_the_mean_gradient_of_a_short_row(
    num_replicas: int, dim: int
) -> None:
    rng, state = np.random.default_rng(0), torch.zeros(50, update.ROW_SCALED_FLOATS)
    expected, values = torch.zeros(50), torch.zeros(50, dim)
    for step in range(5):
        is_touched = rng.random((num_replicas, 50, 1)) < 0.7
        grads = np.where(is_touched, 1 + rng.standard_normal((num_replicas, 50, dim)), 0).astype(np.float32)
        replicas = train(values.repeat(num_replicas, 1, 1), [grads], state=state, first=step)
        values, state, _ = merged("average_row_scaled", *replicas)
        expected += torch.from_numpy(grads.mean(0)).square().mean(1)
    torch.testing.assert_close(accumulated(state), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", ["same", "own way", "turns back", "different steps"])
def test_the_square_of_the_mean_gradient_is_right_on_average_however_gradients_go_on(kind: str, every: int) -> None:
    """Gradients of one step to the next: the same, each replica its own; taken back; or of one replica after the other."""
    rng, num_replicas, n, dim = np.random.default_rng(0), 4, 20, 16
    state, expected = torch.zeros(n, update.ROW_SCALED_FLOATS), torch.zeros(n)
    values, signal = torch.zeros(n, dim), np.float32(0.5)
    own_way = rng.standard_normal((num_replicas, n, dim)).astype(np.float32)
    for window in range(400 // every):
        grads = []
        for step in range(window * every, (window + 1) * every):
            noise = rng.standard_normal((num_replicas, n, dim)).astype(np.float32)
            drawn = {"same": noise[:1] + 0 * noise, "own way": signal + own_way}.get(kind, signal + noise)
            if kind == "turns back" and step % 2:
                drawn = signal - (grads[-1] - signal if grads else noise)
            elif kind == "different steps":
                drawn = np.where(np.arange(num_replicas)[:, None, None] == step % num_replicas, drawn, 0)
            grads.append(drawn.astype(np.float32))
            expected += torch.from_numpy(grads[-1].mean(0)).square().mean(1)
        replicas = train(values.repeat(num_replicas, 1, 1), grads, state=state, first=1 + window * every)
        values, state, _ = merged("average_row_scaled", *replicas)
    ratio = accumulated(state) / expected
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.05) and ratio.std() < 0.25


@pytest.mark.parametrize("half", [False, True])
def test_replicas_that_agree_take_the_first_steps_of_one_table(half: bool) -> None:
    rng, f32, num_replicas = np.random.default_rng(1), np.float32, 3
    start = draw(rng, 4, 11, half=half)
    alone, scratch = Records(start, torch.zeros(4, 1)), update.scratch_for(11)
    grads = [floats(rng, 4, 11) for _ in range(3)]
    for mean in grads:
        settings = f32(1), f32(0.1), f32(0), f32(0), f32(1e-10)
        update.rowwise_adagrad(alone.rows, np.arange(4), one_each(mean.copy()), scratch, *settings)
    replicas = train(start.repeat(num_replicas, 1, 1), [np.stack([g] * num_replicas) for g in grads])
    values, _, _ = merged("average_row_scaled", *replicas)
    tolerance = 2**-7 if half else 1e-5  # a value that lies between two bfloat16 may be rounded to either
    torch.testing.assert_close(values.float(), alone.values.float(), rtol=tolerance, atol=tolerance)


def test_the_optimizer_has_room_for_the_state_of_the_kernels() -> None:
    by_row: Any = ScaledRowwiseAdagrad(scale="row")
    assert by_row.state_floats(5) == update.ROW_SCALED_FLOATS

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import reference, update
from tests.kernels.cases import Records, few, floats, int64, one_each, same_bits, seeds

STATE_FLOATS = {
    "sgd": lambda dim: 0,
    "adagrad": lambda dim: dim,
    "rowwise_adagrad": lambda dim: 1,
    "scaled_rowwise_adagrad": lambda dim: 1,
    "row_scaled_adagrad": lambda dim: update.ROW_SCALED_FLOATS,
    "adam": lambda dim: 2 * dim,
}
OPTIMIZERS = list(STATE_FLOATS)


def state_floats(name: str, dim: int) -> int:
    return STATE_FLOATS[name](dim)


def run_kernel(name: str, records: Records, positions: np.ndarray, grads: Any, **settings: Any) -> None:
    """Calls the kernel as the store does: settings as float32 except for the betas of Adam."""
    f32 = np.float32
    common = [f32(settings.get(setting, usual)) for setting, usual in
              (("scale", 1.0), ("lr", 0.1), ("weight_decay", 0.0), ("clip", 0.0))]  # fmt: skip
    own: list[Any] = []
    if name == "adam":
        betas = settings.get("beta1", 0.9), settings.get("beta2", 0.999)
        own = [*betas, f32(settings.get("eps", 1e-8)), int(settings.get("updates", 1))]
    elif name != "sgd":
        own = [f32(settings.get("eps", 1e-10))]
    if name == "scaled_rowwise_adagrad":
        own.append(f32(settings.get("c", 1.0)))
    elif name == "row_scaled_adagrad":
        own += [int(settings.get("num_replicas", 1)), np.asarray(settings.get("sharers", ()), np.int64)]
        own.append(int(settings.get("updates", 1)))
    gradients = grads if isinstance(grads, update.Gradients) else one_each(grads)
    getattr(update, name)(records.rows, positions, gradients, update.scratch_for(records.dim), *common, *own)


# lr and the like as powers of two would hide a missing rounding; these do not.
settings_of_all = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 0.1, 0.037]),
        "scale": st.sampled_from([1.0, 1 / 3, 0.01]),
        "weight_decay": st.sampled_from([0.0, 0.013]),
        "clip": st.sampled_from([0.0, 0.7, 1e6]),
    }
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(
    seed=seeds, dim=st.integers(1, 19), n=st.integers(0, 12), half=st.booleans(), settings=settings_of_all,
    updates=st.integers(1, 2000),
)  # fmt: skip
@few
def test_optimizer_equals_the_reference_bit_for_bit(name, seed, dim, n, half, settings, updates) -> None:
    rng = np.random.default_rng(seed)
    if name == "adam":
        settings = settings | {"updates": updates, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
    elif name != "sgd":
        settings = settings | {"eps": 1e-5}
    if name == "scaled_rowwise_adagrad":
        settings = settings | {"c": updates % 9 + 1}
    elif name == "row_scaled_adagrad":
        replicas = (1, 2, 3, 8)[updates % 4]
        sharers = torch.from_numpy(rng.integers(1, replicas + 1, n)) if updates % 3 else None
        settings = (
            settings
            | {"num_replicas": replicas, "updates": updates}
            | ({} if sharers is None else {"sharers": sharers})
        )
    rows = torch.from_numpy(floats(rng, 15, dim)).to(torch.bfloat16 if half else torch.float32)
    state = torch.from_numpy(floats(rng, 15, state_floats(name, dim))).abs()
    records = Records(rows, state, shift=1, spare=1)
    positions, grads = rng.permutation(15)[:n].astype(np.int64), floats(rng, n, dim)
    expected_rows, expected_state = rows.clone(), state.clone()
    expected_rows[positions], expected_state[positions] = getattr(reference, name)(
        rows[positions], state[positions], torch.from_numpy(grads.copy()), **settings
    )
    run_kernel(name, records, positions, grads, **settings)
    assert same_bits(records.values, expected_rows)  # rows that were not touched included
    assert same_bits(records.state, expected_state)
    assert not records.words[:, -1].any()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_five_steps_equal_the_optimizer_of_torch(name: str, weight_decay: float) -> None:
    torch.manual_seed(0)
    start = torch.randn(6, 10)
    state = torch.full((6, state_floats(name, 10)), 0.25 if name == "adagrad" else 0.0)
    records = Records(start, state)
    parameter = torch.nn.Parameter(start.clone())
    make = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1, weight_decay=weight_decay),
        "adagrad": lambda: torch.optim.Adagrad(
            [parameter], lr=0.1, weight_decay=weight_decay, initial_accumulator_value=0.25
        ),
        # All rows are touched in every step, where lazy Adam is Adam; but eps counts before the bias correction here,
        # as in SparseAdam, and after it in torch.optim.Adam: so none.
        "adam": lambda: torch.optim.Adam([parameter], lr=0.1, weight_decay=weight_decay, eps=0.0),
    }
    peer = make[name]()
    for step in range(1, 6):
        grads = torch.randn(6, 10)
        parameter.grad = grads.clone()
        peer.step()
        more = {"updates": step, "eps": 0.0} if name == "adam" else {}
        run_kernel(name, records, np.arange(6), grads.numpy(), lr=0.1, weight_decay=weight_decay, **more)
        torch.testing.assert_close(records.values, parameter.data, rtol=1e-5, atol=1e-6)


def test_adam_equals_sparse_adam_when_rows_come_and_go() -> None:
    torch.manual_seed(0)
    start = torch.randn(6, 4)
    records, parameter = Records(start, torch.zeros(6, 8)), torch.nn.Parameter(start.clone())
    peer = torch.optim.SparseAdam([parameter], lr=0.05, eps=1e-3)
    for step, touched in enumerate([[0, 1], [1, 5], [2], [0, 1, 2, 3], [5]], start=1):
        grads = torch.randn(len(touched), 4)
        parameter.grad = torch.sparse_coo_tensor(torch.tensor([touched]), grads, (6, 4), check_invariants=True)
        peer.step()
        run_kernel("adam", records, int64(touched), grads.clone().numpy(), lr=0.05, eps=1e-3, updates=step)
    torch.testing.assert_close(records.values, parameter.data, rtol=1e-5, atol=1e-6)
    assert same_bits(records.values[4], start[4])


def test_rowwise_adagrad_by_hand() -> None:
    records = Records(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.5]]))
    run_kernel("rowwise_adagrad", records, int64([0]), np.array([[3.0, 4.0]], np.float32), lr=0.5, eps=0.25)
    # 1.5 + (9 + 16) / 2 = 14; the step is 0.5 / (sqrt(14) + 0.25)
    step = 0.5 / (14**0.5 + 0.25)
    assert records.state.item() == 14
    torch.testing.assert_close(records.values, torch.tensor([[1 - 3 * step, 1 - 4 * step]]))


def test_a_scale_of_one_is_row_wise_adagrad_with_eps_under_the_root() -> None:
    rng = np.random.default_rng(0)
    start = torch.from_numpy(floats(rng, 4, 11))
    scaled, rowwise = (Records(start, torch.full((4, 1), 0.5)) for _ in range(2))
    for _ in range(5):
        grads = floats(rng, 4, 11)
        run_kernel("scaled_rowwise_adagrad", scaled, np.arange(4), grads.copy(), eps=0.0, clip=2.0, weight_decay=0.1)
        run_kernel("rowwise_adagrad", rowwise, np.arange(4), grads.copy(), eps=0.0, clip=2.0, weight_decay=0.1)
    assert same_bits(scaled.values, rowwise.values) and same_bits(scaled.state, rowwise.state)


def test_a_scaled_step_by_hand() -> None:
    records = Records(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.5]]))
    grads = np.array([[3.0, 4.0]], np.float32)
    run_kernel("scaled_rowwise_adagrad", records, int64([0]), grads, lr=0.5, eps=0.5, c=4)
    # 1.5 + (9 + 16) / 2 = 14; the step is 0.5 / sqrt(14 / 4 + 0.5) = 0.25
    assert records.state.item() == 14
    assert records.values.tolist() == [[1 - 0.75, 1 - 1.0]]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("sharers", [{}, {"sharers": [1] * 4}])
def test_a_replica_alone_scales_rows_by_one(half: bool, sharers: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    start = torch.from_numpy(floats(rng, 4, 11)).to(torch.bfloat16 if half else torch.float32)
    by_row, scaled = Records(start, torch.zeros(4, 9)), Records(start, torch.zeros(4, 1))
    for _ in range(5):
        grads, settings = floats(rng, 4, 11), {"clip": 2.0, "weight_decay": 0.1}
        run_kernel("row_scaled_adagrad", by_row, np.arange(4), grads.copy(), **settings, **sharers)
        run_kernel("scaled_rowwise_adagrad", scaled, np.arange(4), grads.copy(), **settings)
    assert same_bits(by_row.values, scaled.values)
    assert same_bits(by_row.state[:, update.SQUARES], scaled.state[:, 0])
    assert not by_row.state[:, 1:].any()  # nothing waits for an average


def test_a_row_scaled_step_by_hand() -> None:
    state = torch.tensor([[0.5, 0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]])
    records = Records(torch.tensor([[1.0, 1.0]]), state)
    grads = np.array([[1.0, 7.0]], np.float32)  # a mean square of 25
    run_kernel("row_scaled_adagrad", records, int64([0]), grads, lr=0.5, eps=1.0, num_replicas=4, sharers=[3])
    # Agreement is 0.25 / 0.5. This replica's squares are 1 + 25, and 2 + 2 * 25 with the others': 3 sharers in the mean.
    # The sum: 0.5 + 0.5 * 0.5 before, 3 * (26 + 0.5 * 52) / 16 since.
    step = 0.5 / (0.75 + 9.75 + 1.0) ** 0.5
    torch.testing.assert_close(records.values, torch.tensor([[1 - step, 1 - 7 * step]]))
    a, b = reference.signs(1, 2).tolist()
    torch.testing.assert_close(records.state, torch.tensor([[0.5, 0.25, 0.5, 26, 52, 4 + a, 4 + 7 * b, 4, 4]]))


def test_signs_of_a_sketch_are_even_and_independent_from_value_to_value_and_from_batch_to_batch() -> None:
    drawn = torch.stack([reference.signs(updates, 64) for updates in range(1, 1001)])
    assert set(drawn.flatten().tolist()) == {-1, 1}
    for correlations in (drawn.T @ drawn / 1000, drawn[:64] @ drawn[:64].T / 64):
        off_diagonal = correlations - torch.eye(64)
        assert off_diagonal.mean().abs() < 0.01 and off_diagonal.abs().max() < 0.75
    assert drawn.mean().abs() < 0.01


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_clip_and_decay_of_a_row_that_one_replica_touches_are_those_of_the_mean_gradient(num_replicas: int) -> None:
    start, grads = torch.tensor([[3.0, 4.0]]), np.array([[30.0, 40.0]], np.float32)
    settings = {"lr": 0.5, "clip": 2.0, "weight_decay": 0.25}
    shared = Records(start, torch.zeros(1, 1))
    run_kernel("rowwise_adagrad", shared, int64([0]), grads.copy(), **settings)
    replica = Records(start, torch.zeros(1, 9))
    its_own = grads * np.float32(num_replicas)
    run_kernel("row_scaled_adagrad", replica, int64([0]), its_own, num_replicas=num_replicas, sharers=[1], **settings)
    mean = start + (replica.values - start) / num_replicas  # the other replicas are where they were
    torch.testing.assert_close(mean, shared.values)


@given(seed=seeds, n=st.integers(1, 8))
@few
def test_without_sharers_the_step_is_the_shortest(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    state, grads = torch.from_numpy(floats(rng, 1, 9)).abs(), floats(rng, 1, 3)
    known, unknown = (Records(torch.zeros(1, 3), state) for _ in range(2))
    run_kernel("row_scaled_adagrad", known, int64([0]), grads.copy(), num_replicas=8, sharers=[n])
    run_kernel("row_scaled_adagrad", unknown, int64([0]), grads.copy(), num_replicas=8)
    assert unknown.values.norm() <= known.values.norm()


def test_clipping_shortens_a_long_gradient_to_the_limit_and_leaves_a_short_one() -> None:
    records = Records(torch.zeros(2, 2))
    run_kernel("sgd", records, int64([0, 1]), np.array([[30.0, 40.0], [0.3, 0.4]], np.float32), lr=1.0, clip=5.0)
    torch.testing.assert_close(records.values, torch.tensor([[-3.0, -4.0], [-0.3, -0.4]]))


def test_the_gradient_is_scaled_before_it_is_clipped_and_decay_comes_after() -> None:
    records = Records(torch.tensor([[10.0, 0.0]]))
    grads = np.array([[60.0, 80.0]], np.float32)
    run_kernel("sgd", records, int64([0]), grads, lr=1.0, scale=0.1, clip=5.0, weight_decay=0.5)
    torch.testing.assert_close(records.values, torch.tensor([[10 - 3 - 5.0, -4.0]]))


def test_a_bfloat16_row_is_rounded_to_the_nearest_once() -> None:
    # The spacing of bfloat16 at 1 is 2^-7. A step of 3/4 of it moves the row by one, a step of 1/4 leaves it.
    records = Records(torch.ones(2, 1, dtype=torch.bfloat16))
    run_kernel("sgd", records, int64([0, 1]), np.array([[-0.75], [-0.25]], np.float32) * 2.0**-7, lr=1.0)
    assert records.values.tolist() == [[1 + 2.0**-7], [1.0]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_gradient_leaves_a_newborn_row_alone(name: str) -> None:
    records = Records(torch.ones(1, 3), torch.zeros(1, state_floats(name, 3)))
    run_kernel(name, records, int64([0]), np.zeros((1, 3), np.float32), clip=1.0)
    assert records.values.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(seed=seeds, num_rows=st.integers(1, 6), num_entries=st.integers(0, 20), weighted=st.booleans())
@few
def test_gradients_of_a_row_are_summed_in_order(name, seed, num_rows, num_entries, weighted) -> None:
    rng, dim = np.random.default_rng(seed), 5
    grads, origins = floats(rng, 7, dim), rng.integers(0, 7, num_entries).astype(np.int32)
    row_of = rng.integers(0, num_rows, num_entries).astype(np.int32)
    weights = floats(rng, num_entries) if weighted else np.empty(0, np.float32)
    start, cursor = np.full(num_rows + 1, -1, np.int32), np.full(num_rows, -1, np.int32)
    by_row = update.Gradients(
        grads, start, np.full(num_entries, -1, np.int32), np.full(len(weights), np.nan, np.float32)
    )
    update.group_by_row(row_of, num_rows, origins, weights, start, cursor, by_row.origins, by_row.weights)
    summed = reference.sums_by_row(
        *(torch.from_numpy(row_of), num_rows), *map(torch.from_numpy, (grads, origins, weights))
    )

    rows, state = torch.from_numpy(floats(rng, num_rows, dim)), torch.rand(num_rows, state_floats(name, dim))
    records, other = Records(rows, state), Records(rows, state)
    positions = rng.permutation(num_rows).astype(np.int64)
    run_kernel(name, records, positions, by_row)
    run_kernel(name, other, positions, summed.numpy().copy())
    assert same_bits(records.values, other.values)
    assert same_bits(records.state, other.state)

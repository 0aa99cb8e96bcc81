"""Trainer: what fit, step and evaluate promise, on one worker and on several; and how every bad input ends."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Adam, Batch, Eviction, Feature, Jagged, Output, RowwiseAdagrad, Table, Trainer
from nestpipe.errors import TrainingError
from nestpipe.metrics import AUC, NormalizedEntropy
from nestpipe.models import DLRM
from nestpipe.optim import RowOptimizer
from tests.cluster import Cluster
from tests.waiting import PATIENCE

NUM_KEYS, DIM = 50, 4
FEATURES = [Feature("list", "item"), Feature("bag", "tag", "mean")]
BAD = 1e30  # a dense input of this size makes the loss of its sample NaN


def tables(**options: Any) -> list[Table]:
    return [Table(name, DIM, **{"optimizer": Adagrad(lr=0.1), **options}) for name in ("item", "tag")]


def tokens(keys: Jagged) -> Tensor:
    return 1.0 + keys.lengths


class Scorer(nn.Module):
    """Clicks from a list, a bag and dense inputs."""

    def __init__(self, *, by_token: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.by_token = by_token
        self.out = nn.Linear(2 * DIM + 2, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        listed = rows["list"]
        sums = torch.zeros(batch.size, DIM).index_add(0, listed.sample_ids(), listed.values)
        dense = batch.dense["dense"]
        logits = self.out(torch.cat([sums, rows["bag"], dense.clamp(-9, 9)], 1))[:, 0]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        losses = losses + torch.where(dense[:, 0] == BAD, float("nan"), 0.0)
        if not self.by_token:
            return Output(losses, predictions=torch.sigmoid(logits))
        weights = tokens(batch.keys["list"])
        return Output(losses * weights, weights, torch.sigmoid(logits))


def batch_of(samples: Sequence[int]) -> Batch:
    """The same samples wherever they are asked for."""
    lists, tags, dense, labels = [], [], [], []
    for sample in samples:
        rng = np.random.default_rng([3, sample])
        lists.append(rng.integers(0, NUM_KEYS, rng.integers(0, 5)).tolist())
        tags.append((rng.zipf(1.5, rng.integers(0, 4)) % NUM_KEYS).tolist())
        dense.append(rng.standard_normal(2).tolist())
        labels.append(float(rng.random() < 0.4))
    return Batch(
        {"list": Jagged.from_lists(lists), "bag": Jagged.from_lists(tags)},
        {"dense": torch.tensor(dense).reshape(-1, 2)},
        torch.tensor(labels),
    )


def make_trainer(model: nn.Module | None = None, *, own_tables: list[Table] | None = None, **options: Any) -> Trainer:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 1e-2)

    return Trainer(model or Scorer(), own_tables or tables(), FEATURES, dense_optimizer=adam, **options)


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    rows = {name: trainer.rows(name, torch.arange(NUM_KEYS)).numpy() for name in ("item", "tag")}
    return rows | {name: tensor.detach().clone().numpy() for name, tensor in trainer.model.state_dict().items()}


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], *, exact: bool = False) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-5, "atol": 1e-7}
        np.testing.assert_allclose(ours[name], value, **tolerance, err_msg=name)


# -- fit and step ------------------------------------------------------------------------------------------------------

# Samples of each rank at each step: ranks run out at different times, and batches differ in size.
SHARES = [
    [range(0, 7), range(7, 9), range(9, 14)],
    [range(20, 24), range(24, 32), range(0)],
    [range(40, 41), range(41, 50), None],
    [range(60, 63), None, None],
]


def fit_shares(by_token: bool, world: int) -> dict[str, Any]:
    """On fewer ranks than shares, rank 0 takes all of them as one batch."""
    trainer = make_trainer(Scorer(by_token=by_token))

    def batches() -> Iterator[Batch]:
        for shares in SHARES:
            share = shares[trainer.rank] if world == 3 else list(itertools.chain(*(one or () for one in shares)))
            if share is None:
                return
            yield batch_of(share)

    results = []
    fitted = trainer.fit(batches(), on_step=results.append)
    assert trainer.steps == fitted.steps
    return {
        "fitted": (fitted.steps, fitted.samples, fitted.skipped, fitted.first_loss, fitted.last_loss),
        "losses": [result.loss for result in results],
        "weights": [result.weight for result in results],
        "samples": [result.samples for result in results],
        "state": state_of(trainer),
    }


@pytest.mark.parametrize("by_token", [False, True], ids=["mean over samples", "mean over tokens"])
def test_ranks_that_run_out_finish_together_and_equal_one_worker_on_the_same_batches(
    cluster: Cluster, by_token: bool
) -> None:
    (whole,) = cluster.run(1, fit_shares, by_token, 1)
    parts = cluster.run(3, fit_shares, by_token, 3)
    assert whole["samples"] == [14, 12, 10, 3]
    for part in parts:
        assert part["fitted"][:3] == (4, 39, 0)
        assert part["fitted"][3:] == (part["losses"][0], part["losses"][-1])
        assert part["samples"] == whole["samples"] and part["weights"] == whole["weights"]
        assert part["losses"] == parts[0]["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert_same(part["state"], whole["state"])


@pytest.mark.parametrize("by_token", [False, True])
def test_the_loss_of_a_step_is_the_sum_of_losses_by_the_sum_of_weights(by_token: bool) -> None:
    trainer = make_trainer(Scorer(by_token=by_token), micro_batches=3)
    batch = batch_of(range(11))
    rows = {
        "list": Jagged(trainer.rows("item", batch.keys["list"].values), batch.keys["list"].offsets),
        "bag": torch.zeros(11, DIM),
    }
    tags = batch.keys["bag"]
    rows["bag"].index_add_(0, tags.sample_ids(), trainer.rows("tag", tags.values))
    rows["bag"] /= tags.lengths.clamp(min=1)[:, None]
    losses = trainer.model(batch, rows).losses.detach().double().sum()
    weight = float(tokens(batch.keys["list"]).sum()) if by_token else 11.0
    result = trainer.step(batch)
    assert result is not None and result.weight == weight and result.step == 1 and not result.skipped
    assert result.loss == pytest.approx(float(losses) / weight, rel=1e-6)


def step_without_data() -> None:
    trainer = make_trainer()
    before = state_of(trainer)
    assert trainer.step(None) is None
    empty = trainer.step(batch_of([]))  # a batch without samples is a batch
    assert empty is not None and empty.samples == 0 and not empty.skipped
    assert_same(state_of(trainer), before, exact=True)
    one = trainer.step(batch_of(range(4)) if trainer.rank == 0 else None)
    assert one is not None and one.samples == 4
    assert not np.array_equal(state_of(trainer)["item"], before["item"])
    nothing = trainer.fit([])
    assert (nothing.steps, nothing.samples) == (0, 0) and np.isnan(nothing.first_loss)
    some = trainer.fit([batch_of(range(3)), batch_of([])])
    assert some.steps == 2 and np.isfinite(some.last_loss), "an empty batch has no loss to report"


@pytest.mark.parametrize("world", [1, 2])
def test_step_gives_none_only_once_no_rank_has_data(cluster: Cluster, world: int) -> None:
    cluster.run(world, step_without_data)


def test_fit_stops_after_steps_and_the_next_fit_goes_on_with_the_same_iterator() -> None:
    batches = (batch_of(range(5 * step, 5 * step + 5)) for step in range(6))
    parts, whole = make_trainer(), make_trainer()
    assert parts.fit(batches, steps=2).steps == 2
    assert parts.fit(batches, steps=0).steps == 0
    assert parts.fit(batches, steps=3).steps == 3
    assert parts.fit(batches).steps == 1
    assert parts.steps == 6
    whole.fit([batch_of(range(5 * step, 5 * step + 5)) for step in range(6)])
    assert parts.digest() == whole.digest()


class Echo(nn.Module):
    """No parameters of its own: the loss is the product of the bag with the dense inputs."""

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return (rows["bag"] * batch.dense["target"]).sum(1) + 0 * rows["list"].values.sum()


def by_hand(optimizer: RowOptimizer, rows: np.ndarray, steps: list[tuple[list[list[int]], np.ndarray]]) -> np.ndarray:
    """The formulas as they stand in the documentation, in float64. Bags are sums."""
    rows = rows.astype(np.float64)
    first, second = np.zeros_like(rows), np.zeros_like(rows)
    for number, (lists, target) in enumerate(steps, start=1):
        grads: dict[int, np.ndarray] = {}
        for keys, row in zip(lists, target, strict=True):
            for key in keys:
                grads[key] = grads.get(key, 0) + row.astype(np.float64) / len(lists)
        for key, grad in grads.items():
            norm = np.linalg.norm(grad)
            if optimizer.clip and norm > optimizer.clip:
                grad = grad * optimizer.clip / norm
            grad = grad + optimizer.weight_decay * rows[key]
            if isinstance(optimizer, Adam):
                first[key] = optimizer.beta1 * first[key] + (1 - optimizer.beta1) * grad
                second[key] = optimizer.beta2 * second[key] + (1 - optimizer.beta2) * grad**2
                scale = np.sqrt(1 - optimizer.beta2**number) / (1 - optimizer.beta1**number)
                rows[key] -= optimizer.lr * scale * first[key] / (np.sqrt(second[key]) + optimizer.eps)
            elif isinstance(optimizer, Adagrad):
                second[key] += grad**2
                rows[key] -= optimizer.lr * grad / (np.sqrt(second[key]) + optimizer.eps)
            elif isinstance(optimizer, RowwiseAdagrad):
                second[key] += (grad**2).mean()
                rows[key] -= optimizer.lr * grad / (np.sqrt(second[key]) + optimizer.eps)
            else:
                rows[key] -= optimizer.lr * grad
    return rows


def echo_steps() -> list[tuple[list[list[int]], np.ndarray]]:
    rng = np.random.default_rng(8)
    return [
        (
            [rng.integers(0, 12, rng.integers(0, 4)).tolist() for _ in range(10)],
            rng.standard_normal((10, DIM)).astype(np.float32),
        )
        for _ in range(5)
    ]


def train_echo(optimizer: RowOptimizer) -> tuple[np.ndarray, np.ndarray]:
    features = [Feature("list", "item"), Feature("bag", "tag", "sum")]
    trainer = Trainer(Echo(), tables(optimizer=optimizer), features, dense_optimizer=torch.optim.SGD)
    first = trainer.rows("tag", torch.arange(12)).numpy()
    for lists, target in echo_steps():
        begin, end = 10 * trainer.rank // trainer.world, 10 * (trainer.rank + 1) // trainer.world
        keys = Jagged.from_lists(lists[begin:end])
        dense = {"target": torch.from_numpy(target[begin:end])}
        trainer.step(Batch({"list": Jagged.from_lists([[]] * (end - begin)), "bag": keys}, dense))
    return first, trainer.rows("tag", torch.arange(12)).numpy()


@pytest.mark.parametrize("kind", [SGD, Adagrad, RowwiseAdagrad, Adam])
def test_clip_and_weight_decay_follow_the_formulas_also_with_a_model_without_parameters(
    cluster: Cluster, kind: type[RowOptimizer]
) -> None:
    optimizer = kind(lr=0.05, clip=0.2, weight_decay=0.1)
    for first, last in cluster.run(2, train_echo, optimizer):
        np.testing.assert_allclose(last, by_hand(optimizer, first, echo_steps()), rtol=2e-5, atol=2e-7)
        free = by_hand(dataclasses.replace(optimizer, clip=0.0), first, echo_steps())
        assert np.abs(last - free).max() > 1e-3, "the clip took no part"


def train_half() -> tuple[list[float], np.ndarray]:
    trainer = make_trainer(own_tables=tables(dtype=torch.bfloat16))
    batch = batch_of(range(trainer.rank, 60, trainer.world))
    losses = [trainer.step(batch).loss for _ in range(30)]  # type: ignore[union-attr]
    return losses, trainer.rows("item", torch.arange(NUM_KEYS)).numpy()


def test_a_bfloat16_table_trains(cluster: Cluster) -> None:
    for losses, rows in cluster.run(2, train_half):
        assert losses[-1] < 0.7 * losses[0]
        assert np.array_equal(torch.from_numpy(rows).bfloat16().float().numpy(), rows)


# -- admission and eviction --------------------------------------------------------------------------------------------


def keys_with_rows(options: dict[str, Any]) -> tuple[list[int], dict[str, np.ndarray], dict[str, int]]:
    trainer = make_trainer(own_tables=tables(**options))
    for step in range(12):
        samples = range(9 * step + trainer.rank, 9 * step + 9, trainer.world)
        trainer.step(batch_of(samples))
    keys = trainer._worker.rows.gather_objects([store.items()[0].tolist() for store in trainer.stores])
    owned = [[key for rank in keys for key in rank[table]] for table in range(2)]
    assert all(len(set(one)) == len(one) for one in owned)
    stats = trainer.table_stats()["item"]
    counts = {"rows": stats.rows, "shared": stats.shared_rows, "born": stats.born, "evicted": stats.evicted}
    return sorted(owned[0]) + sorted(owned[1]), state_of(trainer), counts


@pytest.mark.parametrize(
    "options",
    [{"admit_after": 3}, {"eviction": Eviction(ttl=2)}, {"admit_after": 2, "eviction": Eviction(ttl=3)}],
    ids=["admission", "eviction", "both"],
)
def test_which_keys_have_rows_does_not_depend_on_the_number_of_workers(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    (keys, state, counts), *_ = cluster.run(1, keys_with_rows, options)
    (every, _, _), *_ = cluster.run(1, keys_with_rows, {})
    assert 0 < len(keys) < len(every), "nothing was held back"
    for world in (2, 3):
        for other_keys, other_state, other_counts in cluster.run(world, keys_with_rows, options):
            assert other_keys == keys and other_counts == counts
            assert_same(other_state, state)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_row_budget_holds_over_all_workers(cluster: Cluster, policy: str) -> None:
    for _, _, counts in cluster.run(2, keys_with_rows, {"eviction": Eviction(max_rows=36, policy=policy)}):
        assert counts["rows"] <= 36 and counts["evicted"] > 0
        assert counts["born"] - counts["evicted"] == counts["rows"]


# -- skipping what is not finite ---------------------------------------------------------------------------------------


def spoilt(value: float, samples: Sequence[int]) -> Batch:
    batch = batch_of(samples)
    dense = batch.dense["dense"]
    assert isinstance(dense, Tensor)
    dense[-1, 0] = value
    return batch


def fit_with_spoilt_inputs(with_them: bool) -> tuple[Any, ...]:
    trainer = make_trainer(on_nonfinite="skip")

    def batches() -> Iterator[Batch]:
        for step in range(4):
            if with_them and trainer.rank == 1 and step in (1, 3):
                yield spoilt(float("inf"), range(3))
            yield batch_of(range(10 * step + 5 * trainer.rank, 10 * step + 5 * trainer.rank + 5))
        if with_them:
            yield spoilt(float("nan"), range(3))  # after the last step: not reached, not counted

    fitted = trainer.fit(batches(), steps=4)
    return fitted.skipped, trainer.skipped, fitted.steps, fitted.samples, trainer.digest()


def test_batches_with_inputs_that_are_not_finite_are_skipped_and_counted_on_all_ranks(cluster: Cluster) -> None:
    clean = cluster.run(2, fit_with_spoilt_inputs, False)
    with_them = cluster.run(2, fit_with_spoilt_inputs, True)
    assert [one[:4] for one in clean] == [(0, 0, 4, 40)] * 2
    assert [one[:4] for one in with_them] == [(2, 0, 4, 40), (2, 2, 4, 40)]
    assert {one[4] for one in clean + with_them} == {clean[0][4]}


def skip_losses(micro_batches: int) -> None:
    trainer = make_trainer(on_nonfinite="skip", micro_batches=micro_batches)
    assert trainer.fit([batch_of(range(8))]).skipped == 0
    before, rank = state_of(trainer), trainer.rank
    fitted = trainer.fit([spoilt(BAD, range(8)) if rank == 1 else batch_of(range(8))])
    assert (fitted.skipped, fitted.steps) == (1, 1) and np.isnan(fitted.last_loss)
    assert_same(state_of(trainer), before, exact=True)
    result = trainer.step(spoilt(float("nan"), range(3)))  # inputs, on every rank: a step all the same
    assert result is not None and result.samples == 0
    assert_same(state_of(trainer), before, exact=True)
    assert trainer.skipped == 2
    result = trainer.step(batch_of(range(8)))
    assert result is not None and not result.skipped and np.isfinite(result.loss)
    assert not np.array_equal(state_of(trainer)["item"], before["item"])


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_with_a_loss_that_is_not_finite_is_skipped_on_all_ranks_and_changes_nothing(
    cluster: Cluster, micro_batches: int
) -> None:
    cluster.run(2, skip_losses, micro_batches)


def train_around(middle: str, micro_batches: int) -> None:
    trainer, clean = (make_trainer(on_nonfinite="skip", micro_batches=micro_batches) for _ in range(2))
    good = batch_of(range(8))
    trainer.step(good)
    trainer.step(spoilt(BAD, range(8)) if middle == "skipped" and trainer.rank == 1 else batch_of([]))
    trainer.step(good)
    clean.fit([good, good])
    assert_same(state_of(trainer), state_of(clean), exact=True)


@pytest.mark.parametrize("middle", ["skipped", "empty"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_that_is_not_trained_on_leaves_no_gradient_behind(
    cluster: Cluster, middle: str, micro_batches: int
) -> None:
    cluster.run(2, train_around, middle, micro_batches)


# -- bad input: an error on every rank, soon, that says where and what --------------------------------------------------


def without_bag() -> Batch:
    batch = batch_of(range(3))
    return Batch({"list": batch.keys["list"], "bagg": batch.keys["bag"]}, batch.dense, batch.labels)


def with_list(keys: Jagged) -> Batch:
    batch = batch_of(range(3))
    return Batch({**batch.keys, "list": keys}, batch.dense, batch.labels)


def raising() -> Batch:
    raise OSError("the disk is gone")


OVER = threading.Event()  # set when fit has returned


def hanging() -> Batch:
    OVER.wait(PATIENCE)
    raise AssertionError


BAD_BATCHES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "unknown feature": (without_bag, ["feature 'bag'", "bagg"]),
    "lengths that do not sum up": (
        lambda: with_list(Jagged(torch.arange(5), torch.tensor([0, 2, 4, 7]))),
        ["feature 'list'", "do not sum up", "to 7", "5 values"],
    ),
    "negative length": (
        lambda: with_list(Jagged(torch.arange(5), torch.tensor([0, 3, 2, 5]))),
        ["feature 'list'", "sample 1", "negative length -1"],
    ),
    "another number of samples": (
        lambda: with_list(Jagged.from_lists([[1]])),
        ["feature 'bag' has 3 samples, the batch has 1"],
    ),
    "float keys": (
        lambda: with_list(Jagged(torch.rand(3), torch.tensor([0, 1, 2, 3]))),
        ["feature 'list'", "int64", "torch.float32"],
    ),
    "int32 keys": (
        lambda: with_list(Jagged(torch.arange(3, dtype=torch.int32), torch.tensor([0, 1, 2, 3]))),
        ["feature 'list'", "int64", "torch.int32"],
    ),
    "weights of another length": (
        lambda: with_list(Jagged(torch.arange(3), torch.tensor([0, 1, 2, 3]), torch.ones(2))),
        ["feature 'list'", "weights", "3 keys"],
    ),
    "keys that are no Jagged": (lambda: with_list(torch.arange(3)), ["must be a Jagged"]),  # type: ignore[arg-type]
    "NaN in a dense input": (lambda: spoilt(float("nan"), range(3)), ["dense input 'dense'", "nan", "[2, 0]"]),
    "infinity in a dense input": (lambda: spoilt(float("inf"), range(3)), ["dense input 'dense'", "inf"]),
    "NaN loss": (lambda: spoilt(BAD, range(3)), ["loss of sample 2 is nan"]),
    "not a Batch": (lambda: {"list": [1]}, ["dict", "nestpipe.Batch"]),
    "data that raises": (raising, ["OSError", "the disk is gone"]),
    "data that leaves": (lambda: sys.exit(0), ["SystemExit"]),
    "data that hangs": (hanging, ["no batch for 2 s", "data_timeout"]),
}


def fit_bad_batch(name: str) -> None:
    OVER.clear()
    trainer = make_trainer(data_timeout=2.0 if name == "data that hangs" else 300.0)

    def batches() -> Iterator[Any]:
        for step in range(5):
            if step == 2 and trainer.rank == 1:
                yield BAD_BATCHES[name][0]()
            yield batch_of(range(5))

    try:
        trainer.fit(batches())
    finally:
        OVER.set()


def assert_all_leave(outcomes: list[tuple[str, Any]], *fragments: str) -> None:
    for kind, value in outcomes:
        assert kind == "failed", (kind, value)
        name, message, _ = value
        assert name == "TrainingError"
        for fragment in fragments:
            assert fragment in message, message
    assert len({value[1] for _, value in outcomes}) == 1, "ranks do not say the same"


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_on_one_rank_ends_every_rank_with_its_cause(cluster: Cluster, name: str) -> None:
    outcomes = cluster.outcomes(2, fit_bad_batch, name)
    assert_all_leave(outcomes, "rank 1, batch 2: ", *BAD_BATCHES[name][1])
    assert "rank 0" not in outcomes[0][1][1]


def step_bad_batch(name: str) -> None:
    trainer = make_trainer()
    trainer.step(batch_of(range(4)))
    trainer.step(BAD_BATCHES[name][0]() if trainer.rank == 1 else batch_of(range(4)))


@pytest.mark.parametrize("name", ["float keys", "NaN in a dense input", "not a Batch", "keys that are no Jagged"])
def test_a_bad_batch_given_to_step_ends_every_rank_too(cluster: Cluster, name: str) -> None:
    outcomes = cluster.outcomes(2, step_bad_batch, name)
    assert_all_leave(outcomes, "rank 1, batch 1: ", *BAD_BATCHES[name][1])


class Broken(Scorer):
    """Wrong in one way, on rank 1, from the second batch on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Any:
        output = super().forward(batch, rows)
        self.calls += 1
        if self.calls == 1 or torch.distributed.get_rank() == 0:
            return output
        match self.how:
            case "scalar":
                return output.losses.mean()
            case "column":
                return output.losses[:, None]
            case "number":
                return 0.5
            case "weights":
                return Output(output.losses, torch.ones(2))
            case "key":
                return rows["lists"]
        raise RuntimeError("out of order")


def fit_broken(how: str, micro_batches: int) -> None:
    make_trainer(Broken(how), micro_batches=micro_batches).fit([batch_of(range(6))] * 4)


@pytest.mark.parametrize(
    ("how", "fragments"),
    [
        ("scalar", ["scalar loss", "6 samples", "one loss per sample"]),
        ("column", ["shape (6, 1)"]),
        ("number", ["float", "one per sample"]),
        ("weights", ["weights of shape (2,)"]),
        ("key", ["KeyError", "lists"]),
        ("error", ["RuntimeError: out of order"]),
    ],
)
def test_a_forward_that_fails_on_one_rank_ends_every_rank(cluster: Cluster, how: str, fragments: list[str]) -> None:
    assert_all_leave(cluster.outcomes(2, fit_broken, how, 1), "rank 1, batch 1: ", *fragments)


def test_a_forward_that_fails_in_a_later_micro_batch_ends_every_rank(cluster: Cluster) -> None:
    assert_all_leave(cluster.outcomes(2, fit_broken, "error", 2), "rank 1, batch 0: ", "out of order")


def fit_label(label: float) -> None:
    features = [Feature("list", "item", "sum"), Feature("bag", "tag", "mean")]
    model = DLRM(num_dense=2, features=["list", "bag"], dim=DIM, bottom=[4], top=[4])
    trainer = Trainer(model, tables(), features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))
    batches = [batch_of(range(4)) for _ in range(3)]
    if trainer.rank == 1 and batches[2].labels is not None:
        batches[2].labels[3] = label
    trainer.fit(batches)


@pytest.mark.parametrize("label", [-1.0, 2.0])
def test_a_label_outside_its_range_ends_every_rank(cluster: Cluster, label: float) -> None:
    outcomes = cluster.outcomes(2, fit_label, label)
    assert_all_leave(outcomes, "rank 1, batch 2: ", f"label {label} of sample 3", "outside [0, 1]")


def ask_for_rows(keys: Tensor) -> None:
    trainer = make_trainer()
    trainer.rows("item", keys if trainer.rank == 1 else torch.arange(3))


def test_rows_of_float_keys_are_refused_on_every_rank(cluster: Cluster) -> None:
    assert_all_leave(cluster.outcomes(2, ask_for_rows, torch.rand(3)), "rank 1", "int64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "seriall"}, "did you mean 'serial'"),
        ({"on_nonfinite": "ignore"}, "'raise' or 'skip'"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"own_tables": [Table("item", DIM), Table("tags", DIM)]}, "refers to table 'tag'.*did you mean 'tags'"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused_with_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**options)


def test_an_unknown_table_is_refused_with_the_near_one() -> None:
    with pytest.raises(ValueError, match=r"table 'items'.*did you mean 'item'"):
        make_trainer().rows("items", torch.arange(3))


def test_learning_rates_are_scaled_from_what_was_declared() -> None:
    def make(row_lr: float, dense_lr: float) -> Trainer:
        rows = tables(optimizer=Adagrad(lr=row_lr))
        return Trainer(Scorer(), rows, FEATURES, dense_optimizer=lambda p: torch.optim.SGD(p, dense_lr))

    trainer = make(0.2, 0.5)
    before = state_of(trainer)
    trainer.scale_lr(0.0)
    trainer.step(batch_of(range(20)))
    assert_same(state_of(trainer), before, exact=True)
    trainer, other = make(0.2, 0.5), make(0.1, 0.25)
    for factor in (0.1, 0.5):  # of the declared rates, not of one another
        trainer.scale_lr(factor)
    trainer.step(batch_of(range(20)))
    other.step(batch_of(range(20)))
    assert_same(state_of(trainer), state_of(other))


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluate_slices() -> tuple[dict[str, float], bool, bool]:
    trainer = make_trainer(Scorer(by_token=True))
    for step in range(5):
        trainer.step(batch_of(range(12 * step, 12 * step + 12)) if trainer.rank == 0 else None)
    stats, digest, steps = trainer.table_stats(), trainer.digest(), trainer.steps
    # Samples of the test set by rank, in batches whose number differs between ranks; some keys have no row.
    mine = list(range(1000, 1100))[trainer.rank :: trainer.world][: 100 if trainer.rank else 1000]
    batches = [batch_of(mine[start : start + 7]) for start in range(0, len(mine), 7)]
    for batch in batches:
        values = batch.keys["list"].values
        values[values % 5 == 0] += 1_000_000
    metrics = trainer.evaluate([*batches, batch_of([])], {"AUC": AUC(), "NE": NormalizedEntropy()})
    unchanged = (stats, digest, steps) == (trainer.table_stats(), trainer.digest(), trainer.steps)
    return metrics, unchanged, trainer.model.training


def test_evaluation_changes_nothing_and_is_the_same_on_any_number_of_workers(cluster: Cluster) -> None:
    results = [one for world in (1, 2, 3) for one in cluster.run(world, evaluate_slices)]
    for metrics, unchanged, training in results:
        assert unchanged and training
        assert metrics.keys() == {"loss", "AUC", "NE"}
        # Rows were trained in another order of sums, so predictions agree up to rounding; metrics add nothing to that.
        assert metrics == pytest.approx(results[0][0], rel=1e-5)
        assert 0 < metrics["AUC"] < 1


class CountedByHand:
    """A user's metric with no more than what is needed."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.count += len(predictions)

    def compute(self, *, group: Any = None) -> float:
        return float(self.count)


class CountedAnew(CountedByHand):
    def reset(self) -> None:
        self.count = 0


def test_an_evaluation_is_of_its_own_batches_however_often_its_metrics_were_used() -> None:
    trainer = make_trainer(Scorer())
    trainer.step(batch_of(range(20)))
    metrics = {"AUC": AUC(), "NE": NormalizedEntropy(), "count": CountedAnew()}
    metrics["AUC"].update(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]))  # type: ignore[attr-defined]
    expected = {}
    for first in (0, 100):
        batches = [batch_of(range(first, first + 40)), batch_of(range(first + 40, first + 60))]
        expected = trainer.evaluate(batches, {"AUC": AUC(), "NE": NormalizedEntropy(), "count": CountedByHand()})
        assert trainer.evaluate(batches, metrics) == expected and expected["count"] == 60
    assert metrics["AUC"].compute() == expected["AUC"]  # type: ignore[attr-defined]


def evaluate_with_a_used_metric_on_the_last_rank() -> None:
    trainer, used = make_trainer(Scorer()), CountedByHand()
    trainer.evaluate([batch_of(range(5))], {"count": used})
    metric = used if trainer.rank == trainer.world - 1 else CountedByHand()
    make_trainer(Scorer()).evaluate([batch_of(range(5))], {"count": metric})


@pytest.mark.parametrize("world", [1, 2])
def test_a_used_metric_that_cannot_be_reset_is_refused_on_every_worker(cluster: Cluster, world: int) -> None:
    for kind, (error, message, _) in cluster.outcomes(world, evaluate_with_a_used_metric_on_the_last_rank):
        assert kind == "failed" and error == "TrainingError"
        assert f"rank {world - 1}, metrics: metric 'count' (CountedByHand) has been used before" in message
        assert "reset()" in message


def test_one_metric_under_two_names_is_refused() -> None:
    trainer, auc = make_trainer(Scorer()), AUC()
    with pytest.raises(TrainingError, match=r"metrics 'a' and 'b' are one and the same object.* make one for each"):
        trainer.evaluate([batch_of(range(5))], {"a": auc, "b": auc})


class OfSlots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.count += len(predictions)

    def compute(self, group: Any = None) -> float:
        return self.count


class OfSlotsAnew(OfSlots):
    __slots__ = ()

    def reset(self) -> None:
        self.count = 0


def test_a_metric_that_nobody_can_remember_needs_a_reset() -> None:
    trainer = make_trainer(Scorer())
    with pytest.raises(TrainingError, match=r"metric 'count' \(OfSlots\) has no reset\(\), .*__slots__"):
        trainer.evaluate([batch_of(range(5))], {"count": OfSlots()})
    again = OfSlotsAnew()
    for _ in range(2):
        assert trainer.evaluate([batch_of(range(5))], {"count": again})["count"] == 5


class Ranker(nn.Module):
    def query(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        listed = rows["list"]
        return torch.zeros(batch.size, DIM).index_add(0, listed.sample_ids(), listed.values)

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query @ candidates.T

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return self.query(batch, rows).sum(1) + rows["bag"].sum(1)


def ranking_batch(samples: Sequence[int]) -> Batch:
    batch = batch_of(samples)
    return Batch(batch.keys, labels=torch.tensor([sample * 7 % NUM_KEYS for sample in samples], dtype=torch.int64))


def rank_slices(exclude_seen: bool) -> tuple[dict[str, float], np.ndarray, bool]:
    trainer = make_trainer(Ranker())
    digest = trainer.digest()
    mine = list(range(40))[trainer.rank :: trainer.world]
    batches = [ranking_batch(mine[start : start + 6]) for start in range(0, len(mine), 6)]
    candidates = torch.arange(NUM_KEYS)
    metrics = trainer.evaluate_ranking(
        batches, table="item", candidates=candidates, ks=(1, 5), history="list", exclude_seen=exclude_seen
    )
    return metrics, trainer.rows("item", candidates).numpy(), digest == trainer.digest()


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_ranking_equals_a_loop_over_samples_on_any_number_of_workers(cluster: Cluster, exclude_seen: bool) -> None:
    results = [one for world in (1, 2, 3) for one in cluster.run(world, rank_slices, exclude_seen)]
    rows = torch.from_numpy(results[0][1])
    places = []
    for sample in range(40):
        batch = ranking_batch([sample])
        seen, target = batch.keys["list"].values, int(batch.labels[0])  # type: ignore[index]
        scores = (torch.zeros(DIM) + rows[seen].sum(0)) @ rows.T
        ahead = [
            key
            for key in range(NUM_KEYS)
            if (scores[key], -key) > (scores[target], -target) and not (exclude_seen and key in seen.tolist())
        ]
        places.append(1 + len(ahead))
    for metrics, _, unchanged in results:
        assert unchanged
        for k in (1, 5):
            assert metrics[f"HR@{k}"] == pytest.approx(np.mean([place <= k for place in places]))
            gains = [1 / np.log2(place + 1) if place <= k else 0.0 for place in places]
            assert metrics[f"NDCG@{k}"] == pytest.approx(np.mean(gains), rel=1e-6)


def evaluate_badly(what: str) -> None:
    trainer = make_trainer(Broken("error") if what == "forward" else Scorer())
    batches = [batch_of(range(4)) for _ in range(3)]
    if what == "data" and trainer.rank == 1:
        batches[2] = spoilt(float("nan"), range(2))
    trainer.evaluate(batches, {})


def test_evaluation_that_fails_on_one_rank_ends_every_rank(cluster: Cluster) -> None:
    outcomes = cluster.outcomes(2, evaluate_badly, "forward")
    assert_all_leave(outcomes, "rank 1, batch 1: ", "out of order")
    outcomes = cluster.outcomes(2, evaluate_badly, "data")
    assert_all_leave(outcomes, "rank 1, batch 2: ", "dense input 'dense' holds nan")


def test_a_metric_without_predictions_says_so() -> None:
    trainer = make_trainer(Ranker())
    with pytest.raises(Exception, match=r"metric 'AUC' needs Output\.predictions"):
        trainer.evaluate([ranking_batch(range(3))], {"AUC": AUC()})


def test_ranking_with_an_unknown_history_names_the_near_feature() -> None:
    with pytest.raises(ValueError, match=r"history 'lists'.*did you mean 'list'"):
        make_trainer(Ranker()).evaluate_ranking([], table="item", candidates=torch.arange(3), history="lists")


class Awkward(Scorer):
    """A model with a parameter that only some samples reach, or a loss that reaches nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.extra = nn.Parameter(torch.ones(3))
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        output = super().forward(batch, rows)
        rank = dist.get_rank()
        if self.kind == "constant on one rank" and rank == 1:
            return Output(torch.zeros(batch.size))
        if self.kind == "unused on one rank" and rank == 0:
            return Output(output.losses + self.extra.sum())
        return Output(output.losses)


def train_awkward(kind: str) -> tuple[str, list[float]]:
    torch.manual_seed(dist.get_rank())  # each rank draws its own weights; training must begin with the same ones
    trainer = make_trainer(Awkward(kind))
    for _ in range(3):
        assert trainer.step(batch_of(range(8))) is not None
    return trainer.digest(), trainer.model.extra.tolist()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("kind", ["unused on all", "unused on one rank", "constant on one rank", "frozen"])
def test_ranks_stay_alike_with_parameters_that_take_no_part(cluster: Cluster, kind: str) -> None:
    (digest, extra), (other_digest, _) = cluster.run(2, train_awkward, kind)
    assert digest == other_digest
    assert (extra != [1.0, 1.0, 1.0]) == (kind == "unused on one rank")


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weights_that_are_no_weights_are_refused_or_skipped(weight: float) -> None:
    class Weighted(Scorer):
        def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
            weights = torch.ones(batch.size)
            weights[2] = weight
            return Output(super().forward(batch, rows).losses, weights)

    with pytest.raises(TrainingError, match="weight"):
        make_trainer(Weighted()).step(batch_of(range(8)))
    if weight == weight and weight < 0:
        return
    trainer = make_trainer(Weighted(), on_nonfinite="skip")
    result = trainer.step(batch_of(range(8)))
    assert result is not None and result.skipped
    assert all(np.isfinite(one).all() for one in state_of(trainer).values())


def test_a_batch_norm_is_refused_where_the_batch_is_split() -> None:
    model = Scorer()
    model.norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="norm is a batch norm, which mixes samples"):
        make_trainer(model, micro_batches=2)
    make_trainer(model)

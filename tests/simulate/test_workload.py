"""Workloads: keys, bytes, bags, operations and the shares of micro-batches, each against counting by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Output, RowwiseAdagrad, Table
from nestpipe.config import Built, Config, build
from nestpipe.exchange.clustering import cluster
from nestpipe.kernels.keys import Deduplicator
from nestpipe.simulate.workload import PLACED, Split, TableLoad, Workload, flops, of_batches, of_config
from tests.simulate.tiny import clicks, load, sequences

BATCHES = 4


def read(config: Config) -> list[Batch]:
    source = build(config).data.batches("train", batch_size=config.train.batch_size, rank=0, world=1, seed=0)
    return [next(source) for _ in range(BATCHES)]


def lists(batch: Batch, *features: str) -> list[list[int]]:
    """Keys of each sample."""
    each = [batch.keys[feature].to_lists() for feature in features]
    return [joined(one[sample] for one in each) for sample in range(batch.size)]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


# -- of a config -------------------------------------------------------------------------------------------------------


def test_sequences_are_counted_as_by_hand(histories: Workload) -> None:
    config, batches = sequences(), read(sequences())
    (item,) = histories.tables
    keys = [joined(lists(batch, "history", "negatives")) for batch in batches]
    assert (histories.name, histories.samples, item.name, item.dim) == ("hstu", 16, "item", 8)
    assert item.keys == histories.keys == pytest.approx(np.mean([len(one) for one in keys]))
    assert item.bags == 0 and item.pooled_at == "source" and item.tier == "memory"
    assert item.record == 8 * 4 + 4  # rowwise Adagrad has one float beside the row
    first = [*batches[0].keys["history"].to_lists(), *batches[0].keys["negatives"].to_lists()]
    assert item.growth(len(joined(first))) == pytest.approx(len(set(joined(first))), rel=1e-6)
    total = joined(keys)
    assert item.growth(len(total)) == pytest.approx(len(set(total)), rel=1e-6)
    assert histories.dense_bytes == sum(4 * one.numel() for one in build(config).model.parameters())
    assert [table.key_bytes for table in histories.tables] == [4]


def test_bags_are_counted_as_by_hand() -> None:
    workload = of_config(clicks(), batches=BATCHES)
    assert [table.name for table in workload.tables] == ["f0", "f1"]
    for table in workload.tables:
        assert (table.keys, table.bags, table.dim, table.pooled_at) == (32 * 3, 32, 4, "auto")
    assert workload.keys == 2 * 32 * 3 and workload.samples == 32
    # Two features of 96 keys and 33 offsets, two dense inputs and a label of four bytes a sample.
    assert workload.input_bytes == 2 * 8 * (96 + 33) + 32 * (2 * 4 + 4)


def test_features_of_one_table_share_its_keys_and_each_has_its_bags() -> None:
    both = {"dim": 4, "features": ["f0", "f1"], "pooling": "sum", "optimizer": "adam", "dtype": "bfloat16"}
    config = clicks(tables={"both": both})
    (found,) = of_config(config, batches=BATCHES).tables
    assert (found.keys, found.bags) == (2 * 96, 2 * 32)
    assert found.record == 4 * 2 + 2 * 4 * 4  # bfloat16 rows, two float32 moments


def test_keys_all_over_int64_take_eight_bytes() -> None:
    assert of_config(clicks("data.spread_keys=true"), batches=1).tables[0].key_bytes == 8
    assert of_config(clicks(), batches=1).tables[0].key_bytes == 4


def test_what_a_config_says_of_a_table_is_kept() -> None:
    config = clicks("tables.f*.tier=disk", "tables.f*.pooled_at=owner", "tables.f*.owners=1")
    for table in of_config(config, batches=1).tables:
        assert (table.tier, table.pooled_at, table.owners) == ("disk", "owner", 1)


def test_input_bytes_have_lists_among_the_dense_inputs_and_weights_of_keys() -> None:
    """They are copied to the device as well."""
    keys = Jagged.from_lists([[1, 2], [3]])
    plain = Batch({"a": keys}, {}, torch.zeros(2))
    weighted = Batch({"a": dataclasses.replace(keys, weights=torch.ones(3))}, {}, torch.zeros(2))
    times = Batch({"a": keys}, {"times": Jagged.from_lists([[7, 8], [9]])}, torch.zeros(2))
    found = {name: made([one]).input_bytes for name, one in [("plain", plain), ("weights", weighted), ("times", times)]}
    whole = 8 * (3 + 3) + 2 * 4
    assert found == {"plain": whole, "weights": whole + 3 * 4, "times": whole + 8 * (3 + 3)}


class Scored(nn.Module):
    """One linear layer over the rows of feature "a"."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, width, bias=False)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        values = rows["a"].values if isinstance(rows["a"], Jagged) else rows["a"]
        per_row: Tensor = self.linear(values).sum(1)
        if len(per_row) == batch.size:
            return Output(per_row)
        return Output(per_row.new_zeros(batch.size).index_add(0, rows["a"].sample_ids(), per_row))


def made(batches: list[Batch], *, pooling: str | None = "sum", dim: int = 8, width: int = 5) -> Workload:
    tables = [Table("item", dim, optimizer=RowwiseAdagrad())]
    built = Built(None, Scored(dim, width), {}, tables, [Feature("a", "item", pooling)], None)  # type: ignore[arg-type]
    return of_batches("made", batches, built)


@pytest.mark.parametrize("samples", [3, 8, 100])
def test_operations_of_a_linear_layer_are_those_of_the_formula(samples: int) -> None:
    """2 x samples x dim x width, and twice as many backward: for the weights and for the rows."""
    workload = made([Batch({"a": Jagged.from_lists([[n, n + 1] for n in range(samples)])})])
    assert workload.forward_flops == 2 * samples * 8 * 5
    assert workload.backward_flops == 2 * workload.forward_flops
    assert workload.dense_bytes == 4 * 8 * 5 and workload.samples == samples


def test_operations_on_sequences_are_those_of_their_keys_and_leave_no_gradient() -> None:
    batch, model = Batch({"a": Jagged.from_lists([[1, 2, 3], [4], []])}), Scored(8, 5)
    found = flops(model, batch, [Feature("a", "item")], [Table("item", 8)])
    assert found == (2 * 4 * 8 * 5, 2 * 2 * 4 * 8 * 5)
    assert model.linear.weight.grad is None


# -- what travels ------------------------------------------------------------------------------------------------------


def test_rows_or_pooled_vectors_travel_whichever_the_table_says() -> None:
    rows = 20 * 8 * 4
    bags = load(bags=10.0)  # four keys a bag
    each = 4 * (1 - (1 - 1 / 4) ** 4)  # owners of four that have some key of a bag

    def travelling(table: TableLoad, where: str, workers: int = 4) -> float:
        return dataclasses.replace(table, pooled_at=where).travelling(workers)

    assert travelling(load(), "auto") == travelling(bags, "source") == rows
    assert travelling(bags, "owner") == pytest.approx(10 * each * 8 * 4)
    assert travelling(bags, "auto") == rows, "20 rows are fewer than 27 vectors"
    assert travelling(load(bags=2.0), "auto") == pytest.approx(2 * 4 * (1 - 0.75**20) * 8 * 4), "8 vectors are fewer"
    assert travelling(dataclasses.replace(bags, owners=1), "owner") == 10 * 8 * 4
    assert travelling(bags, "owner", workers=1) == 10 * 8 * 4


# -- micro-batches -----------------------------------------------------------------------------------------------------


def by_hand(workload: Workload, count: int, clustering: str, window_cache: bool) -> Split:
    """With sets of keys, micro-batch by micro-batch."""
    assert workload.plan is not None
    found: list[tuple[list[float], list[float], list[float]]] = []
    for batch in workload.batches[:4]:
        order, bounds = cluster(batch, workload.plan, count, clustering, Deduplicator(), rank=0, world=PLACED)
        places = list(range(batch.size)) if order is None else order.tolist()
        whole, tokens, rows, grads = 0, [0] * count, [0] * count, [0] * count
        for table, features in zip(workload.plan.tables, workload.plan.features_of, strict=True):
            samples = lists(batch, *(feature.name for feature in features))
            parts = [[samples[place] for place in places[bounds[m] : bounds[m + 1]]] for m in range(count)]
            sets = [set(joined(part)) for part in parts]
            whole += table.dim * len(set().union(*sets))
            for m, keys in enumerate(sets):
                tokens[m] += len(joined(parts[m]))
                before, after = set().union(*sets[:m]), set().union(*sets[m + 1 :])
                rows[m] += table.dim * len(keys - before if window_cache else keys)
                grads[m] += table.dim * len(keys - after if window_cache else keys)
        found.append(
            ([one / sum(tokens) for one in tokens], *([one / whole for one in each] for each in (rows, grads)))
        )
    return Split(*(np.mean([one[place] for one in found], axis=0).tolist() for place in range(3)))


@pytest.fixture(scope="module")
def two_tables() -> Workload:
    """Bags in tables of different widths, some of no keys."""
    rng = np.random.default_rng(2)

    def bags() -> Jagged:
        return Jagged.from_lists([rng.integers(0, 40, rng.integers(0, 6)).tolist() for _ in range(30)])

    tables = [Table("narrow", 8), Table("wide", 32)]
    features = [Feature("a", "narrow", "sum"), Feature("b", "wide", "mean"), Feature("c", "wide", "sum")]
    batches = [Batch({name: bags() for name in "abc"}) for _ in range(3)]
    return of_batches("two", batches, Built(None, Scored(8, 5), {}, tables, features, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("window_cache", [True, False])
@pytest.mark.parametrize("clustering", ["none", "shared", "window", "taper"])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["histories", "two_tables"])
def test_shares_of_micro_batches_are_those_counted_with_sets(
    name: str, count: int, clustering: str, window_cache: bool, request: pytest.FixtureRequest
) -> None:
    workload = request.getfixturevalue(name)
    ours, theirs = workload.split(count, clustering, window_cache), by_hand(workload, count, clustering, window_cache)
    for part in ("compute", "rows", "grads"):
        assert list(getattr(ours, part)) == pytest.approx(getattr(theirs, part)), part
    assert len(ours.rows) == count and sum(ours.compute) == pytest.approx(1)
    if window_cache:
        assert sum(ours.rows) == pytest.approx(1) and sum(ours.grads) == pytest.approx(1)
    else:
        assert sum(ours.rows) == sum(ours.grads) > 1.01, "rows of several micro-batches travel again"


def test_a_batch_in_one_piece_has_all_of_everything() -> None:
    workload = made([Batch({"a": Jagged.from_lists([[1], [2]])})])
    assert workload.split(1) == Split((1.0,), (1.0,), (1.0,))


def test_a_micro_batch_of_no_samples_has_no_share() -> None:
    workload = made([Batch({"a": Jagged.from_lists([[1], [2]])})])
    split = workload.split(3)
    assert sorted(split.compute) == [0, 0.5, 0.5] and sum(split.rows) == pytest.approx(1)


def test_data_without_samples_is_told() -> None:
    with pytest.raises(ValueError, match="empty"):
        of_config(clicks(), batches=0)

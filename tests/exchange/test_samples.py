from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe import Batch, Feature, Jagged
from nestpipe.exchange.samples import Dealer, pack, parts_of, token_feature, unpack
from nestpipe.exchange.transport import Transport
from tests.cluster import Cluster, in_a_group
from tests.data.data_samples import assert_same


def every_kind(size: int, seed: int = 0) -> Batch:
    """Every kind of part that a batch may have; sample i of rank r is known by its number."""
    rng, draws = np.random.default_rng(seed), torch.Generator().manual_seed(int(seed))

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, generator=draws, dtype=dtype)

    lengths = torch.from_numpy(rng.integers(0, 9, size))
    total = int(lengths.sum())
    return Batch(
        {
            "history": Jagged.from_lengths(torch.from_numpy(rng.integers(-9, 9, total)), lengths),
            "liked": Jagged.from_lengths(torch.arange(2 * size), torch.full((size,), 2), floats(2 * size)),
        },
        {
            "number": torch.arange(size) + 1000 * seed,
            "flag": torch.arange(size) % 2 == 0,
            "half": floats(size, 3).bfloat16(),
            "wide": floats(size, 2, 3, dtype=torch.float64),
            "nothing": floats(size, 0),
            "moments": Jagged.from_lengths(floats(total, 2), lengths),
        },
        floats(size),
    )


@pytest.mark.parametrize("size", [0, 1, 7])
def test_what_is_packed_comes_out_as_it_was(size: int) -> None:
    batch = every_kind(size)
    again = unpack(pack(batch), parts_of(batch), size)
    assert_same(again, batch)
    assert list(again.keys) == list(batch.keys) and list(again.dense) == list(batch.dense)
    assert again.dense["half"].dtype == torch.bfloat16 and again.dense["wide"].shape == (size, 2, 3)
    assert again.keys["liked"].weights is not None


def test_batches_without_labels_or_keys_are_packed_too() -> None:
    for batch in (Batch({}, {"x": torch.rand(3)}), Batch({"k": Jagged.from_lists([[1], [], [2]])})):
        assert_same(unpack(pack(batch), parts_of(batch), 3), batch)


def test_labels_may_be_lists() -> None:
    labels = Jagged.from_lists([[1.0, 0.0], [], [0.5]], dtype=torch.float32)
    batch = Batch({"k": Jagged.from_lists([[1], [], [2]])}, labels=labels)
    again = unpack(pack(batch), parts_of(batch), 3)
    assert isinstance(again.labels, Jagged)
    assert_same(again, batch)
    assert_same(Batch.joined([batch.slice(0, 1), batch.slice(1, 3)]), batch)


def test_nothing_of_a_batch_is_a_batch_with_its_parts() -> None:
    empty = unpack(np.empty(0, np.uint8), parts_of(every_kind(3)), 0)
    assert empty.size == 0 and parts_of(empty) == parts_of(every_kind(3))


def test_tokens_are_the_keys_of_the_first_sequence() -> None:
    bag, first, second = Feature("user", "t", "sum"), Feature("history", "t"), Feature("negatives", "t")
    assert token_feature([bag, first, second]) == "history"
    assert token_feature([bag]) is None


def dealt(sizes: list[int]) -> tuple[list[int], list[int], list[int], float, float]:
    def work() -> tuple[list[int], list[int], list[int], float, float]:
        dealer = Dealer(Transport(torch.distributed.group.WORLD), "history")
        rank = dealer.transport.rank
        batch = every_kind(sizes[rank], rank) if sizes[rank] else Batch.empty(["history"])
        told = dealer.meet(7 + rank, batch)
        assert told.state_W.tolist() == [7 + w for w in range(len(sizes))] and told.size_W.tolist() == sizes
        part = dealer.deal(batch, told, 0.1)
        for k, (home, number) in enumerate(zip(part.home, part.order, strict=True)):
            theirs = every_kind(sizes[home], home)
            assert_same(part.batch.select(torch.tensor([k])), theirs.select(torch.tensor([number])))
        numbers = part.batch.dense["number"].tolist()  # type: ignore[union-attr]
        return numbers, part.home.tolist(), part.order.tolist(), part.before, part.after

    return in_a_group(work)


@pytest.mark.parametrize("sizes", [[5], [6, 6], [9, 0, 3], [0, 0, 14], [1, 1, 1]])
def test_every_sample_is_on_one_worker_in_the_order_of_the_global_batch(cluster: Cluster, sizes: list[int]) -> None:
    parts = cluster.run(len(sizes), dealt, sizes)
    numbers = [number for part in parts for number in part[0]]
    assert sorted(numbers) == [1000 * rank + i for rank, size in enumerate(sizes) for i in range(size)]
    for mine, home, order, *_ in parts:
        assert mine == [1000 * h + i for h, i in zip(home, order, strict=True)] == sorted(mine)
    before, after = (np.array([part[k] for part in parts]) for k in (3, 4))
    assert before.sum() == pytest.approx(after.sum()) and after.max() <= before.max()

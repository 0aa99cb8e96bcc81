"""Reading batches back into plain samples, so that tests can compare what ranks saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nestpipe.batch import Batch, Jagged, check_batch
from nestpipe.data import Dataset

Sample = tuple[Any, ...]


def samples_of(batch: Batch) -> list[Sample]:
    columns: list[list[Any]] = [[tuple(keys) for keys in jagged.to_lists()] for jagged in batch.keys.values()]
    for part in batch.dense.values():
        rows = part.to_lists() if isinstance(part, Jagged) else part.tolist()
        columns.append([tuple(row) if isinstance(row, list) else row for row in rows])
    if batch.labels is not None:
        labels = batch.labels
        columns.append([tuple(x) for x in labels.to_lists()] if isinstance(labels, Jagged) else labels.tolist())
    return list(zip(*columns, strict=True))


def read(
    dataset: Dataset, split: str, *, batch_size: int, world: int = 1, rank: int = 0, seed: int = 0, epoch: int = 0
) -> Iterator[Batch]:
    for batch in dataset.batches(split, batch_size=batch_size, rank=rank, world=world, seed=seed, epoch=epoch):
        check_batch(batch, dataset.features)
        assert batch.size <= batch_size
        yield batch


def read_samples(dataset: Dataset, split: str, **options: int) -> list[Sample]:
    return [sample for batch in read(dataset, split, **options) for sample in samples_of(batch)]


def all_ranks(dataset: Dataset, split: str, *, world: int, **options: int) -> list[Sample]:
    return [s for rank in range(world) for s in read_samples(dataset, split, world=world, rank=rank, **options)]


def global_batches(dataset: Dataset, split: str, *, world: int, **options: int) -> list[list[Sample]]:
    """Batch t of all ranks, in rank order."""
    ranks = [
        [samples_of(batch) for batch in read(dataset, split, world=world, rank=r, **options)] for r in range(world)
    ]
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


def same(left: Batch, right: Batch) -> bool:
    assert left.keys.keys() == right.keys.keys()
    return samples_of(left) == samples_of(right) and all(
        torch.equal(left.keys[name].offsets, right.keys[name].offsets) for name in left.keys
    )


def parts(batch: Batch) -> dict[str, torch.Tensor]:
    tensors = {}
    for kind, group in (("keys", batch.keys), ("dense", batch.dense), ("", {"labels": batch.labels})):
        for name, part in group.items():
            if isinstance(part, Jagged):
                tensors |= {
                    f"{kind} {name} {field}": tensor for field, tensor in vars(part).items() if tensor is not None
                }
            elif part is not None:
                tensors[f"{kind} {name}"] = part
    return tensors


def assert_same(left: Batch, right: Batch) -> None:
    ours, theirs = parts(left), parts(right)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        bits = [
            t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (tensor, theirs[name])
        ]
        assert torch.equal(*bits), name

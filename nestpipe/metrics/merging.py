"""How metrics of several workers become one: whole numbers are summed, so that neither the number of workers nor the order of
batches can change the last digit. And what all metrics check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Fixed point: 2**-40 is far below what a loss of float32 predictions means, and integers add up in any order.
FIXED_POINT = 2**40


def check_pairs(predictions: Tensor, labels: Tensor) -> None:
    if predictions.ndim != 1 or predictions.shape != labels.shape:
        shapes = f"{tuple(predictions.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"predictions and labels must both be [B], got {shapes}; flatten them")
    if torch.isnan(predictions).any():
        sample = int(torch.isnan(predictions).nonzero()[0])
        raise ValueError(f"the prediction for sample {sample} is NaN; look at the model's weights")


def check_shares(metric: str, predictions: Tensor, labels: Tensor) -> None:
    """Probabilities, and labels from 0 to 1."""
    check_pairs(predictions, labels)
    for what, values in (("prediction", predictions), ("label", labels)):
        wrong = ~((values >= 0) & (values <= 1))
        if wrong.any():
            sample = int(wrong.nonzero()[0])
            raise ValueError(
                f"{metric}: {what} {values[sample].item()} of sample {sample} is outside [0, 1]; "
                f"give probabilities, not logits"
            )


def check_binary(metric: str, labels: Tensor) -> Tensor:
    """Whether each label is 1."""
    positive = labels == 1
    wrong = ~(positive | (labels == 0))
    if wrong.any():
        sample = int(wrong.nonzero()[0])
        raise ValueError(f"{metric}: label {labels[sample].item()} of sample {sample} is neither 0 nor 1; binarize it")
    return positive


def check_cut(metric: str, k: int | None) -> None:
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f"{metric}: k must be a whole number of at least 1, got {k!r}")


def fixed_sum(values: np.ndarray) -> int:
    # At most 28 x 2**40 per value: the parts keep an int64 from overflowing, Python's integers take the rest.
    fixed = np.rint(values * FIXED_POINT).astype(np.int64)
    return sum(int(fixed[start : start + 2**16].sum()) for start in range(0, len(fixed), 2**16))


def weighted_sum(shares: np.ndarray, counts: np.ndarray) -> int:
    """Of counts x shares (from 0 to 1), in fixed point. Python's integers: a long list times a large weight does not fit 64
    bits."""
    return sum(int(c) * int(s) for c, s in zip(counts, np.rint(shares * FIXED_POINT), strict=True))


def merging(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _device(group: Any) -> torch.device:
    # Accelerator backends move accelerator memory only; gloo is the one for host memory.
    accelerator = None if "gloo" in dist.get_backend(group) else torch.accelerator.current_accelerator()
    return accelerator or torch.device("cpu")


def sum_over_workers(numbers: Sequence[int], group: Any) -> list[int]:
    """Sums of whole numbers of any size (not negative): two halves travel, so that int64 suffices."""
    if not merging(group):
        return list(numbers)
    halves = torch.tensor([[n >> 40, n & (2**40 - 1)] for n in numbers], dtype=torch.int64, device=_device(group))
    dist.all_reduce(halves, group=group)
    return [(high << 40) + low for high, low in halves.tolist()]


def gather(values: Tensor, group: Any) -> Tensor:
    """The values of all workers, end to end."""
    if not merging(group):
        return values
    device, world = _device(group), dist.get_world_size(group)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(values)
    dist.all_reduce(sizes, group=group)
    padded = torch.zeros(int(sizes.max()), dtype=values.dtype, device=device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]).cpu()


def deal(worker: Tensor, columns: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Each entry of the columns goes to the worker that is named for it; returns what came to this one."""
    if not merging(group):
        return list(columns)
    device, world = _device(group), dist.get_world_size(group)
    order = worker.argsort(stable=True)
    leaves = torch.bincount(worker, minlength=world).to(device)
    comes = torch.empty_like(leaves)
    dist.all_to_all_single(comes, leaves, group=group)
    dealt = []
    for column in columns:
        sent = column[order].to(device)
        received = torch.empty(int(comes.sum()), dtype=column.dtype, device=device)
        dist.all_to_all_single(received, sent, comes.tolist(), leaves.tolist(), group=group)
        dealt.append(received.cpu())
    return dealt

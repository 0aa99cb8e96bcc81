"""Requests to rankers: histories, candidates, times; and how far two lists of scores are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.batch import Batch, Jagged
from nestpipe.models import Ranker

DIM = 16
CATALOGUE = 50


def make_requests(
    lengths: list[int], counts: list[int], *, dim: int = DIM, seed: int = 0
) -> tuple[Batch, dict[str, Jagged]]:
    """Users with so many items and candidates."""
    generator = torch.Generator().manual_seed(seed)

    def keys(sizes: list[int]) -> Jagged:
        drawn = torch.randint(CATALOGUE, (sum(sizes),), generator=generator)
        return Jagged.from_lengths(drawn, torch.tensor(sizes, dtype=torch.int64))

    history, candidates = keys(lengths), keys(counts)
    times = history.like(torch.randint(10**5, (sum(lengths),), generator=generator).cumsum(0))
    now = torch.full((len(lengths),), int(times.values.max()) + 60 if sum(lengths) else 60)
    labels = candidates.like((torch.rand(sum(counts), generator=generator) < 0.4).float())
    batch = Batch({"history": history, "candidates": candidates}, {"timestamps": times, "now": now}, labels)
    rows = {
        name: part.like(torch.randn(len(part.values), dim, generator=generator).mul_(0.3).requires_grad_())
        for name, part in batch.keys.items()
    }
    return batch, rows


def make_ranker(kind: type[Ranker], **changes) -> Ranker:
    torch.manual_seed(1)
    settings = {"dim": DIM, "num_layers": 3, "num_heads": 2, "max_length": 400, "num_time_buckets": 32}
    model = kind(**(settings | changes))
    # Biases by distance and time, and scores, begin small: larger ones, so that a wrong distance shows.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_" in name or "time_" in name or name == "score_weight":
                parameter.mul_(10)
    return model.eval()


def full_pass(model: Ranker, batch: Batch, rows: dict[str, Jagged]) -> Jagged:
    times, now = batch.dense["timestamps"], batch.dense["now"]
    return model.rank([None] * batch.size, rows["history"], rows["candidates"], times=times, now=now)


def relay(
    model: Ranker, batch: Batch, rows: dict[str, Jagged], tails: list[int], dtype: torch.dtype | None = None
) -> Jagged:
    """The same in two steps: all but the last items as a prefix."""
    heads = batch.keys["history"].lengths - torch.tensor(tails)
    (first, last), (first_times, last_times) = (
        part.split(heads) for part in (rows["history"], batch.dense["timestamps"])
    )
    prefixes = [prefix.to(dtype=dtype) for prefix in model.prefix(first, first_times)]
    return model.rank(prefixes, last, rows["candidates"], times=last_times, now=batch.dense["now"])


def apart(scores: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest score."""
    if not len(expected):
        return 0.0
    return float((scores - expected).abs().max() / expected.abs().max())

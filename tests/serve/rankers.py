"""A small ranker, trained a little, and its bundles: one in full, and a delta that lies beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nestpipe import Batch, Feature, Jagged, RowwiseAdagrad, Table, Trainer
from nestpipe.export import export_bundle
from nestpipe.kinds import arguments, made, model_class
from nestpipe.serve.messages import Ask, Signal

ITEMS, LENGTH = 500, 256
RECIPE = {
    "kind": "hstu_ranker",
    "dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_length": LENGTH,
    "num_time_buckets": 16,
}


def export_two(folder: Path, recipe: dict[str, object] = RECIPE) -> list[Path]:
    """A bundle and a delta: of a training of a few steps, and some more."""
    torch.manual_seed(3)
    table = Table("item", 16, optimizer=RowwiseAdagrad(lr=0.5))
    features = [Feature("history", "item"), Feature("candidates", "item")]
    model = made("model", model_class(recipe), arguments(recipe))
    with torch.no_grad():  # so that a wrong place or time shows in scores
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    bundles = [folder / "bundle", folder / "delta"]
    with Trainer(model, [table], features, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2)) as trainer:
        trainer.recipe = recipe
        saving = trainer.checkpoints(folder / "checkpoints", keep=2)
        for part, bundle in enumerate(bundles):
            for step in range(3):
                trainer.step(_batch(3 * part + step))
            trainer.checkpoint(saving)
            saving.wait()
            checkpoint = folder / "checkpoints" / f"step-{3 * part + 3:09d}"
            export_bundle(checkpoint, bundle, since=bundles[0] if part else None)
    return bundles


def _batch(seed: int) -> Batch:
    asks = [make_ask(np.random.default_rng([seed, sample]), f"{sample}") for sample in range(8)]
    histories = [torch.from_numpy(ask.history) for ask in asks]
    lengths = torch.tensor([len(part) for part in histories])
    candidates = Jagged.from_lengths(
        torch.cat([torch.from_numpy(ask.candidates) for ask in asks]),
        torch.tensor([len(ask.candidates) for ask in asks]),
    )
    times = Jagged.from_lengths(torch.cat([torch.from_numpy(ask.times) for ask in asks]), lengths)
    now = torch.tensor([int(ask.now or 0) for ask in asks])
    keys = {"history": Jagged.from_lengths(torch.cat(histories), lengths), "candidates": candidates}
    labels = candidates.like((candidates.values % 2).float())
    return Batch(keys, {"timestamps": times, "now": now}, labels)


def make_ask(
    rng: np.random.Generator, user: str, *, length: int | None = None, candidates: int | None = None, seed: int = 0
) -> Ask:
    """The user's history is the first items of one that the user's name determines: it only grows."""
    length = int(rng.integers(0, LENGTH + 1)) if length is None else length
    history, times = history_of(user, length, seed=seed)
    count = int(rng.integers(1, 20)) if candidates is None else candidates
    now = float(times[-1] + 60 if length else 60)
    return Ask(user, history, rng.integers(0, 2 * ITEMS, count), times=times, now=now)


def history_of(user: str, length: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng([seed, *user.encode()])
    items, gaps = drawn.integers(0, ITEMS, LENGTH), drawn.integers(1, 10_000, LENGTH)
    return items[:length], gaps.cumsum()[:length]


def signal_of(ask: Ask, tail: int = 4) -> Signal:
    """What was known of it a little before."""
    known = max(0, len(ask.history) - tail)
    times = None if ask.times is None else ask.times[:known]
    return Signal(ask.user, ask.history[:known], times, candidates=len(ask.candidates))

"""A bundle to measure with: a ranker of any size whose weights and rows are drawn, not learned.

How long a ranking takes does not depend on what they say.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.export import export_bundle
from nestpipe.kinds import arguments, made, model_class
from nestpipe.optim import RowwiseAdagrad
from nestpipe.serve.bundle import Bundle
from nestpipe.tables import Feature, Table
from nestpipe.trainer import Trainer

HISTORY = 16  # items of the only sample that it is trained on


@dataclasses.dataclass(frozen=True)
class Ranker:
    """longest: items of a history that it takes. items: that there are."""

    dim: int = 64
    layers: int = 4
    heads: int = 2
    longest: int = 8_400
    items: int = 5_000


def make_bundle(ranker: Ranker, folder: Path) -> Path:
    """Trains one step, in which all rows are born, and exports. Gives the bundle's path."""
    recipe = {
        "kind": "hstu_ranker",
        "dim": ranker.dim,
        "num_layers": ranker.layers,
        "num_heads": ranker.heads,
        "max_length": ranker.longest,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = made("model", model_class(recipe), arguments(recipe))
        with Trainer(
            model,
            [Table("item", ranker.dim, optimizer=RowwiseAdagrad(lr=0.05))],
            [Feature("history", "item"), Feature("candidates", "item")],
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
        ) as trainer:
            trainer.recipe = recipe
            trainer.step(_all_items(ranker.items))
            trainer.save(folder / "trained")
    export_bundle(folder / "trained", folder / "bundle")
    return folder / "bundle"


def _all_items(items: int) -> Batch:
    keys = torch.arange(items)
    history = Jagged.from_lengths(keys[:HISTORY], torch.tensor([min(HISTORY, items)]))
    candidates = Jagged.from_lengths(keys, torch.tensor([items]))
    return Batch({"history": history, "candidates": candidates}, {}, candidates.like((keys % 2).float()))


def item_keys(bundle: Bundle) -> np.ndarray:
    """Keys of the items that a ranker's candidates are rows of."""
    name = str(getattr(bundle.model, "candidates", "candidates"))
    table = next((feature.table for feature in bundle.features if feature.name == name), None)
    if table is None:
        raise ValueError(
            f"the bundle has no feature {name!r}, so there is nothing to rank; load is for bundles of rankers"
        )
    return np.sort(bundle.keys(table))
